"""A cluster, and how long its collectives take: latency and bandwidth, and round trips between nodes.

N GPUs on M nodes of G. A node's GPUs share its network, R bytes a second each way; within a node a GPU sends B. A
message takes a seconds between nodes, b within one. S are the bytes of all gradients, s those of one rank's messages, r
those of all that comes back to it: s, or N s with direct replies, which need no all-to-all.

    all-reduce    2 (G-1)/G S/B + 2 (M-1)/M S/R         + 2 (G-1) b + 2 (M-1) a      uncompressed: rings
                  2 (G-1)/G S/B + 2 S/R                 + 2 (G-1) b + 2 log2(M) a    or NCCL's trees, where faster
    all-to-all    max(G (N-G)/N s/R, (G-1)/N s/B)       + (N-G) a + (G-1) b          gather
    all-gather    (N-1)/N r / min(R, B)                 + (M-1) a + (N-M) b          scatter, or the direct exchange
    agreement     2 ceil(log2 N) a, over Gloo           (N-G) a + (G-1) b            one number, every step of ours

A round trip between nodes is waited for apart, a `message` being all of it over Gloo and half of it over NCCL:

    all-to-all    1 message: all leave at once
    all-gather    1 over Gloo in pairs, half of it where the receive began before; else M - 1, from node to node
    agreement     1 over Gloo; 2 ceil(log2 M) over NCCL's trees
    all-reduce    2 (M - 1) around a ring, 2 ceil(log2 M) over NCCL's trees. Gloo has but w segments under way: n of
                  them, each b seconds on the link, take n / w max(w b, b + message) + min((w - 1) b, message), twice

Every rank sends to every other, one message after the other; the all-gather is a ring over all ranks that enters each
node once. Left out: congestion, stragglers, lost packets, how much TCP lets be under way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from onebit.collectives.transport.torch import MOST_IN_PAIRS, SMALL

Levels = Literal[1, 2]
Transport = Literal["nccl", "gloo"]
# Round trips of a message. Gloo sends it when its receiver has said that it waits: half a round trip for that, half for
# the message (measured: docs/performance.md). NCCL's sockets send at once (assumed).
ROUND_TRIPS: dict[Transport, float] = {"nccl": 0.5, "gloo": 1.0}
SEGMENT, UNDER_WAY = 2**20, 2  # of Gloo's all-reduce: the most bytes, and how many are on their way; 2 a rank at least


@dataclass(frozen=True)
class Cluster:
    """The cluster, and the constants of the model. Seconds, bytes a second, bit/s."""

    gpus: int
    network: float  # bit/s a node and direction: what arrives, not what the cable could do
    gpus_per_node: int = 8
    latency: float = 20e-6  # of a message, that no other hides: assumed
    intra: float = 360e9  # assumed: 80 % of an H100's NVLink, 450 GB/s each way by its data sheet
    intra_latency: float = 5e-6  # assumed
    memory: float = 3.015e12  # that a pass reaches, assumed: 90 % of an H100's by its data sheet
    rates: Mapping[str, float] = field(default_factory=dict)  # of passes that were measured
    rtt: float = 0.0  # as much of it as a rack has is in the latency
    transport: Transport = "nccl"
    shared: bool | None = None  # whether ranks share hosts; None: as nodes have several

    def __post_init__(self) -> None:
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.gpus} GPUs do not fill nodes of {self.gpus_per_node}: give a multiple of {self.gpus_per_node}, "
                f"or another number of GPUs a node"
            )

    @property
    def on_node(self) -> int:
        """G"""
        return min(self.gpus, self.gpus_per_node)

    @property
    def nodes(self) -> int:
        """M"""
        return self.gpus // self.on_node

    @property
    def message(self) -> float:
        """Seconds until a message between nodes has arrived, beside latency and bytes."""
        return ROUND_TRIPS[self.transport] * self.rtt if self.nodes > 1 else 0.0

    def all_reduce(self, size: float, at_once: int = 1) -> float:
        """Seconds for `size` bytes, uncompressed, in so many parts `at_once`."""
        g, m = self.on_node, self.nodes
        within = 2 * (g - 1) / g * size / self.intra + 2 * (g - 1) * self.intra_latency
        sent, hops = 2 * (m - 1) / m * 8 * size / self.network, 2 * (m - 1)
        if self.transport == "gloo":
            return within + hops * self.latency + self._segments(size, sent, at_once)
        ring = sent + hops * (self.latency + self.message)
        trees = 2 * 8 * size / self.network + 2 * math.ceil(math.log2(m)) * (self.latency + self.message)
        return within + min(ring, trees) if m > 1 else within

    def _segments(self, size: float, seconds: float, at_once: int) -> float:
        """Seconds of Gloo's all-reduces of `size` bytes in all, so many `at_once`. seconds: their bytes' time."""
        if not self.message:
            return seconds
        each = max(2, math.ceil(size / at_once / self.nodes / SEGMENT))
        count, most = at_once * (self.nodes - 1) * each, at_once * UNDER_WAY
        b = seconds / 2 / count
        return 2 * (count / most * max(most * b, b + self.message) + min((most - 1) * b, self.message))

    def all_to_all(self, size: float) -> float:
        """Seconds that it keeps the network where every rank has `size` bytes, 1/N of them for each; message apart."""
        n, g = self.gpus, self.on_node
        between, within = g * (n - g) / n * 8 * size / self.network, (g - 1) / n * size / self.intra
        return max(between, within) + (n - g) * self.latency + (g - 1) * self.intra_latency

    def all_gather(self, size: float) -> float:
        """Seconds that it keeps the network until every rank has `size` bytes, 1/N of them from each; delay apart."""
        n, m = self.gpus, self.nodes
        rate = self.intra if m == 1 else min(self.intra, self.network / 8)
        return (n - 1) / n * size / rate + (m - 1) * self.latency + (n - m) * self.intra_latency

    def all_gather_delay(self, row: float, expected: bool) -> float:
        """`row`: bytes of a rank. `expected`: whether every receive has begun long before (`EarlyReceiver`)."""
        shared = self.on_node > 1 if self.shared is None else self.shared
        if self.transport == "nccl":
            return (self.nodes - 1) * self.message
        if self.gpus <= MOST_IN_PAIRS and (self.gpus == 2 or row <= SMALL or not shared):
            return self.message / 2 if expected else self.message
        return self.message if row <= SMALL else (self.nodes - 1) * self.message

    def agreement(self) -> float:
        """Seconds in which all ranks agree on one number."""
        n, g, hop = self.gpus, self.on_node, self.latency if self.nodes > 1 else self.intra_latency
        if self.transport == "gloo" and n > 2:
            return (n - g) * self.latency + (g - 1) * self.intra_latency + self.message
        rounds = math.ceil(math.log2(self.nodes)) if self.transport == "nccl" else 1
        return 2 * math.ceil(math.log2(n)) * hop + 2 * rounds * self.message


@dataclass(frozen=True)
class Groups:
    """Who exchanges with whom in stage 2, as in `onebit.collectives.topology`, each as a cluster of its own.

    replicas    what exchanges over the network: with one level all GPUs, with two the nodes, as one GPU each
    node        what averages first and shares what arrives: with one level a GPU alone, with two those of a node
    """

    replicas: Cluster
    node: Cluster

    @classmethod
    def of(cls, cluster: Cluster, levels: Levels) -> Groups:
        if levels == 1 or cluster.nodes == 1 or cluster.on_node == 1:
            return cls(cluster, replace(cluster, gpus=1))
        g = cluster.on_node
        nodes = replace(cluster, gpus=cluster.nodes, gpus_per_node=1, intra=g * cluster.intra, shared=True)
        return cls(nodes, replace(cluster, gpus=g))

    @property
    def slices(self) -> int:
        """The number of slices of a chunk."""
        return self.node.gpus

"""How long a training step takes on a cluster that is not at hand: a model of latency and bandwidth.

N GPUs on M nodes of G. A node's GPUs share its network, R bytes a second each way; within a node a GPU sends B. A
message takes a seconds between nodes, b within one. S are the bytes of all gradients, s those of one rank's messages, r
those of all that comes back to it: s, 2 s with replies of 2 bits, N s with direct ones, which need no all-to-all.

    all-reduce    2 (G-1)/G S/B + 2 (M-1)/M S/R         + 2 (G-1) b + 2 (M-1) a      uncompressed
    all-to-all    max(G (N-G)/N s/R, (G-1)/N s/B)       + (N-G) a + (G-1) b          gather
    all-gather    (N-1)/N r / min(R, B)                 + (M-1) a + (N-M) b          scatter, or the direct exchange
    agreement     2 ceil(log2 N) a                                                   one number, every step of ours
    a pass        elements x bytes an element / (memory bandwidth x efficiency)

The uncompressed all-reduce gets the best there is: reduce-scatter within nodes, rings between them, all-gather within
nodes, which sends the fewest bytes. Ours is as `onebit.collectives` does it: every rank sends to every other, so that a
node of G GPUs sends G times what one rank sends, and one message after the other. The all-gather is a ring over all
ranks that enters each node once. Stage 2 plays the schedule of `Exchange.run` through, for the best number of chunks.

    uncompressed  forward + backward + all-reduce + update
    stage 1       forward + backward + all-reduce + scan + agreement + update
    stage 2       forward + backward + scan + agreement + {compress, all-to-all, average, all-gather, update} in chunks

(LAMB updates after the last chunk, and reads its statistics first.) With `overlap` communication hides behind the
backward of the last micro-batch, all but that of DDP's last bucket. Left out: congestion, stragglers, the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from onebit.collectives.chunking import candidates
from onebit.collectives.direct import Direct
from onebit.collectives.exchange import Exchange
from onebit.collectives.reply import AskedReply, check_reply, way_for
from onebit.kernels.data.checks import is_finite, is_whole
from onebit.kernels.data.layout import BLOCK_SIZE
from onebit.kernels.data.wire import Format
from onebit.kernels.passes import bytes_per_element

BUCKET = 25 * 2**20  # bytes: DistributedDataParallel's default
SLOWEST, FASTEST = 1e6, 1e13  # bit/s: the range of `pays_below`
Overlap = Literal["none", "uncompressed", "both"]


def _constant(default: float, source: str) -> Any:
    return field(default=default, metadata={"source": source})


@dataclass(frozen=True)
class Cluster:
    """The cluster, and every constant of the model with its source."""

    gpus: int
    network: float  # bit/s a node and direction: what arrives, not what the cable could do
    gpus_per_node: int = 8
    latency: float = _constant(20e-6, "assumed")  # seconds
    intra: float = _constant(360e9, "assumed: 80 % of an H100's NVLink, 450 GB/s each way by its data sheet")  # B/s
    intra_latency: float = _constant(5e-6, "assumed")  # seconds
    memory: float = _constant(3.35e12, "data sheet of an H100 SXM")  # B/s
    efficiency: float = _constant(0.9, "assumed: the project's target, not yet measured on a GPU")  # of memory
    cores: float = _constant(1.0, "a GPU, or a CPU with a core a rank")  # that a rank has, less where ranks share them
    rates: Mapping[str, float] = field(default_factory=dict)  # B/s of passes that were measured

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "rates":
                continue
            least = "0 or more" if "latency" in each.name else "above 0"
            if not is_finite(value) or value < 0 or (value == 0 and "latency" not in each.name):
                raise ValueError(f"{each.name} is {value}: it is a finite number {least}")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.gpus} GPUs do not fill nodes of {self.gpus_per_node}: give a multiple of {self.gpus_per_node}, "
                f"or another number of GPUs a node"
            )
        if self.efficiency > 1 or self.cores > 1:
            raise ValueError(
                f"efficiency is {self.efficiency} and cores is {self.cores}: both are shares, give 1 or less"
            )

    @property
    def on_node(self) -> int:
        """G"""
        return min(self.gpus, self.gpus_per_node)

    @property
    def nodes(self) -> int:
        """M"""
        return self.gpus // self.on_node

    def all_reduce(self, size: float) -> float:
        """Seconds for `size` bytes, uncompressed."""
        g, m = self.on_node, self.nodes
        within = 2 * (g - 1) / g * size / self.intra + 2 * (g - 1) * self.intra_latency
        return within + 2 * (m - 1) / m * size / self._rate + 2 * (m - 1) * self.latency

    def all_to_all(self, size: float) -> float:
        """Seconds where every rank has `size` bytes, 1/N of them for each."""
        n, g = self.gpus, self.on_node
        between, within = g * (n - g) / n * size / self._rate, (g - 1) / n * size / self.intra
        return max(between, within) + (n - g) * self.latency + (g - 1) * self.intra_latency

    def all_gather(self, size: float) -> float:
        """Seconds until every rank has `size` bytes, 1/N of them from each."""
        n, m = self.gpus, self.nodes
        rate = self.intra if m == 1 else min(self.intra, self._rate)
        return (n - 1) / n * size / rate + (m - 1) * self.latency + (n - m) * self.intra_latency

    def agreement(self) -> float:
        """Seconds in which all ranks agree on one number."""
        hop = self.latency if self.nodes > 1 else self.intra_latency
        return 2 * math.ceil(math.log2(self.gpus)) * hop

    @property
    def _rate(self) -> float:
        return self.network / 8


@dataclass(frozen=True)
class Model:
    """What is trained, and how."""

    elements: int
    itemsize: int = 2  # bytes of a parameter and of a gradient
    forward: float = 0.0  # seconds of one micro-batch, as is backward
    backward: float = 0.0
    accumulation: int = 1  # micro-batches a step
    optimizer: Literal["adam", "lamb"] = "adam"
    warmup: float = 0.15  # share of the steps that are stage 1
    overlap: Overlap = "uncompressed"
    reply: AskedReply = "auto"
    local: float | None = None  # seconds of an optimizer's own work in any stage; None: those of its passes

    def __post_init__(self) -> None:
        if not is_whole(self.elements, least=1) or not is_whole(self.accumulation, least=1):
            raise ValueError(
                f"elements is {self.elements}, accumulation is {self.accumulation}: both are whole numbers, 1 or more"
            )
        check_reply(self.reply)
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is {self.warmup}: it is a share of the steps, from 0 to 1")
        for name in ("forward", "backward", "local"):
            seconds = getattr(self, name)
            if seconds is not None and not (is_finite(seconds) and seconds >= 0):
                raise ValueError(f"{name} is {seconds}: it is a finite time, 0 or more")


@dataclass(frozen=True)
class Step:
    """Seconds, part by part. `communication` is what neither backward nor passes hide."""

    forward: float
    backward: float
    communication: float
    local: float
    chunks: int = 1

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.communication + self.local


def pass_seconds(
    name: str, elements: float, cluster: Cluster, itemsize: int, way: type[Exchange] | None = None
) -> float:
    """One pass of one rank on `elements`."""
    copies, reply_bits = (1, 1) if way is None else (cluster.gpus // way.shards(cluster.gpus), way.reply_bits)
    each = bytes_per_element(
        name, itemsize, master=itemsize < 4, packed=True, ranks=cluster.gpus, copies=copies, reply_bits=reply_bits
    )
    rate = cluster.rates.get(name, cluster.memory * cluster.efficiency)
    return elements * each / rate / cluster.cores


def message_bytes(elements: int, ranks: int, chunks: int, way: type[Exchange]) -> tuple[int, int]:
    """Bytes of all chunks: what one rank compresses for servers, and what every rank then has of all; itself included.

    Without servers all goes to all at once.
    """
    shards = way.shards(ranks)
    form = Format(BLOCK_SIZE, -(-elements // (BLOCK_SIZE * shards * chunks)))
    if way is Direct:
        return 0, ranks * chunks * form.nbytes
    return ranks * chunks * form.nbytes, ranks * chunks * form.with_bits(way.reply_bits).nbytes


def exchange(
    elements: int, cluster: Cluster, itemsize: int, chunks: int, use: str | None, way: type[Exchange]
) -> tuple[float, float]:
    """Seconds of `Exchange.run` with a pass `use` on the replies, and the seconds of its passes alone."""
    gathered, replied = (size / chunks for size in message_bytes(elements, cluster.gpus, chunks, way))
    part = elements / chunks
    compress = pass_seconds("compress", part, cluster, itemsize, way)
    used = pass_seconds(use, part, cluster, itemsize, way) if use else 0.0
    if way is Direct:
        return sent_once(chunks, compress, cluster.all_gather(replied), used), chunks * (compress + used)
    average = pass_seconds("average", part / cluster.gpus, cluster, itemsize, way)
    total = pipelined(
        chunks,
        compress=compress,
        gather=cluster.all_to_all(gathered),
        average=average,
        scatter=cluster.all_gather(replied),
        use=used,
    )
    return total, chunks * (compress + average + used)


def sent_once(chunks: int, compress: float, exchange: float, use: float) -> float:
    """`Direct.run`: passes one after the other on the device, collectives one after the other on the network."""
    device = network = 0.0
    arrived = [0.0] * chunks
    for j in range(chunks + 1):
        if j < chunks:
            device += compress
            arrived[j] = network = max(network, device) + exchange
        if j >= 1:
            device = max(device, arrived[j - 1]) + use
    return device


def pipelined(chunks: int, compress: float, gather: float, average: float, scatter: float, use: float) -> float:
    """`TwoPhases.run`: the same with two collectives, and an average between them."""
    device = network = 0.0
    gathered, scattered = [0.0] * chunks, [0.0] * chunks
    for j in range(chunks + 2):
        if j < chunks:
            device += compress
            gathered[j] = network = max(network, device) + gather
        if 1 <= j <= chunks:
            device = max(device, gathered[j - 1]) + average
            scattered[j - 1] = network = max(network, device) + scatter
        if j >= 2:
            device = max(device, scattered[j - 2]) + use
    return device


def compressed_all_reduce(
    elements: int, cluster: Cluster, itemsize: int = 4, chunks: int | None = None, reply: AskedReply = "auto"
) -> float:
    """Seconds of a call of CompressedAllReduce, for the best number of chunks where none is given."""
    way = way_for(reply, cluster.gpus)
    options = candidates(elements, way.shards(cluster.gpus), BLOCK_SIZE) if chunks is None else [chunks]
    scan = pass_seconds("scan", elements, cluster, itemsize) + cluster.agreement()
    return scan + min(exchange(elements, cluster, itemsize, chunks=c, use="decode", way=way)[0] for c in options)


def uncompressed(model: Model, cluster: Cluster, itemsize: int | None = None) -> Step:
    """A step with gradients all-reduced in `itemsize` bytes, by default their own."""
    time = cluster.all_reduce(model.elements * (model.itemsize if itemsize is None else itemsize))
    update = pass_seconds(f"{model.optimizer}_warmup", model.elements, cluster, model.itemsize)
    return _step(model, time, update, hides=model.overlap != "none")


def stage_1(model: Model, cluster: Cluster) -> Step:
    plain = uncompressed(model, cluster)
    local = plain.local if model.local is not None else plain.local + _scan(model, cluster)
    return replace(plain, communication=plain.communication + cluster.agreement(), local=local)


def stage_2(model: Model, cluster: Cluster, chunks: int | None = None) -> Step:
    """With the best number of chunks where none is given."""
    way = way_for(model.reply, cluster.gpus)
    if chunks is None:
        options = candidates(model.elements, way.shards(cluster.gpus), BLOCK_SIZE)
        return min((stage_2(model, cluster, c) for c in options), key=lambda step: step.total)
    n, itemsize, hides = model.elements, model.itemsize, model.overlap == "both"
    if model.local is not None:
        gathered, replied = (size / chunks for size in message_bytes(n, cluster.gpus, chunks, way))
        time = chunks * ((cluster.all_to_all(gathered) if gathered else 0.0) + cluster.all_gather(replied))
        return replace(_step(model, time, 0.0, hides=hides, agreement=cluster.agreement()), chunks=chunks)
    adam = model.optimizer == "adam"
    total, passes = exchange(n, cluster, itemsize, chunks=chunks, use="adam_update" if adam else None, way=way)
    after = [] if adam else ["lamb_statistics", "lamb_update"]
    local = _scan(model, cluster) + passes + sum(pass_seconds(name, n, cluster, itemsize, way) for name in after)
    return replace(_step(model, total - passes, local, hides=hides, agreement=cluster.agreement()), chunks=chunks)


def end_to_end(model: Model, cluster: Cluster) -> float:
    """Seconds of a mean step of a run whose first `warmup` is stage 1."""
    return model.warmup * stage_1(model, cluster).total + (1 - model.warmup) * stage_2(model, cluster).total


def sent_uncompressed(model: Model, cluster: Cluster, itemsize: int | None = None) -> tuple[float, float]:
    """Bytes a step that a GPU sends, and that a node sends to others."""
    size = model.elements * (model.itemsize if itemsize is None else itemsize)
    return 2 * size * (cluster.gpus - 1) / cluster.gpus, 2 * size * (cluster.nodes - 1) / cluster.nodes


def sent_compressed(model: Model, cluster: Cluster, chunks: int = 1) -> tuple[float, float]:
    """The same of stage 2."""
    n, g = cluster.gpus, cluster.on_node
    gathered, replied = message_bytes(model.elements, n, chunks, way_for(model.reply, n))
    ring = (n - 1) / n if cluster.nodes > 1 else 0.0
    return (gathered + replied) * (n - 1) / n, gathered * g * (n - g) / n + replied * ring


def pays_below(model: Model, cluster: Cluster) -> float:
    """The network rate, bit/s, below which stage 2 is faster than the uncompressed step. 0: none, inf: any."""

    def gain(network: float) -> float:
        there = replace(cluster, network=network)
        return uncompressed(model, there).total - stage_2(model, there).total

    return _falls_to_zero(gain, SLOWEST, FASTEST)


def _falls_to_zero(gain: Callable[[float], float], low: float, high: float) -> float:
    """The first x from `low` on, to 1 %, at which `gain` is not above 0."""
    if gain(low) <= 0:
        return 0.0
    while (step := min(low * 1.2, high)) > low and gain(step) > 0:
        low = step
    if step == low:
        return math.inf
    while step > 1.01 * low:
        middle = math.sqrt(low * step)
        low, step = (middle, step) if gain(middle) > 0 else (low, middle)
    return low


def _scan(model: Model, cluster: Cluster) -> float:
    return pass_seconds("scan", model.elements, cluster, model.itemsize)


def _step(model: Model, communication: float, local: float, hides: bool, agreement: float = 0.0) -> Step:
    """`hides`: communication behind the last micro-batch's backward, all but the last bucket's."""
    last = min(1.0, BUCKET / (model.elements * model.itemsize))
    exposed = max(communication - model.backward, communication * last) if hides else communication
    forward, backward = model.accumulation * model.forward, model.accumulation * model.backward
    return Step(forward, backward, exposed + agreement, local if model.local is None else model.local)

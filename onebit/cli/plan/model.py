"""How long a training step takes on a cluster that is not at hand.

    uncompressed  forward + backward + all-reduce + update
    stage 1       forward + backward + all-reduce + scan + agreement + update
    stage 2       forward + backward + node mean + scan + agreement + {compress, gather, average, scatter, spread} in
                  chunks + update
    local step    forward + backward + node mean + scan + update

Node mean and spread are those of two levels of ranks (see `onebit.cli.plan.exchange`); stage 2 takes the best number of
chunks. Gradients are averaged over a node by

    2 (G-1)/G S/B + 2 (G-1) b                  the node's all-reduce, as DDP's hook has it
    (G-1)/G S/B + (G-1) b, each chunk          without the hook: slices, all-to-all

With `overlap` communication hides behind the backward of the last micro-batch, all but that of DDP's last bucket:
"uncompressed" hides the all-reduce and the node mean, which DDP's hook then takes; "both" the exchange too, in whose
thread the optimizer takes the node mean. With "none" the optimizer takes it, in its step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from onebit.cli.plan.cluster import Cluster, Groups, Levels
from onebit.cli.plan.exchange import agreement, exchange, message_bytes, pass_seconds
from onebit.collectives.chunking import chunk_options
from onebit.collectives.reply import AskedReply, exchange_for
from onebit.kernels.data.layout import BLOCK_SIZE

BUCKET = 25 * 2**20  # bytes: DistributedDataParallel's default
BUCKETS_AT_ONCE = 2  # Gloo's threads: each all-reduces a bucket
SLOWEST, FASTEST = 1e6, 1e13  # bit/s: the range of `pays_below`
WORTH = 1.05  # times as fast: less is within the model's error
UPDATES = {"adam": ["adam_update"], "zero_one": ["zero_one_update"], "lamb": ["lamb_statistics", "lamb_update"]}
Overlap = Literal["none", "uncompressed", "both"]


@dataclass(frozen=True)
class Model:
    """What is trained, and how."""

    elements: int
    itemsize: int = 2  # bytes of a parameter and of a gradient
    forward: float = 0.0  # seconds of one micro-batch, as is backward
    backward: float = 0.0
    accumulation: int = 1  # micro-batches a step
    optimizer: Literal["adam", "lamb", "zero_one"] = "adam"
    warmup: float = 0.15  # share of the steps that are stage 1
    steps: int = 10_000  # of a run
    var_update_scaler: int = 4  # of 0/1 Adam, as the next
    local_step_clipper: int = 16
    overlap: Overlap = "uncompressed"
    reply: AskedReply = "auto"
    levels: Levels = 2  # of ranks in stage 2; 2 is 1 where there is one node, or nodes have one GPU


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


def uncompressed(model: Model, cluster: Cluster, itemsize: int | None = None) -> Step:
    """A step with gradients all-reduced in `itemsize` bytes, by default their own."""
    size = model.elements * (model.itemsize if itemsize is None else itemsize)
    time = cluster.all_reduce(size, at_once=min(BUCKETS_AT_ONCE, math.ceil(size / BUCKET)))
    name = "zero_one_full" if model.optimizer == "zero_one" else f"{model.optimizer}_warmup"
    update = pass_seconds(name, model.elements, cluster, model.itemsize)
    return _step(model, time, update, hides=model.overlap != "none")


def stage_1(model: Model, cluster: Cluster) -> Step:
    plain = uncompressed(model, cluster)
    local = plain.local + _scan(model, cluster, slices=1)
    return replace(plain, communication=plain.communication + cluster.agreement(), local=local)


def stage_2(model: Model, cluster: Cluster, chunks: int | None = None) -> Step:
    """Predict a step of stage 2, with the best number of chunks if none is given."""
    groups = Groups.of(cluster, model.levels)
    replicas = groups.replicas
    exchange_class = exchange_for(model.reply, replicas.gpus)
    if chunks is None:
        options = chunk_options(model.elements, groups.slices * exchange_class.shards(replicas.gpus), BLOCK_SIZE)
        return min((stage_2(model, cluster, c) for c in options), key=lambda step: step.total)
    n, itemsize = model.elements, model.itemsize
    before, mean = _node_mean(model, groups.node, chunks)
    total, passes = exchange(n, groups, itemsize, chunks, exchange_class, mean=mean)
    update = sum(pass_seconds(name, n, replicas, itemsize, exchange_class) for name in UPDATES[model.optimizer])
    local = _scan(model, cluster, groups.slices) + passes + update
    step = _step(model, before + total - passes, local, hides=model.overlap == "both")
    return replace(step, communication=step.communication + agreement(n, cluster, chunks), chunks=chunks)


def local_step(model: Model, cluster: Cluster) -> Step:
    """Predict a local step of 0/1 Adam: a rank moves by its own gradient, with two levels a node by the mean of its
    own."""
    node = Groups.of(cluster, model.levels).node
    mean = node.all_reduce(model.elements * model.itemsize)
    passes = ("zero_one_length", "zero_one_local")
    update = sum(pass_seconds(name, model.elements, cluster, model.itemsize) for name in passes)
    return _step(model, mean, update + _scan(model, cluster, slices=1), hides=model.overlap != "none")


def sent_uncompressed(model: Model, cluster: Cluster, itemsize: int | None = None) -> float:
    """Bytes a step that a node sends to others."""
    size = model.elements * (model.itemsize if itemsize is None else itemsize)
    return 2 * size * (cluster.nodes - 1) / cluster.nodes


def sent_compressed(model: Model, cluster: Cluster, chunks: int = 1) -> float:
    """The same of stage 2."""
    groups = Groups.of(cluster, model.levels)
    n, g = groups.replicas.gpus, groups.replicas.on_node
    gathered, replied = message_bytes(model.elements, n, chunks, exchange_for(model.reply, n), groups.slices)
    ring = (n - 1) / n if cluster.nodes > 1 else 0.0
    return gathered * g * (n - g) / n + replied * ring


def pays_below(model: Model, cluster: Cluster) -> float:
    """The network rate, bit/s, to 1 %, up to which stage 2 is WORTH times as fast as a step with fp16 gradients, or
    more. 0: none, inf: any."""
    rate, last = SLOWEST, 0.0
    while rate < FASTEST:
        there = replace(cluster, network=rate)
        if uncompressed(model, there, 2).total <= WORTH * stage_2(model, there).total:
            return last
        rate, last = 1.01 * rate, rate
    return math.inf


def _scan(model: Model, cluster: Cluster, slices: int) -> float:
    return pass_seconds("scan", model.elements / slices, cluster, model.itemsize)


def _node_mean(model: Model, node: Cluster, chunks: int) -> tuple[float, float]:
    """Seconds of averaging gradients over a node: what is not hidden before the exchange, and within it for a chunk."""
    size = model.elements * model.itemsize
    if model.overlap == "uncompressed":
        return _exposed(model, node.all_reduce(size)), 0.0
    slices = node.all_to_all(size / chunks)
    return (0.0, slices) if model.overlap == "both" else (chunks * slices, 0.0)


def _exposed(model: Model, communication: float) -> float:
    """What the last micro-batch's backward does not hide: all beyond it, and at least the last bucket's."""
    last = min(1.0, BUCKET / (model.elements * model.itemsize))
    return max(communication - model.backward, communication * last)


def _step(model: Model, communication: float, local: float, hides: bool) -> Step:
    """`hides`: communication behind backward."""
    exposed = _exposed(model, communication) if hides else communication
    return Step(model.accumulation * model.forward, model.accumulation * model.backward, exposed, local)

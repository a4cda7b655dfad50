"""How long a training step takes on a cluster that is not at hand: a model of latency and bandwidth.

N GPUs on M nodes of G. A node's GPUs share its network, R bytes a second each way; within a node a GPU sends B. A
message takes a seconds between nodes, b within one. S are the bytes of all gradients, s those of one rank's messages, r
those of all that comes back to it: s, N s with direct replies, which need no all-to-all.

    all-reduce    2 (G-1)/G S/B + 2 (M-1)/M S/R         + 2 (G-1) b + 2 (M-1) a      uncompressed: rings
                  2 (G-1)/G S/B + 2 S/R                 + 2 (G-1) b + 2 log2(M) a    or NCCL's trees, where faster
    all-to-all    max(G (N-G)/N s/R, (G-1)/N s/B)       + (N-G) a + (G-1) b          gather
    all-gather    (N-1)/N r / min(R, B)                 + (M-1) a + (N-M) b          scatter, or the direct exchange
    agreement     2 ceil(log2 N) a, over Gloo           (N-G) a + (G-1) b            one number, every step of ours
    a pass        elements x bytes an element / (memory bandwidth x efficiency)

`latency`, a, is what a message takes that no other hides. A round trip between nodes, `rtt`, is waited for apart: how
often, by collective and transport, stands in `onebit.cli.plan.delay`. Models of `MOST_ELEMENTS` or fewer take one chunk
and no agreement: their one message has the flag.

The uncompressed all-reduce gets the best there is: reduce-scatter within nodes, rings between them, all-gather within
nodes, which sends the fewest bytes; over NCCL trees between nodes, where they are faster. Ours is as
`onebit.collectives` does it. With one level every rank sends to every other, so that a node of G GPUs sends G times
what one rank sends, and one message after the other. The all-gather is a ring over all ranks that enters each node
once.

With two levels, where G > 1 and M > 1, a node is one rank to the network. A rank compresses its slice, 1/G of the mean
over its node; the G slices travel side by side and share R. s and r are of all slices, r of direct replies is M s:

    node mean     2 (G-1)/G S/B                         + 2 (G-1) b              DDP's hook: the node's all-reduce
                  (G-1)/G S/B                           + (G-1) b, each chunk    without it: slices, all-to-all
    gather        (M-1)/M s/R                           + (M-1) a                all-to-all of slices
    scatter       (M-1)/M r / min(R, G B)               + (M-1) a                all-gather, or the direct exchange
    spread        (G-1)/G r/B                           + (G-1) b                all-gather of slices in the node

Stage 2 plays the schedule of `Exchange.run` through, for the best number of chunks. With two levels a chunk is spread
over the node while the replies of the next one arrive.

    uncompressed  forward + backward + all-reduce + update
    stage 1       forward + backward + all-reduce + scan + agreement + update
    stage 2       forward + backward + scan + agreement + {compress, gather, average, scatter, update} in chunks
    two levels    forward + backward + node mean + scan + agreement
                  + {compress, gather, average, scatter, spread, update} in chunks

With two levels scan and compress are of 1/G of the elements, average of 1/(G M) of them, and the update of all. (LAMB
updates after the last chunk, and reads its statistics first.)

With `overlap` communication hides behind the backward of the last micro-batch, all but that of DDP's last bucket:
"uncompressed" hides the all-reduce and the node mean, which DDP's hook then takes; "both" the exchange too, in whose
thread the optimizer takes the node mean. With "none" the optimizer takes it, in its step. Left out: congestion,
stragglers, the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from onebit.cli.plan.delay import ROUND_TRIPS, Delay, Transport
from onebit.collectives.chunking import chunk_options
from onebit.collectives.direct import Direct
from onebit.collectives.exchange import Exchange
from onebit.collectives.flags import may_travel_in_messages
from onebit.collectives.reply import AskedReply, check_reply, way_for
from onebit.kernels.data.checks import is_finite, is_whole
from onebit.kernels.data.layout import BLOCK_SIZE, WORD
from onebit.kernels.data.wire import bytes_of_message
from onebit.kernels.passes import bytes_per_element

BUCKET = 25 * 2**20  # bytes: DistributedDataParallel's default
BUCKETS_AT_ONCE = 2  # Gloo's threads: each all-reduces a bucket
MOST_STEPS = 10**7  # of a run
SLOWEST, FASTEST = 1e6, 1e13  # bit/s: the range of `pays_below`
WORTH = 1.05  # times as fast: less is within the model's error
Overlap = Literal["none", "uncompressed", "both"]
Levels = Literal[1, 2]


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
    rtt: float = _constant(0.0, "none: as much of it as a rack has is in the latency")  # seconds
    transport: Transport = field(default="nccl", metadata={"source": "what GPUs have"})
    shared: bool | None = None  # whether ranks share hosts; None: as nodes have several

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("rates", "transport", "shared"):
                continue
            zero = "latency" in each.name or each.name == "rtt"
            least = "0 or more" if zero else "above 0"
            if not is_finite(value) or value < 0 or (value == 0 and not zero):
                raise ValueError(f"{each.name} is {value}: it is a finite number {least}")
        if self.transport not in ROUND_TRIPS:
            raise ValueError(f"transport is {self.transport!r}: it is one of {', '.join(ROUND_TRIPS)}")
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

    @property
    def has_two_levels(self) -> bool:
        """Whether there are several nodes, of several GPUs each."""
        return self.nodes > 1 and self.on_node > 1

    @property
    def delay(self) -> Delay:
        """What the round trip adds."""
        shared = self.on_node > 1 if self.shared is None else self.shared
        return Delay(self.rtt, self.transport, gpus=self.gpus, nodes=self.nodes, shared=shared)

    def all_reduce(self, size: float, at_once: int = 1) -> float:
        """Seconds for `size` bytes, uncompressed, in so many parts `at_once`."""
        g, m, delay = self.on_node, self.nodes, self.delay
        within = 2 * (g - 1) / g * size / self.intra + 2 * (g - 1) * self.intra_latency
        sent, hops = 2 * (m - 1) / m * size / self._rate, 2 * (m - 1)
        if self.transport == "gloo":
            return within + sent + hops * self.latency + delay.segments(size, sent, at_once)
        ring = sent + hops * (self.latency + delay.message)
        trees = 2 * size / self._rate + 2 * math.ceil(math.log2(m)) * (self.latency + delay.message)
        return within + min(ring, trees) if m > 1 else within

    def all_to_all(self, size: float) -> float:
        """Seconds that it keeps the network where every rank has `size` bytes, 1/N of them for each; delay apart."""
        n, g = self.gpus, self.on_node
        between, within = g * (n - g) / n * size / self._rate, (g - 1) / n * size / self.intra
        return max(between, within) + (n - g) * self.latency + (g - 1) * self.intra_latency

    def all_gather(self, size: float) -> float:
        """Seconds that it keeps the network until every rank has `size` bytes, 1/N of them from each; delay apart."""
        n, m = self.gpus, self.nodes
        rate = self.intra if m == 1 else min(self.intra, self._rate)
        return (n - 1) / n * size / rate + (m - 1) * self.latency + (n - m) * self.intra_latency

    def agreement(self) -> float:
        """Seconds in which all ranks agree on one number."""
        hop = self.latency if self.nodes > 1 else self.intra_latency
        n, g = self.gpus, self.on_node
        if self.transport == "gloo" and n > 2:
            return (n - g) * self.latency + (g - 1) * self.intra_latency + self.delay.agreement()
        return 2 * math.ceil(math.log2(n)) * hop + self.delay.agreement()

    @property
    def _rate(self) -> float:
        return self.network / 8


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
        if levels == 1 or not cluster.has_two_levels:
            return cls(cluster, replace(cluster, gpus=1))
        g = cluster.on_node
        together = replace(cluster, gpus=cluster.nodes, gpus_per_node=1, intra=g * cluster.intra, shared=True)
        return cls(together, replace(cluster, gpus=g))

    @property
    def slices(self) -> int:
        """Into how many a chunk is cut."""
        return self.node.gpus


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
    levels: Levels = 1  # of ranks in stage 2; 2 is 1 where there is one node, or nodes have one GPU
    local: float | None = None  # seconds of an optimizer's own work in any stage; None: those of its passes

    def __post_init__(self) -> None:
        if not is_whole(self.elements, least=1) or not is_whole(self.accumulation, least=1):
            raise ValueError(
                f"elements is {self.elements}, accumulation is {self.accumulation}: both are whole numbers, 1 or more"
            )
        for name in ("steps", "var_update_scaler", "local_step_clipper"):
            if not is_whole(getattr(self, name), least=1, most=MOST_STEPS):
                raise ValueError(f"{name} is {getattr(self, name)}: it is a whole number from 1 to {MOST_STEPS:,}")
        check_reply(self.reply)
        if self.levels not in get_args(Levels):
            raise ValueError(f"levels is {self.levels}: it is 1, every rank for itself, or 2, a node as one rank")
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
    copies = 1 if way is None else cluster.gpus // way.shards(cluster.gpus)
    each = bytes_per_element(name, itemsize, master=itemsize < 4, packed=True, ranks=cluster.gpus, copies=copies)
    rate = cluster.rates.get(name, cluster.memory * cluster.efficiency)
    return elements * each / rate / cluster.cores


def message_bytes(elements: int, ranks: int, chunks: int, way: type[Exchange], slices: int = 1) -> tuple[int, int]:
    """Bytes of all chunks and of all slices: what one rank compresses for servers, and what every rank then has of all;
    itself included.

    Without servers all goes to all at once.
    """
    parts = slices * way.shards(ranks) * chunks
    blocks = -(-elements // (BLOCK_SIZE * parts))
    longest = min(blocks * BLOCK_SIZE, -(-elements // WORD) * WORD)  # of one parameter: only its last block is short
    sent = slices * ranks * chunks * bytes_of_message(blocks, longest)
    return (0, sent) if way is Direct else (sent, sent)


def exchange(
    elements: int,
    groups: Groups,
    itemsize: int,
    chunks: int,
    use: str | None,
    way: type[Exchange],
    mean: float = 0.0,
) -> tuple[float, float]:
    """Seconds of `Exchange.run` with a pass `use` on the replies, and the seconds of its passes alone.

    mean: seconds for which the device waits before it compresses a chunk, for the chunk's mean over the node.
    """
    replicas, slices = groups.replicas, groups.slices
    gather, scatter, replied = _collectives(elements, groups, chunks, way)
    part = elements / chunks
    compress = pass_seconds("compress", part / slices, replicas, itemsize, way)
    used = pass_seconds(use, part, replicas, itemsize, way) if use else 0.0
    spread = groups.node.all_gather(replied) if slices > 1 else None
    if way is Direct:
        total = sent_once(chunks, mean + compress, scatter.network, used, spread, delay=scatter.delay)
        return total, chunks * (compress + used)
    average = pass_seconds("average", part / (slices * replicas.gpus), replicas, itemsize, way)
    total = pipelined(
        chunks,
        compress=mean + compress,
        gather=gather.network,
        average=average,
        scatter=scatter.network,
        use=used,
        spread=spread,
        gather_delay=gather.delay,
        scatter_delay=scatter.delay,
    )
    return total, chunks * (compress + average + used)


@dataclass(frozen=True)
class Took:
    """Seconds for which a collective keeps the network, and after which, besides, all has arrived."""

    network: float
    delay: float = 0.0

    @property
    def total(self) -> float:
        return self.network + self.delay

    @classmethod
    def by(cls, cluster: Cluster, network: float, delay: float) -> Took:
        return cls(network, delay) if cluster.delay.lets_others_pass else cls(network + delay)


def _collectives(elements: int, groups: Groups, chunks: int, way: type[Exchange]) -> tuple[Took, Took, float]:
    """Of a chunk: to the servers (nothing where there are none), to all, and the bytes of all replies."""
    replicas, slices = groups.replicas, groups.slices
    gathered, replied = (size / chunks for size in message_bytes(elements, replicas.gpus, chunks, way, slices))
    delay, row = replicas.delay, replied / slices / replicas.gpus
    to_all = delay.all_gather(row, expected=way is not Direct)
    scatter = Took.by(replicas, replicas.all_gather(replied), to_all)
    if way is Direct:
        return Took(0.0), scatter, replied
    return Took.by(replicas, replicas.all_to_all(gathered), delay.all_to_all()), scatter, replied


def sent_once(
    chunks: int, compress: float, exchange: float, use: float, spread: float | None = None, delay: float = 0.0
) -> float:
    """`Direct.run`: passes one after the other on the device, collectives one after the other on the network."""
    device = network = 0.0
    arrived = [0.0] * chunks
    replies = Replies(use, spread)
    for j in range(chunks + 1):
        if j < chunks:
            device += compress
            network = max(network, device) + exchange
            arrived[j] = network + delay
        if j >= 1:
            device = replies.arrive(max(device, arrived[j - 1]))
    return replies.finish(device)


def pipelined(
    chunks: int,
    compress: float,
    gather: float,
    average: float,
    scatter: float,
    use: float,
    spread: float | None = None,
    gather_delay: float = 0.0,
    scatter_delay: float = 0.0,
) -> float:
    """`TwoPhases.run`: the same with two collectives, and an average between them."""
    device = network = 0.0
    gathered, scattered = [0.0] * chunks, [0.0] * chunks
    replies = Replies(use, spread)
    for j in range(chunks + 2):
        if j < chunks:
            device += compress
            network = max(network, device) + gather
            gathered[j] = network + gather_delay
        if 1 <= j <= chunks:
            device = max(device, gathered[j - 1]) + average
            network = max(network, device) + scatter
            scattered[j - 1] = network + scatter_delay
        if j >= 2:
            device = replies.arrive(max(device, scattered[j - 2]))
    return replies.finish(device)


class Replies:
    """`Spread`: each chunk's replies go over the node, on a network of its own, and are used when the next arrive."""

    def __init__(self, use: float, spread: float | None) -> None:
        """`spread`: None for one level, where replies are used as soon as they arrive."""
        self.use, self.spread = use, spread
        self.node = 0.0
        self.under_way: float | None = None  # when what is spread will be there

    def arrive(self, device: float) -> float:
        """A chunk's replies are there at `device`. The time at which the device goes on."""
        if self.spread is None:
            return device + self.use
        self.node = max(self.node, device) + self.spread
        device, self.under_way = self.finish(device), self.node
        return device

    def finish(self, device: float) -> float:
        if self.under_way is None:
            return device
        device, self.under_way = max(device, self.under_way) + self.use, None
        return device


def compressed_all_reduce(
    elements: int,
    cluster: Cluster,
    itemsize: int = 4,
    chunks: int | None = None,
    reply: AskedReply = "auto",
    levels: Levels = 1,
) -> float:
    """Seconds of a call of CompressedAllReduce, for the best number of chunks where none is given."""
    groups = Groups.of(cluster, levels)
    way = way_for(reply, groups.replicas.gpus)
    shards = groups.slices * way.shards(groups.replicas.gpus)
    options = chunk_options(elements, shards, BLOCK_SIZE) if chunks is None else [chunks]

    def seconds(chunks: int) -> float:
        mean = groups.node.all_to_all(elements * itemsize / chunks) if groups.slices > 1 else 0.0
        sent = exchange(elements, groups, itemsize, chunks=chunks, use="decode", way=way, mean=mean)[0]
        return sent + _agreement(elements, cluster, chunks)

    return pass_seconds("scan", elements / groups.slices, cluster, itemsize) + min(map(seconds, options))


def _agreement(elements: int, cluster: Cluster, chunks: int) -> float:
    """Seconds of asking all ranks for their flags: none where messages carry them."""
    return 0.0 if may_travel_in_messages(elements, chunks) else cluster.agreement()


def uncompressed(model: Model, cluster: Cluster, itemsize: int | None = None) -> Step:
    """A step with gradients all-reduced in `itemsize` bytes, by default their own."""
    size = model.elements * (model.itemsize if itemsize is None else itemsize)
    time = cluster.all_reduce(size, at_once=min(BUCKETS_AT_ONCE, math.ceil(size / BUCKET)))
    name = "zero_one_full" if model.optimizer == "zero_one" else f"{model.optimizer}_warmup"
    update = pass_seconds(name, model.elements, cluster, model.itemsize)
    return _step(model, time, update, hides=model.overlap != "none")


def stage_1(model: Model, cluster: Cluster) -> Step:
    plain = uncompressed(model, cluster)
    local = plain.local if model.local is not None else plain.local + _scan(model, cluster, slices=1)
    return replace(plain, communication=plain.communication + cluster.agreement(), local=local)


def stage_2(model: Model, cluster: Cluster, chunks: int | None = None) -> Step:
    """With the best number of chunks where none is given."""
    groups = Groups.of(cluster, model.levels)
    replicas, node = groups.replicas, groups.node
    way = way_for(model.reply, replicas.gpus)
    if chunks is None:
        options = chunk_options(model.elements, groups.slices * way.shards(replicas.gpus), BLOCK_SIZE)
        return min((stage_2(model, cluster, c) for c in options), key=lambda step: step.total)
    n, itemsize = model.elements, model.itemsize
    before, mean = _node_mean(model, node, chunks)
    if model.local is not None:
        gather, scatter, replied = _collectives(n, groups, chunks, way)
        time, local = chunks * (mean + gather.total + scatter.total + node.all_gather(replied)), 0.0
    else:
        use = {"adam": "adam_update", "zero_one": "zero_one_update"}.get(model.optimizer)
        total, passes = exchange(n, groups, itemsize, chunks=chunks, use=use, way=way, mean=mean)
        after = [] if use is not None else ["lamb_statistics", "lamb_update"]
        used = sum(pass_seconds(name, n, replicas, itemsize, way) for name in after)
        time, local = total - passes, _scan(model, cluster, groups.slices) + passes + used
    agreement = _agreement(n, cluster, chunks)
    step = _step(model, before + time, local, hides=model.overlap == "both", agreement=agreement)
    return replace(step, chunks=chunks)


def rounds(model: Model, cluster: Cluster) -> float:
    """Round trips between nodes that a step of stage 2 waits for, in one chunk."""

    def seconds(rtt: float) -> float:
        there = replace(cluster, rtt=rtt)
        groups = Groups.of(there, model.levels)
        gather, scatter, _ = _collectives(model.elements, groups, 1, way_for(model.reply, groups.replicas.gpus))
        return gather.total + scatter.total + _agreement(model.elements, there, 1)

    return round(seconds(1.0) - seconds(0.0), 3)


def local_step(model: Model, cluster: Cluster) -> Step:
    """Of 0/1 Adam: a rank moves by its own gradient, with two levels a node by the mean of its own."""
    node = Groups.of(cluster, model.levels).node
    mean = node.all_reduce(model.elements * model.itemsize)
    update = pass_seconds("zero_one_local", model.elements, cluster, model.itemsize)
    return _step(model, mean, update + _scan(model, cluster, slices=1), hides=model.overlap != "none")


def end_to_end(model: Model, cluster: Cluster) -> float:
    """Seconds of a mean step of a run whose first `warmup` is stage 1."""
    return model.warmup * stage_1(model, cluster).total + (1 - model.warmup) * stage_2(model, cluster).total


def sent_uncompressed(model: Model, cluster: Cluster, itemsize: int | None = None) -> tuple[float, float]:
    """Bytes a step that a GPU sends, and that a node sends to others."""
    size = model.elements * (model.itemsize if itemsize is None else itemsize)
    return 2 * size * (cluster.gpus - 1) / cluster.gpus, 2 * size * (cluster.nodes - 1) / cluster.nodes


def sent_compressed(model: Model, cluster: Cluster, chunks: int = 1) -> tuple[float, float]:
    """The same of stage 2."""
    groups = Groups.of(cluster, model.levels)
    replicas, slices = groups.replicas, groups.slices
    n, g = replicas.gpus, replicas.on_node
    gathered, replied = message_bytes(model.elements, n, chunks, way_for(model.reply, n), slices)
    ring = (n - 1) / n if cluster.nodes > 1 else 0.0
    between = (gathered + replied) * (n - 1) / n / slices
    averaged = (2 if model.overlap == "uncompressed" else 1) * model.elements * model.itemsize
    within = (averaged + replied) * (slices - 1) / slices
    return between + within, gathered * g * (n - g) / n + replied * ring


def state_bytes(model: Model, cluster: Cluster) -> float:
    """What a GPU keeps of an element in stage 2, besides parameter and gradient.

    4 denominator + 4/G residual + 4/(G M) the server's residual + the replies that are the momentum, where parameters
    have 16 bits 4 for an fp32 copy. LAMB keeps the variance, 4, and the momentum of the step before. G is 1 with one
    level; direct replies have no server.
    """
    groups = Groups.of(cluster, model.levels)
    n, slices = groups.replicas.gpus, groups.slices
    way = way_for(model.reply, n)
    server = 0.0 if way is Direct else 4 / (slices * n)
    momentum = n // way.shards(n) / 8
    kept = 4 + 4 / slices + server + (4 if model.itemsize < 4 else 0)
    return kept + (momentum if model.optimizer == "adam" else 4 + 2 * momentum)


def pays_below(model: Model, cluster: Cluster) -> float:
    """The network rate, bit/s, below which stage 2 is WORTH times as fast as a step with fp16 gradients, or more. 0:
    none, inf: any."""

    def gain(network: float) -> float:
        there = replace(cluster, network=network)
        return uncompressed(model, there, 2).total - WORTH * stage_2(model, there).total

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


def _step(model: Model, communication: float, local: float, hides: bool, agreement: float = 0.0) -> Step:
    """`hides`: communication behind backward."""
    exposed = _exposed(model, communication) if hides else communication
    forward, backward = model.accumulation * model.forward, model.accumulation * model.backward
    return Step(forward, backward, exposed + agreement, local if model.local is None else model.local)

"""The cluster model of `onebit plan`: bytes and times by message, steps that are the sum of their parts, the schedule
of a real exchange played through as the plan has it, and what a round trip between nodes adds.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onebit.cli.plan.delay import Delay
from onebit.cli.plan.model import (
    BUCKET,
    Cluster,
    Groups,
    Model,
    compressed_all_reduce,
    end_to_end,
    message_bytes,
    pays_below,
    pipelined,
    rounds,
    sent_compressed,
    sent_once,
    sent_uncompressed,
    stage_1,
    stage_2,
    state_bytes,
    uncompressed,
)
from onebit.collectives.chunking import candidates
from onebit.collectives.direct import Direct
from onebit.collectives.flags import MOST_ELEMENTS
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels.data.layout import BLOCK_SIZE, Layout
from onebit.kernels.data.wire import Format

SLOW = Cluster(gpus=16, gpus_per_node=4, network=8e9, latency=1e-3, intra=4e9, intra_latency=1e-4, memory=1e11)
PAIR = replace(SLOW, gpus=8)  # of nodes
BERT = Model(340_000_000, 2, 0.036, 0.061, overlap="none")
NODES = replace(BERT, levels=2)
ELEMENTS, SIZE = 340e6, 680e6  # of BERT: elements, bytes of gradients
OVERLAPS = ("none", "uncompressed", "both")
FAR = Cluster(gpus=4, gpus_per_node=1, network=8e9, latency=0, rtt=0.05, transport="gloo", memory=1e30)
NEAR = replace(FAR, rtt=0.0)
SMALL = Model(MOST_ELEMENTS, 4, overlap="none")
LARGE = replace(SMALL, elements=MOST_ELEMENTS + 1)


def crossing(messages, on_node):
    """The most bytes that a node sends to others, and that a GPU sends within its node, of (from, to, bytes)."""
    between, within = {}, {}
    for source, target, size in messages:
        if source // on_node != target // on_node:
            between[source // on_node] = between.get(source // on_node, 0) + size
        elif source != target:
            within[source] = within.get(source, 0) + size
    return max(between.values(), default=0), max(within.values(), default=0)


@pytest.mark.parametrize("gpus, per_node", [(1, 8), (4, 4), (4, 1), (16, 4), (24, 8)])
def test_collectives_take_what_their_messages_take(gpus, per_node):
    """1e9 bytes. The all-reduce: reduce-scatter within nodes, a ring of each local rank between, all-gather within."""
    cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node, latency=0, intra_latency=0)
    g, m = cluster.on_node, cluster.nodes
    ranks = [(node, local) for node in range(m) for local in range(g)]
    to_all = [(i, k, 1e9 / gpus) for i in range(gpus) for k in range(gpus)]
    ring = [(i, (i + 1) % gpus, 1e9 / gpus) for _ in range(gpus - 1) for i in range(gpus)]
    for found, messages in ((cluster.all_to_all(1e9), to_all), (cluster.all_gather(1e9), ring)):
        between, within = crossing(messages, g)
        assert found == pytest.approx(max(between / 1e9, within / 4e9))
    inner = [(i * g + b, i * g + (b + 1) % g, 1e9 / g) for i, b in ranks for _ in range(g - 1)]
    outer = [(i * g + b, (i + 1) % m * g + b, 1e9 / g / m) for i, b in ranks for _ in range(m - 1)]
    within, between = crossing(inner, g)[1], crossing(outer, g)[0]
    assert cluster.all_reduce(1e9) == pytest.approx(2 * within / 4e9 + 2 * between / 1e9)
    # A network as fast as the links of a node's GPUs in sum takes what all of them send; a faster one waits for them.
    for network, rate in ((8 * 12e9, 12e9), (8 * 16e9, 16e9), (8 * 20e9, 16e9)):
        fast = Groups.of(replace(SLOW, network=network, latency=0), 2)
        assert fast.replicas.all_gather(1e9) == pytest.approx(3 / 4 * 1e9 / rate)
    groups = Groups.of(cluster, 2)
    if not cluster.has_two_levels:
        assert groups == Groups.of(cluster, 1)
        return
    assert (groups.replicas.gpus, groups.node.gpus, groups.slices) == (m, g, g)
    slices = [(i * g + b, k * g + b, 1e9 / g / m) for i, b in ranks for k in range(m)]
    assert groups.replicas.all_to_all(1e9) == pytest.approx(crossing(slices, g)[0] / 1e9)
    assert groups.replicas.all_gather(1e9) == pytest.approx(between / 1e9)
    assert groups.node.all_gather(1e9) == pytest.approx(within / 4e9)


def test_latencies_are_those_of_the_messages():
    gloo, groups = replace(SLOW, transport="gloo"), Groups.of(SLOW, 2)
    assert SLOW.all_reduce(0) == pytest.approx(2 * 2 * 1e-3 + 2 * 3 * 1e-4)  # trees
    assert gloo.all_reduce(0) == pytest.approx(2 * 3 * 1e-3 + 2 * 3 * 1e-4)  # a ring
    assert SLOW.all_to_all(0) == pytest.approx(12 * 1e-3 + 3 * 1e-4)
    assert SLOW.all_gather(0) == pytest.approx(3 * 1e-3 + 12 * 1e-4)
    assert SLOW.agreement() == pytest.approx(2 * 4 * 1e-3)
    assert replace(SLOW, gpus=4).agreement() == pytest.approx(2 * 2 * 1e-4)
    assert gloo.agreement() == pytest.approx(12 * 1e-3 + 3 * 1e-4)  # all to all
    assert groups.replicas.all_to_all(0) == groups.replicas.all_gather(0) == pytest.approx(3 * 1e-3)
    assert groups.node.all_to_all(0) == groups.node.all_gather(0) == pytest.approx(3 * 1e-4)
    assert groups.node.all_reduce(0) == pytest.approx(6 * 1e-4)


@pytest.mark.parametrize("elements", [1, 2049, 340_000_000])
@pytest.mark.parametrize("ranks, chunks, slices", [(1, 1, 1), (3, 2, 1), (64, 8, 1), (2, 1, 4), (3, 2, 4), (16, 8, 4)])
def test_messages_have_the_bytes_of_the_wire(elements, ranks, chunks, slices):
    for way in (TwoPhases, Direct):
        form = Format(Layout([elements], ranks=slices * way.shards(ranks), chunks=chunks))
        sent, replies = message_bytes(elements, ranks, chunks, way, slices)
        assert sent == (0 if way is Direct else slices * ranks * chunks * form.nbytes)
        assert replies == slices * ranks * chunks * form.nbytes


def test_bytes_sent():
    gpu, node = sent_uncompressed(BERT, SLOW)
    assert gpu == pytest.approx(2 * SIZE * 15 / 16) and node == pytest.approx(2 * SIZE * 3 / 4)
    one, direct = (sent_compressed(replace(BERT, reply=reply), SLOW)[0] for reply in (1, "direct"))
    gpu, node = sent_compressed(BERT, SLOW)
    assert gpu == one and sent_uncompressed(BERT, SLOW, 4)[0] / gpu == pytest.approx(32 / (1 + 1 / 64), rel=1e-3)
    assert node == pytest.approx(message_bytes(340_000_000, 16, 1, TwoPhases)[0] * (4 * 12 / 16 + 15 / 16))
    assert direct == pytest.approx(16 / 2 * one, rel=1e-3)
    assert sent_compressed(BERT, replace(SLOW, gpus=4))[1] == 0
    pair = replace(SLOW, gpus=2)
    assert sent_compressed(BERT, pair) == sent_compressed(replace(BERT, reply="direct"), pair)
    assert sent_compressed(BERT, pair)[0] == pytest.approx(sent_compressed(replace(BERT, reply=1), pair)[0], rel=1e-3)


def test_a_node_sends_what_one_rank_would():
    size, replies = message_bytes(340_000_000, 4, 1, TwoPhases, slices=4)
    for overlap, gradients in (("none", 1), ("uncompressed", 2), ("both", 1)):
        gpu, node = sent_compressed(replace(NODES, overlap=overlap), SLOW)
        assert gpu == pytest.approx(gradients * 3 / 4 * SIZE + 3 / 4 * (size + replies) / 4 + 3 / 4 * replies)
        assert node == pytest.approx(3 / 4 * (size + replies))
    assert node == pytest.approx(sent_compressed(BERT, replace(SLOW, gpus=4, gpus_per_node=1))[1], rel=1e-3)
    many = Cluster(gpus=1024, gpus_per_node=8, network=1e9)
    ratio = sent_compressed(BERT, many)[1] / sent_compressed(NODES, many)[1]
    assert ratio == pytest.approx((8 + 1) / 2, rel=0.01)  # the all-gather passes a node once with one level too


def test_one_level_is_all_there_is_without_nodes_of_several():
    for gpus, per_node, overlap in ((16, 1, "none"), (8, 8, "uncompressed"), (2, 1, "both"), (1, 1, "both")):
        cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node)
        for optimizer, local in itertools.product(("adam", "lamb"), (None, 0.075)):
            one = replace(BERT, optimizer=optimizer, overlap=overlap, local=local)
            for of in (stage_2, end_to_end, sent_compressed, state_bytes, pays_below):
                assert of(replace(one, levels=2), cluster) == of(one, cluster)


def test_a_step_is_its_parts():
    plain, one, two = uncompressed(BERT, SLOW), stage_1(BERT, SLOW), stage_2(BERT, SLOW, chunks=1)
    assert plain.total == pytest.approx(0.036 + 0.061 + SLOW.all_reduce(SIZE) + ELEMENTS * (2 + 16 + 10) / 9e10)
    assert one.total - plain.total == pytest.approx(ELEMENTS * 2 / 9e10 + SLOW.agreement())
    size, _ = message_bytes(340_000_000, 16, 1, TwoPhases)
    assert two.communication == pytest.approx(SLOW.all_to_all(size) + SLOW.all_gather(size) + SLOW.agreement())
    passes = 2 + (2 + 4 + 1 / 8 + 4 + 1 / 8) + (16 / 8 + 8 + 1 / 8) / 16 + (1 / 8 + 4 + 10)  # TARGETS, 16 bits
    assert two.local == pytest.approx(ELEMENTS * passes / 9e10)
    assert uncompressed(NODES, SLOW) == plain and stage_1(NODES, SLOW) == one  # which have no levels
    for model in (BERT, NODES):
        lamb, adam = (stage_2(replace(model, optimizer=name), SLOW, 1) for name in ("lamb", "adam"))
        more = 1 / 8 + 1 / 8 + 12  # its statistics are read too, and it updates after the last chunk
        assert lamb.local - adam.local == pytest.approx(ELEMENTS * more / 9e10)
        assert model is NODES or lamb.communication == pytest.approx(adam.communication)


@pytest.mark.parametrize("overlap, times", [("none", 1), ("uncompressed", 2)])
def test_a_step_of_two_levels_is_its_parts(overlap, times):
    """4 nodes of 4: a node's mean of gradients, slices over the network at 1e9 B/s, replies over the node at 4e9."""
    step = stage_2(replace(NODES, overlap=overlap, backward=0.0), SLOW, chunks=1)
    mean = times * (3 / 4 * SIZE / 4e9 + 3 * 1e-4)
    size, replies = message_bytes(340_000_000, 4, 1, TwoPhases, slices=4)
    between = 3 / 4 * (size + replies) / 1e9 + 2 * 3 * 1e-3
    spread = 3 / 4 * replies / 4e9 + 3 * 1e-4
    assert step.communication == pytest.approx(mean + between + spread + 2 * 4 * 1e-3)
    a_slice = 2 / 4 + (2 + 4 + 1 / 8 + 4 + 1 / 8) / 4 + (4 / 8 + 8 + 1 / 8) / 16  # scan, compress, average
    assert step.local == pytest.approx(ELEMENTS * (a_slice + 1 / 8 + 4 + 10) / 9e10)


def test_two_nodes_exchange_directly():
    """What replies are best is by nodes: no average, one round, and every rank decodes two messages."""
    step = stage_2(NODES, PAIR, chunks=1)
    assert step == stage_2(replace(NODES, reply="direct"), PAIR, chunks=1)
    _, replies = message_bytes(340_000_000, 2, 1, Direct, slices=4)
    mean, spread = 3 / 4 * SIZE / 4e9 + 3 * 1e-4, 3 / 4 * replies / 4e9 + 3 * 1e-4
    assert step.communication == pytest.approx(mean + replies / 2 / 1e9 + 1e-3 + spread + 2 * 3 * 1e-3)
    passes = (2 + 2 + 4 + 2 / 8 + 4 + 1 / 8) / 4 + (2 / 8 + 4 + 10)
    assert step.local == pytest.approx(ELEMENTS * passes / 9e10)
    assert sent_compressed(NODES, PAIR)[1] == pytest.approx(replies / 2)
    overlapped = stage_2(replace(NODES, overlap="both", backward=0.0), PAIR, chunks=1)
    assert overlapped.communication == pytest.approx(step.communication)


def test_the_best_number_of_chunks_is_taken():
    """As many are tried as `onebit.collectives.chunking.choose_chunks` measures: of slices and shards."""
    options = candidates(BERT.elements, SLOW.gpus, BLOCK_SIZE)
    totals = {chunks: stage_2(BERT, SLOW, chunks).total for chunks in options}
    best = stage_2(BERT, SLOW)
    assert best.total == min(totals.values()) == totals[best.chunks] < totals[1]
    calls = [compressed_all_reduce(340_000_000, SLOW, chunks=chunks) for chunks in options]
    assert compressed_all_reduce(340_000_000, SLOW) == min(calls) < calls[0]
    small = replace(NODES, elements=3 * 16 * 16 * BLOCK_SIZE)
    slow = replace(SLOW, network=1e6, latency=0, intra=1e6, memory=1e6)  # more chunks would be faster
    most = max(candidates(small.elements, 16, BLOCK_SIZE))
    assert most == 2 == stage_2(small, slow).chunks < max(candidates(small.elements, 4, BLOCK_SIZE))
    assert stage_2(small, slow, chunks=4).total < stage_2(small, slow).total


def test_overlap_hides_what_backward_is_long_enough_for():
    alone, hidden = uncompressed(BERT, SLOW), uncompressed(replace(BERT, overlap="uncompressed"), SLOW)
    assert alone.communication - hidden.communication == pytest.approx(BERT.backward)
    long = replace(BERT, overlap="uncompressed", backward=1e3)
    assert uncompressed(long, SLOW).communication == pytest.approx(alone.communication * BUCKET / SIZE)
    assert stage_2(replace(BERT, overlap="uncompressed"), SLOW, 1) == stage_2(BERT, SLOW, 1)
    both = stage_2(replace(BERT, overlap="both"), SLOW, 1)
    assert stage_2(BERT, SLOW, 1).communication - both.communication == pytest.approx(BERT.backward)
    many = uncompressed(replace(BERT, overlap="uncompressed", accumulation=3), SLOW)
    assert many.communication == hidden.communication and many.forward == pytest.approx(3 * 0.036)


def test_the_mean_over_a_node_hides_where_ddp_or_the_exchange_takes_it():
    long = replace(NODES, backward=1e3)
    exposed = {name: stage_2(replace(long, overlap=name), SLOW, 1).communication for name in ("uncompressed", "both")}
    agreement, last = SLOW.agreement(), BUCKET / SIZE
    alone = stage_2(NODES, SLOW, 1).communication - agreement
    node = Groups.of(SLOW, 2).node
    by_hook, by_slices = node.all_reduce(SIZE), node.all_to_all(SIZE)
    assert exposed["uncompressed"] == pytest.approx(alone - by_slices + last * by_hook + agreement)
    assert exposed["both"] == pytest.approx(last * alone + agreement)
    short = replace(NODES, backward=0.01, overlap="uncompressed")
    assert stage_2(short, SLOW, 1).communication == pytest.approx(alone - by_slices + by_hook - 0.01 + agreement)


def test_with_overlap_a_chunk_is_averaged_over_the_node_while_another_is_on_the_network():
    """Two chunks, all passes free: the second one's mean over the node hides behind the first one's gather."""
    free = Cluster(gpus=8, gpus_per_node=2, network=4e8, latency=0, intra=1e9, intra_latency=0, memory=1e30)
    model = Model(2**30 // 2, overlap="both", levels=2)
    mean = 1 / 2 * 2**30 / 1e9 / 2
    size, _ = message_bytes(2**29, 4, 2, TwoPhases, slices=2)
    gather, spread = 3 / 4 * size / 5e7 / 2, 1 / 2 * size / 1e9 / 2
    assert mean < gather
    assert stage_2(model, free, chunks=2).communication == pytest.approx(mean + 4 * gather + spread)
    before = stage_2(replace(model, overlap="none"), free, chunks=2)
    assert before.communication == pytest.approx(2 * mean + 4 * gather + spread)


@pytest.mark.parametrize("overlap, reply, gpus", [
    ("none", "auto", 8), ("uncompressed", "direct", 16), ("both", 1, 1024), ("both", "direct", 8), ("none", 1, 16),
])  # fmt: skip
def test_more_of_a_resource_is_never_slower(overlap, reply, gpus):
    model, cluster = replace(NODES, overlap=overlap, reply=reply), replace(SLOW, gpus=gpus)
    for name, factor in (("network", 1.3), ("intra", 1.3), ("memory", 1.3), ("latency", 0.7), ("intra_latency", 0.7)):
        grown = [replace(cluster, **{name: getattr(cluster, name) * factor**k}) for k in range(-20, 20, 2)]
        totals = [stage_2(model, each).total for each in grown]
        assert all(later <= earlier for earlier, later in itertools.pairwise(totals)), name
        assert totals[-1] < totals[0], name


def test_state_in_bytes_an_element():
    for change, gpus, expected in (
        ({}, 16, 4 + 4 + 4 / 16 + 1 / 8),
        ({"levels": 2}, 16, 4 + 4 / 4 + 4 / 16 + 1 / 8),
        ({"levels": 2, "reply": "direct"}, 16, 4 + 4 / 4 + 4 / 8),
        ({"levels": 2}, 8, 4 + 4 / 4 + 2 / 8),
        ({"levels": 2, "itemsize": 2}, 16, 4 + 4 / 4 + 4 / 16 + 1 / 8 + 4),
        ({"levels": 2, "optimizer": "lamb"}, 16, 4 + 4 + 4 / 4 + 4 / 16 + 2 / 8),
    ):
        model = replace(BERT, **{"itemsize": 4} | change)
        assert state_bytes(model, replace(SLOW, gpus=gpus)) == pytest.approx(expected)


def test_one_gpu_sends_nothing_and_two_save_a_round_with_direct_replies():
    alone, pair = replace(SLOW, gpus=1), replace(SLOW, gpus=2, gpus_per_node=1)
    assert uncompressed(BERT, alone).communication == 0 == pytest.approx(stage_2(BERT, alone).communication, abs=1e-12)
    assert sent_compressed(BERT, alone) == (0, 0)
    small = replace(BERT, elements=4096)
    one, direct = (stage_2(replace(small, reply=reply), pair).communication for reply in (1, "direct"))
    assert one - direct == pytest.approx(SLOW.latency, rel=0.1)


def test_given_times_and_rates_stand_in_for_the_passes():
    for step in (uncompressed, stage_1, stage_2):
        assert step(replace(BERT, local=0.075), SLOW).local == 0.075
    for overlap in OVERLAPS:
        model = replace(NODES, overlap=overlap)
        given, passes = stage_2(replace(model, local=0.075), SLOW, chunks=1), stage_2(model, SLOW, chunks=1)
        assert given.local == 0.075 and given.communication == pytest.approx(passes.communication)
    rates = {"scan": 1e9, "compress": 2e9, "average": 3e9, "adam_update": 4e9}
    step = stage_2(BERT, replace(SLOW, rates=rates, cores=0.5), 1)
    assert step.local == pytest.approx(2 * ELEMENTS * (2 / 1e9 + 10.25 / 2e9 + 10.125 / 16 / 3e9 + 14.125 / 4e9))


def test_compression_pays_below_the_rate_it_says():
    model, cluster = replace(BERT, overlap="uncompressed"), Cluster(gpus=64, network=100e9)
    rate = pays_below(model, cluster)
    assert 1e9 < rate < 1e12
    for factor, faster in ((0.01, True), (0.98, True), (1.03, False), (100, False)):
        there = replace(cluster, network=factor * rate)
        assert (1.05 * stage_2(model, there).total < uncompressed(model, there, 2).total) is faster
    assert pays_below(BERT, SLOW) == math.inf  # four GPUs a node that all-reduce at 4 GB/s
    assert pays_below(replace(model, elements=1000), replace(cluster, latency=1)) == 0


def test_a_run_is_a_share_of_each_stage():
    for warmup in (0, 1, 0.25):
        expected = warmup * stage_1(BERT, SLOW).total + (1 - warmup) * stage_2(BERT, SLOW).total
        assert end_to_end(replace(BERT, warmup=warmup), SLOW) == pytest.approx(expected)


@pytest.mark.parametrize("of, name, values, says", [
    (BERT, "levels", (0, 3, "both", None), "it is 1"),
    (BERT, "steps", (0, 1.5, 10**12), "it is a whole number from 1 to 10,000,000"),
    (BERT, "var_update_scaler", (0,), "it is a whole number"), (BERT, "local_step_clipper", (0,), "a whole number"),
    (BERT, "elements", (0, 1.5), "both are whole numbers, 1 or more"), (BERT, "forward", (-1, math.inf), "0 or more"),
    (SLOW, "rtt", (-1,), "0 or more"), (SLOW, "transport", ("mpi",), "one of nccl, gloo"),
])  # fmt: skip
def test_numbers_that_cannot_be(of, name, values, says):
    for value in values:
        with pytest.raises(ValueError, match=f"{name} is .*: .*{says}"):
            replace(of, **{name: value})


class Clock:
    """A transport whose messages keep the network, and arrive later; and passes that take time on paper."""

    rank, size, name = 0, 2, "clock"

    def __init__(self, gather, scatter, gather_delay, scatter_delay):
        self.device = self.network = 0.0
        self.took = SimpleNamespace(gather=(gather, gather_delay), scatter=(scatter, scatter_delay))

    def send(self, seconds, delay):
        self.network = max(self.network, self.device) + seconds
        return self.arriving(self.network + delay)

    def arriving(self, end):
        return SimpleNamespace(wait=lambda: setattr(self, "device", max(self.device, end)))

    def all_to_all(self, out, sent, phase):
        return self.send(*self.took.gather)

    def all_gather(self, out, sent, phase):
        out.view(self.size, -1).copy_(sent.view(1, -1))
        return self.send(*self.took.scatter)

    def work(self, seconds):
        self.device += seconds


def of_a_node(clock, spread):
    """The transport to the other rank of a node, over a network of the node's own."""

    def all_gather(out, sent, phase):
        out.copy_(sent.expand_as(out))
        node.network = max(node.network, clock.device) + spread
        return clock.arriving(node.network)

    node = SimpleNamespace(rank=0, size=2, name="clock of a node", network=0.0, all_gather=all_gather)
    return node


@pytest.mark.parametrize("way", [TwoPhases, Direct])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("times, spread, delays", [
    ((1, 2, 3, 4, 5), None, (0, 0)), ((1, 7, 1, 1, 0), None, (0, 0)), ((5, 1, 1, 1, 1), None, (0, 0)),
    ((1, 2, 3, 4, 5), 2, (0, 0)), ((5, 4, 3, 2, 1), 9, (0, 0)), ((0, 1, 6, 5, 2), 20, (0, 0)),
    ((1, 2, 3, 4, 5), None, (6, 7)), ((5, 4, 3, 2, 1), None, (9, 2)), ((0, 1, 6, 5, 2), None, (0, 20)),
])  # fmt: skip
def test_the_schedule_is_that_of_an_exchange(way, chunks, times, spread, delays):
    """spread: over the node, with two levels. delays: of what is gathered and scattered."""
    compress, gather, average, scatter, use = times
    clock = Clock(gather, scatter, *delays)
    node = None if spread is None else of_a_node(clock, spread)
    layout = Layout([BLOCK_SIZE * 4 * chunks], ranks=(1 if node is None else 2) * way.shards(2), chunks=chunks)
    exchange = way(layout, clock, torch.device("cpu"), node=node)
    exchange.agree = lambda: None
    for messages in (exchange.sent,) if way is Direct else (exchange.received, exchange.reply):
        messages.header.copy_(torch.tensor(exchange.format.header, dtype=torch.int32))
    exchange.backend = SimpleNamespace(average=lambda *_, **__: clock.work(average))
    exchange.run(lambda chunk: clock.work(compress), lambda chunk: clock.work(use))
    if way is Direct:
        seconds = sent_once(chunks, compress, scatter, use, spread, delay=delays[1])
    else:
        seconds = pipelined(chunks, *times, spread, gather_delay=delays[0], scatter_delay=delays[1])
    assert seconds == clock.device


def segments_under_way(count, window, b, message):
    """Event by event: a segment leaves when the one `window` before it has arrived, and the link is free."""
    free, arrived = 0.0, []
    for i in range(count):
        asked = arrived[i - window] if i >= window else 0.0
        free = max(free, asked + message / 2) + b
        arrived.append(free + message / 2)
    return arrived[-1]


@pytest.mark.parametrize("size, at_once", [(2**20, 1), (100e6, 1), (100e6, 2)])
def test_an_all_reduce_over_gloo_takes_what_its_segments_take(size, at_once):
    for rtt in (0.0, 1e-4, 0.01, 0.05, 0.4):
        cluster = replace(FAR, network=1e8, rtt=rtt)
        count = at_once * 3 * max(2, math.ceil(size / at_once / 4 / 2**20))
        b = 3 / 4 * size / 12.5e6 / count
        played = 2 * segments_under_way(count, 2 * at_once, b, rtt)
        assert cluster.all_reduce(size, at_once) == pytest.approx(played, rel=0.03)
        assert cluster.all_reduce(size, at_once) >= 2 * 3 / 4 * size / 12.5e6


def test_nccl_takes_the_ring_or_the_trees_and_agreeing_waits():
    cluster = replace(FAR, transport="nccl", gpus=64)
    assert cluster.all_reduce(0) == pytest.approx(2 * 6 * 0.025)
    near = replace(NEAR, transport="nccl", gpus=64)
    assert near.all_reduce(1e9) == pytest.approx(2 * 63 / 64)  # the fewest bytes
    for transport, gpus, waits in (("gloo", 4, 1), ("gloo", 2, 2), ("nccl", 4, 2), ("nccl", 2, 1)):
        far = replace(FAR, transport=transport, gpus=gpus)
        assert far.agreement() - replace(far, rtt=0).agreement() == pytest.approx(waits * 0.05)
    assert stage_1(SMALL, FAR).total - uncompressed(SMALL, FAR).total == pytest.approx(FAR.agreement())  # always


def test_replies_wait_as_the_transport_sends_them():
    for shape, row, expected, waits in (
        ({}, 1e6, True, 0.5),
        ({}, 1e6, False, 1),
        ({"gpus": 2}, 1e6, True, 0.5),
        ({"gpus": 16, "gpus_per_node": 2}, 1e6, True, 7),  # ranks share hosts: Gloo's ring
        ({"gpus": 16, "gpus_per_node": 2}, 1e3, True, 0.5),
        ({"gpus": 64}, 1e6, True, 63),  # more ranks than go in pairs
        ({"gpus": 64}, 1e3, True, 1),
        ({"transport": "nccl"}, 1e3, True, 1.5),
        ({"gpus": 4, "gpus_per_node": 4}, 1e6, True, 0),
    ):
        assert replace(FAR, **shape).delay.all_gather(row, expected) == pytest.approx(waits * 0.05)


def test_small_models_do_not_agree_and_take_one_chunk():
    """2.5 round trips of a large model, 1.5 of a small one: what was measured, beside bytes and packing."""
    assert rounds(LARGE, FAR) == 2.5 and rounds(SMALL, FAR) == 1.5
    assert stage_2(SMALL, FAR).chunks == 1
    assert stage_2(SMALL, replace(FAR, network=1e6, memory=1e6)).chunks == 1
    assert stage_2(LARGE, replace(FAR, rtt=0, network=1e6, memory=1e6)).chunks > 1
    gain = stage_2(LARGE, FAR, chunks=1).total - stage_2(SMALL, FAR, chunks=1).total
    assert gain == pytest.approx(0.05, rel=0.01)
    large, small = (compressed_all_reduce(MOST_ELEMENTS + more, FAR, chunks=1) for more in (1, 0))
    assert large - small == pytest.approx(0.05, rel=0.01)
    far, near = (compressed_all_reduce(MOST_ELEMENTS, there, chunks=2) for there in (FAR, NEAR))
    assert far - near >= 2.5 * 0.05 - 1e-3


def test_chunks_wait_side_by_side_over_gloo_and_one_after_the_other_over_nccl():
    model = replace(LARGE, elements=2**26)
    for transport, message, ring, agreed in (("gloo", 0.05, 0.025, 0.05), ("nccl", 0.025, 0.075, 0.1)):
        far, near = replace(FAR, transport=transport), replace(NEAR, transport=transport)
        added = [stage_2(model, far, c).total - stage_2(model, near, c).total for c in (1, 4)]
        assert added[0] == pytest.approx(message + ring + agreed)
        if transport == "nccl":
            assert added[1] == pytest.approx(4 * (message + ring) + agreed)
        else:
            assert added[1] - agreed < 0.75 * 4 * (message + ring)


def test_a_longer_way_is_never_faster_and_only_messages_between_nodes_wait():
    delay = Delay(0.05, "gloo", gpus=8, nodes=1, shared=True)
    assert delay.message == delay.all_to_all() == delay.segments(1e9, 1.0, 1) == 0
    for transport, gpus, per_node in (("gloo", 4, 1), ("nccl", 16, 4), ("gloo", 64, 1), ("nccl", 4, 4)):
        cluster = Cluster(gpus=gpus, gpus_per_node=per_node, network=1e9, transport=transport)
        grown = [replace(cluster, rtt=rtt) for rtt in (0, 1e-4, 1e-3, 1e-2, 0.1)]
        for step in (uncompressed, stage_1, stage_2):
            totals = [step(replace(LARGE, levels=2), each).total for each in grown]
            assert all(later >= earlier for earlier, later in itertools.pairwise(totals))
            assert (totals[-1] > totals[0]) is (cluster.nodes > 1)

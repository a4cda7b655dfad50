"""The cluster model of `onebit plan`: bytes and times by message, a step that is the sum of its parts, and the schedule
of a real exchange played through as the plan has it. The pages that print its numbers hold the rest: see
test_plan_command.py and tests/perf/test_cluster_model.py.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onebit.cli.plan.cluster import Cluster, Groups
from onebit.cli.plan.exchange import message_bytes, play
from onebit.cli.plan.model import Model, local_step, pays_below, stage_1, stage_2, uncompressed
from onebit.collectives.direct import Direct
from onebit.collectives.flags import MOST_ELEMENTS
from onebit.collectives.topology import Topology
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels.data.layout import BLOCK_SIZE, Layout
from onebit.kernels.data.wire import Format

SLOW = Cluster(gpus=16, gpus_per_node=4, network=8e9, latency=1e-3, intra=4e9, intra_latency=1e-4, memory=1e11)
NODES = Model(340_000_000, 2, 0.036, 0.061, overlap="none")
BERT = replace(NODES, levels=1)
ELEMENTS, SIZE = 340e6, 680e6  # of BERT: elements, bytes of gradients
FAR = Cluster(gpus=4, gpus_per_node=1, network=8e9, latency=0, rtt=0.05, transport="gloo", memory=1e30)
SMALL = Model(MOST_ELEMENTS, 4, overlap="none")


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
    groups = Groups.of(cluster, 2)
    if g == 1 or m == 1:
        assert groups == Groups.of(cluster, 1)
        return
    assert (groups.replicas.gpus, groups.node.gpus, groups.slices) == (m, g, g)
    slices = [(i * g + b, k * g + b, 1e9 / g / m) for i, b in ranks for k in range(m)]
    assert groups.replicas.all_to_all(1e9) == pytest.approx(crossing(slices, g)[0] / 1e9)
    assert groups.replicas.all_gather(1e9) == pytest.approx(between / 1e9)
    assert groups.node.all_gather(1e9) == pytest.approx(within / 4e9)
    fast = Groups.of(replace(cluster, network=1e12), 2).replicas  # faster than the links of a node's GPUs in sum
    assert fast.all_gather(1e9) == pytest.approx((m - 1) / m * 1e9 / (g * 4e9))


@pytest.mark.parametrize("elements", [1, 2049, 340_000_000])
@pytest.mark.parametrize("ranks, chunks, slices", [(1, 1, 1), (3, 2, 1), (64, 8, 1), (2, 1, 4), (16, 8, 4)])
def test_messages_have_the_bytes_of_the_wire(elements, ranks, chunks, slices):
    for way in (TwoPhases, Direct):
        form = Format(Layout([elements], ranks=slices * way.shards(ranks), chunks=chunks))
        sent, replies = message_bytes(elements, ranks, chunks, way, slices)
        assert sent == (0 if way is Direct else slices * ranks * chunks * form.nbytes)
        assert replies == slices * ranks * chunks * form.nbytes


def test_a_step_is_its_parts():
    plain, one, two = uncompressed(BERT, SLOW), stage_1(BERT, SLOW), stage_2(BERT, SLOW, chunks=1)
    assert plain.total == pytest.approx(0.036 + 0.061 + SLOW.all_reduce(SIZE) + ELEMENTS * (2 + 16 + 10) / 1e11)
    assert one.total - plain.total == pytest.approx(ELEMENTS * 2 / 1e11 + SLOW.agreement())
    hidden = uncompressed(replace(BERT, overlap="uncompressed", backward=1e9), SLOW)
    assert hidden.communication == pytest.approx(SLOW.all_reduce(SIZE) * 25 * 2**20 / SIZE)  # of DDP's last bucket
    size, _ = message_bytes(340_000_000, 16, 1, TwoPhases)
    assert two.communication == pytest.approx(SLOW.all_to_all(size) + SLOW.all_gather(size) + SLOW.agreement())
    passes = 2 + (2 + 4 + 1 / 8 + 4 + 1 / 8) + (16 / 8 + 8 + 1 / 8) / 16 + (1 / 8 + 4 + 10)  # TARGETS, 16 bits
    assert two.local == pytest.approx(ELEMENTS * passes / 1e11)
    free = replace(SLOW, rates={"adam_update": 1e30})  # the update comes after the last chunk, and nothing hides it
    two, without = (stage_2(BERT, cluster, chunks=2) for cluster in (SLOW, free))
    assert two.communication == pytest.approx(without.communication)
    assert two.local - without.local == pytest.approx(ELEMENTS * (1 / 8 + 4 + 10) / 1e11)
    lamb = stage_2(replace(BERT, optimizer="lamb"), SLOW, 2)  # its statistics are read too
    assert lamb.local - two.local == pytest.approx(ELEMENTS * (1 / 8 + 1 / 8 + 12) / 1e11)
    rates = {"scan": 1e9, "compress": 2e9, "average": 3e9, "adam_update": 4e9}
    step = stage_2(BERT, replace(SLOW, rates=rates), 1)
    assert step.local == pytest.approx(ELEMENTS * (2 / 1e9 + 10.25 / 2e9 + 10.125 / 16 / 3e9 + 14.125 / 4e9))


def test_a_local_step_reads_gradients_three_times():
    """It looks for numbers that are not finite, measures its length, and moves: bytes an element of fp16."""
    assert local_step(BERT, SLOW).local == pytest.approx(ELEMENTS * (2 + (2 + 8) + (2 + 3 * 8 + 4 + 2)) / 1e11)


def test_with_overlap_a_node_averages_one_chunk_while_another_is_on_the_network():
    """Backward takes no time, and hides nothing."""
    for chunks, less in ((1, False), (4, True)):
        both, none = (stage_2(replace(NODES, backward=0.0, overlap=o), SLOW, chunks).total for o in ("both", "none"))
        assert (both < 0.99 * none) is less and both < 1.01 * none


def test_compression_pays_below_the_rate_it_says():
    model, cluster = replace(NODES, overlap="uncompressed"), Cluster(gpus=64, network=100e9)
    rate = pays_below(model, cluster)
    assert 1e9 < rate < 1e12
    for factor, faster in ((0.01, True), (0.98, True), (1.03, False), (100, False)):
        there = replace(cluster, network=factor * rate)
        assert (1.05 * stage_2(model, there).total < uncompressed(model, there, 2).total) is faster
    assert pays_below(BERT, SLOW) == math.inf  # four GPUs a node that all-reduce at 4 GB/s
    assert pays_below(replace(model, elements=1000), replace(cluster, latency=1)) == 0


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
@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("times, spread, delays", [
    ((1, 2, 3, 4, 5), None, (0, 0)), ((1, 7, 1, 1, 0), None, (0, 0)), ((1, 2, 3, 4, 5), 2, (0, 0)),
    ((5, 4, 3, 2, 1), 9, (0, 0)), ((0, 1, 6, 5, 2), 20, (0, 0)), ((1, 2, 3, 4, 5), None, (6, 7)),
    ((5, 4, 3, 2, 1), None, (9, 2)), ((0, 1, 6, 5, 2), None, (0, 20)),
])  # fmt: skip
def test_the_schedule_is_that_of_an_exchange(way, chunks, times, spread, delays):
    """spread: over the node, with two levels. delays: of what is gathered and scattered."""
    compress, gather, average, scatter, use = times
    clock = Clock(gather, scatter, *delays)
    node = None if spread is None else of_a_node(clock, spread)
    layout = Layout([BLOCK_SIZE * 4 * chunks], ranks=(1 if node is None else 2) * way.shards(2), chunks=chunks)
    exchange = way(Topology(clock, clock, node), layout, torch.device("cpu"))
    exchange.agree = lambda: None
    for messages in (exchange.sent,) if way is Direct else (exchange.received, exchange.reply):
        messages.header.copy_(torch.tensor(exchange.format.header, dtype=torch.int32))
    exchange.backend = SimpleNamespace(run=lambda _: clock.work(average))
    exchange.run(lambda chunk: clock.work(compress), lambda chunk: clock.work(use))
    phases = [(compress, gather, delays[0]), (average, scatter, delays[1])]
    if way is Direct:
        phases = [(compress, scatter, delays[1])]
    assert play(chunks, phases, use, spread) == clock.device


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
        assert cluster.all_reduce(size, at_once) >= 2 * 3 / 4 * size / 12.5e6 * (1 - 1e-12)
    for elements, buckets in ((2**20, 1), (2**24, 2)):  # as many as DDP has on the way
        found = uncompressed(replace(SMALL, elements=elements), FAR).communication
        assert found == pytest.approx(FAR.all_reduce(4 * elements, buckets))


def test_agreeing_and_replies_wait_as_the_transport_sends_them():
    trees = replace(FAR, transport="nccl", gpus=64)
    assert trees.all_reduce(1e6) == pytest.approx(2 * 1e6 / 1e9 + 2 * 6 * 0.025)
    for transport, gpus, waits in (("gloo", 4, 1), ("gloo", 2, 2), ("nccl", 4, 2), ("nccl", 2, 1)):
        assert replace(FAR, transport=transport, gpus=gpus).agreement() == pytest.approx(waits * 0.05)
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
        assert replace(FAR, **shape).all_gather_delay(row, expected) == pytest.approx(waits * 0.05)
    nodes = Groups.of(replace(FAR, gpus=16, gpus_per_node=4), 2).replicas  # ranks share hosts here too
    assert nodes.all_gather_delay(1e6, expected=True) == pytest.approx(3 * 0.05)

"""The cluster model: bytes counted by message, the schedule of a real exchange, and what `onebit plan` prints."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
from onebit.collectives.two_phases import TwoBitReplies, TwoPhases
from onebit.kernels.data.layout import BLOCK_SIZE, Layout
from onebit.kernels.data.wire import Format

CPU = torch.device("cpu")
RECORD = Path(__file__).resolve().parents[3] / "perf/results/amd-epyc.json"
SLOW = Cluster(gpus=16, gpus_per_node=4, network=8e9, latency=1e-3, intra=4e9, intra_latency=1e-4, memory=1e11)
BERT = Model(340_000_000, 2, 0.036, 0.061, overlap="none")
NODES = replace(BERT, levels=2)
GROUPS = [(1, 8), (4, 4), (4, 1), (16, 4), (24, 8)]


def crossing(messages, on_node):
    """The most bytes that a node sends to others, and that a GPU sends within its node, of (from, to, bytes)."""
    between, within = {}, {}
    for source, target, size in messages:
        if source // on_node != target // on_node:
            between[source // on_node] = between.get(source // on_node, 0) + size
        elif source != target:
            within[source] = within.get(source, 0) + size
    return max(between.values(), default=0), max(within.values(), default=0)


@pytest.mark.parametrize("gpus, per_node", GROUPS)
def test_the_all_to_all_takes_what_its_messages_take(gpus, per_node):
    cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node, latency=0, intra_latency=0)
    messages = [(i, k, 1e9 / gpus) for i in range(gpus) for k in range(gpus)]
    between, within = crossing(messages, cluster.on_node)
    assert cluster.all_to_all(1e9) == pytest.approx(max(between / 1e9, within / 4e9))


@pytest.mark.parametrize("gpus, per_node", GROUPS)
def test_the_all_gather_takes_what_its_ring_takes(gpus, per_node):
    cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node, latency=0, intra_latency=0)
    ring = [(i, (i + 1) % gpus, 1e9 / gpus) for _ in range(gpus - 1) for i in range(gpus)]
    between, within = crossing(ring, cluster.on_node)
    assert cluster.all_gather(1e9) == pytest.approx(max(between / 1e9, within / 4e9))


@pytest.mark.parametrize("gpus, per_node", GROUPS)
def test_the_all_reduce_takes_what_its_rings_take(gpus, per_node):
    """Reduce-scatter within nodes, a ring of each local rank between nodes, all-gather within nodes."""
    cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node, latency=0, intra_latency=0)
    g, m = cluster.on_node, cluster.nodes
    inner = [
        (node * g + i, node * g + (i + 1) % g, 1e9 / g) for node in range(m) for _ in range(g - 1) for i in range(g)
    ]
    outer = [
        (node * g + i, (node + 1) % m * g + i, 1e9 / g / m)
        for i in range(g)
        for _ in range(2 * (m - 1))
        for node in range(m)
    ]
    _, within = crossing(inner, g)
    between, _ = crossing(outer, g)
    assert cluster.all_reduce(1e9) == pytest.approx(2 * within / 4e9 + between / 1e9)


def test_latencies_are_those_of_the_messages():
    assert SLOW.all_reduce(0) == pytest.approx(2 * 2 * 1e-3 + 2 * 3 * 1e-4)  # trees
    assert replace(SLOW, transport="gloo").all_reduce(0) == pytest.approx(2 * 3 * 1e-3 + 2 * 3 * 1e-4)  # a ring
    assert SLOW.all_to_all(0) == pytest.approx(12 * 1e-3 + 3 * 1e-4)
    assert SLOW.all_gather(0) == pytest.approx(3 * 1e-3 + 12 * 1e-4)
    assert SLOW.agreement() == pytest.approx(2 * 4 * 1e-3)
    assert replace(SLOW, gpus=4).agreement() == pytest.approx(2 * 2 * 1e-4)
    assert replace(SLOW, transport="gloo").agreement() == pytest.approx(12 * 1e-3 + 3 * 1e-4)  # all to all


class Clock:
    """A transport and passes that take time on paper: one device, one network."""

    rank, size, name = 0, 2, "clock"

    def __init__(self, compress, gather, average, scatter, use):
        self.device = self.network = 0.0
        self.took = SimpleNamespace(compress=compress, gather=gather, average=average, scatter=scatter, use=use)

    def send(self, seconds):
        self.network = end = max(self.network, self.device) + seconds

        def wait():
            self.device = max(self.device, end)

        return SimpleNamespace(wait=wait)

    def all_to_all(self, out, sent, phase):
        return self.send(self.took.gather)

    def all_gather(self, out, sent, phase):
        out.view(self.size, -1).copy_(sent.view(1, -1))
        return self.send(self.took.scatter)

    def all_max(self, values, phase):
        return None

    def all_sum(self, values, phase):
        return SimpleNamespace(wait=lambda: None)

    def work(self, seconds):
        self.device += seconds


class NodeClock:
    """The other rank of a node, over a network of the node's own."""

    rank, size, name = 0, 2, "clock of a node"

    def __init__(self, clock, spread):
        self.clock, self.network, self.spread = clock, 0.0, spread

    def all_gather(self, out, sent, phase):
        out.copy_(sent.expand_as(out))
        self.network = end = max(self.network, self.clock.device) + self.spread

        def wait():
            self.clock.device = max(self.clock.device, end)

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("times", [(1, 2, 3, 4, 5), (5, 4, 3, 2, 1), (1, 7, 1, 1, 0), (0, 1, 6, 5, 2)])
def test_the_schedule_is_that_of_an_exchange(chunks, times):
    clock = Clock(*times)
    exchange = TwoPhases(Layout([BLOCK_SIZE * 2 * chunks], ranks=2, chunks=chunks), clock, CPU)
    exchange.agree()
    for messages in (exchange.received, exchange.reply):
        messages.header.copy_(torch.tensor(exchange.format.header, dtype=torch.int32))
    clock.device = clock.network = 0.0
    exchange.backend = SimpleNamespace(average=lambda *_, **__: clock.work(clock.took.average))
    exchange.run(lambda chunk: clock.work(clock.took.compress), lambda chunk: clock.work(clock.took.use))
    assert pipelined(chunks, *times) == clock.device


@pytest.mark.parametrize("elements", [1, 2049, 340_000_000])
@pytest.mark.parametrize("ranks, chunks", [(1, 1), (3, 2), (64, 8)])
def test_messages_have_the_bytes_of_the_wire(elements, ranks, chunks):
    form = Format(Layout([elements], ranks=ranks, chunks=chunks))
    sent = ranks * chunks * form.nbytes
    assert message_bytes(elements, ranks, chunks, TwoPhases) == (sent, sent)
    assert message_bytes(elements, ranks, chunks, TwoBitReplies) == (sent, ranks * chunks * form.with_bits(2).nbytes)
    whole = Format(Layout([elements], chunks=chunks))
    assert message_bytes(elements, ranks, chunks, Direct) == (0, ranks * chunks * whole.nbytes)


def test_bytes_sent():
    gpu, node = sent_uncompressed(BERT, SLOW)
    assert gpu == pytest.approx(2 * 680e6 * 15 / 16) and node == pytest.approx(2 * 680e6 * 3 / 4)
    gpu, node = sent_compressed(BERT, SLOW)
    assert sent_uncompressed(BERT, SLOW, 4)[0] / gpu == pytest.approx(32 / (1 + 1 / 64), rel=1e-3)
    assert node == pytest.approx(message_bytes(340_000_000, 16, 1, TwoPhases)[0] * (4 * 12 / 16 + 15 / 16))
    assert sent_compressed(BERT, replace(SLOW, gpus=4))[1] == 0


def test_bytes_sent_by_reply():
    one, two, direct = (sent_compressed(replace(BERT, reply=reply), SLOW)[0] for reply in (1, 2, "direct"))
    assert two == pytest.approx(1.5 * one, rel=1e-3) and direct == pytest.approx(16 / 2 * one, rel=1e-3)
    pair = replace(SLOW, gpus=2)
    assert sent_compressed(BERT, pair) == sent_compressed(replace(BERT, reply="direct"), pair)
    assert sent_compressed(BERT, pair)[0] == pytest.approx(sent_compressed(replace(BERT, reply=1), pair)[0], rel=1e-3)


def test_two_ranks_save_a_round_with_direct_replies():
    pair, small = replace(SLOW, gpus=2, gpus_per_node=1), replace(BERT, elements=4096)
    one, direct = (stage_2(replace(small, reply=reply), pair).communication for reply in (1, "direct"))
    assert one - direct == pytest.approx(SLOW.latency, rel=0.1)


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("times", [(1, 2, 3), (5, 1, 1), (1, 1, 4)])
def test_the_schedule_is_that_of_a_direct_exchange(chunks, times):
    compress, send, use = times
    clock = Clock(compress, 0, 0, send, use)
    exchange = Direct(Layout([BLOCK_SIZE * chunks], chunks=chunks), clock, CPU)
    exchange.agree()
    exchange.sent.header.copy_(torch.tensor(exchange.format.header, dtype=torch.int32))
    clock.device = clock.network = 0.0
    exchange.run(lambda chunk: clock.work(clock.took.compress), lambda chunk: clock.work(clock.took.use))
    assert sent_once(chunks, *times) == clock.device


@pytest.mark.parametrize("way", [TwoPhases, Direct])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("times", [(1, 2, 3, 4, 5, 2), (5, 4, 3, 2, 1, 9), (1, 7, 1, 1, 0, 3), (0, 1, 6, 5, 2, 20)])
def test_the_schedule_is_that_of_an_exchange_between_nodes(way, chunks, times):
    *over, spread = times
    clock = Clock(*over)
    node = NodeClock(clock, spread)
    layout = Layout([BLOCK_SIZE * 4 * chunks], ranks=2 * way.shards(2), chunks=chunks)
    exchange = way(layout, clock, CPU, node=node)
    exchange.agree()
    for messages in (exchange.sent,) if way is Direct else (exchange.received, exchange.reply):
        messages.header.copy_(torch.tensor(exchange.format.header, dtype=torch.int32))
    clock.device = clock.network = node.network = 0.0
    exchange.backend = SimpleNamespace(average=lambda *_, **__: clock.work(clock.took.average))
    exchange.run(lambda chunk: clock.work(clock.took.compress), lambda chunk: clock.work(clock.took.use))
    compress, _, _, scatter, use = over
    seconds = sent_once(chunks, compress, scatter, use, spread) if way is Direct else pipelined(chunks, *times)
    assert seconds == clock.device


def test_a_chunk_is_spread_while_the_next_one_arrives():
    assert sent_once(8, compress=0, exchange=2, use=0, spread=2) == 8 * 2 + 2
    assert pipelined(8, compress=0, gather=1, average=0, scatter=1, use=0, spread=1) == 8 * 2 + 1


@pytest.mark.parametrize("gpus, per_node", GROUPS)
def test_slices_take_what_their_messages_take(gpus, per_node):
    """Every rank exchanges a slice with those of its place on other nodes; then the node shares what came."""
    cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node, latency=0, intra_latency=0)
    groups = Groups.of(cluster, 2)
    if not cluster.has_two_levels:
        assert groups == Groups.of(cluster, 1)
        return
    g, m = cluster.on_node, cluster.nodes
    assert (groups.replicas.gpus, groups.node.gpus, groups.slices) == (m, g, g)
    slices = [(i * g + b, k * g + b, 1e9 / g / m) for b in range(g) for i in range(m) for k in range(m)]
    between, _ = crossing(slices, g)
    assert groups.replicas.all_to_all(1e9) == pytest.approx(between / 1e9)
    rings = [(i * g + b, (i + 1) % m * g + b, 1e9 / g / m) for b in range(g) for i in range(m) for _ in range(m - 1)]
    between, within = crossing(rings, g)
    assert groups.replicas.all_gather(1e9) == pytest.approx(between / 1e9) and within == 0
    spread = [(i * g + b, i * g + (b + 1) % g, 1e9 / g) for b in range(g) for i in range(m) for _ in range(g - 1)]
    between, within = crossing(spread, g)
    assert groups.node.all_gather(1e9) == pytest.approx(within / 4e9) and between == 0


def test_the_gpus_of_a_node_send_their_slices_together():
    """A network as fast as their links in sum takes what all of them send; a faster one waits for them."""
    for network, rate in ((8 * 12e9, 12e9), (8 * 16e9, 16e9), (8 * 20e9, 16e9)):
        groups = Groups.of(replace(SLOW, network=network, latency=0), 2)
        assert groups.replicas.all_gather(1e9) == pytest.approx(3 / 4 * 1e9 / rate)


def test_latencies_of_two_levels_are_those_of_their_messages():
    groups = Groups.of(SLOW, 2)
    assert groups.replicas.all_to_all(0) == groups.replicas.all_gather(0) == pytest.approx(3 * 1e-3)
    assert groups.node.all_to_all(0) == groups.node.all_gather(0) == pytest.approx(3 * 1e-4)
    assert groups.node.all_reduce(0) == pytest.approx(6 * 1e-4)


@pytest.mark.parametrize("overlap", ["none", "uncompressed", "both"])
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("gpus, per_node", [(16, 1), (8, 8), (2, 1), (1, 1)])
@pytest.mark.parametrize("local", [None, 0.075])
def test_one_level_is_all_there_is_without_nodes_of_several(gpus, per_node, optimizer, overlap, local):
    cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node)
    one = replace(BERT, optimizer=optimizer, overlap=overlap, local=local)
    two = replace(one, levels=2)
    assert stage_2(two, cluster) == stage_2(one, cluster) and end_to_end(two, cluster) == end_to_end(one, cluster)
    assert sent_compressed(two, cluster) == sent_compressed(one, cluster)
    assert state_bytes(two, cluster) == state_bytes(one, cluster)
    assert pays_below(two, cluster) == pays_below(one, cluster)


def test_stages_and_steps_without_compression_have_no_levels():
    assert uncompressed(NODES, SLOW) == uncompressed(BERT, SLOW) and stage_1(NODES, SLOW) == stage_1(BERT, SLOW)


@pytest.mark.parametrize("overlap, times", [("none", 1), ("uncompressed", 2)])
def test_a_step_of_two_levels_is_its_parts(overlap, times):
    """4 nodes of 4: a node's mean of gradients, slices over the network at 1e9 B/s, replies over the node at 4e9."""
    step = stage_2(replace(NODES, overlap=overlap, backward=0.0), SLOW, chunks=1)
    mean = times * (3 / 4 * 680e6 / 4e9 + 3 * 1e-4)
    size, replies = message_bytes(340_000_000, 4, 1, TwoPhases, slices=4)
    between = 3 / 4 * (size + replies) / 1e9 + 2 * 3 * 1e-3
    spread = 3 / 4 * replies / 4e9 + 3 * 1e-4
    assert step.communication == pytest.approx(mean + between + spread + 2 * 4 * 1e-3)
    a_slice = 2 / 4 + (2 + 4 + 1 / 8 + 4 + 1 / 8) / 4 + (4 / 8 + 8 + 1 / 8) / 16  # scan, compress, average
    assert step.local == pytest.approx(340e6 * (a_slice + 1 / 8 + 4 + 10) / 9e10)


@pytest.mark.parametrize("overlap", ["none", "uncompressed", "both"])
def test_a_given_time_is_of_the_passes_of_two_levels_too(overlap):
    model = replace(NODES, overlap=overlap)
    step = stage_2(replace(model, local=0.075), SLOW, chunks=1)
    assert step.local == 0.075
    assert step.communication == pytest.approx(stage_2(model, SLOW, chunks=1).communication)


def test_a_chunk_of_two_levels_is_cut_into_slices_and_shards():
    """As many chunks are tried as `onebit.collectives.chunking.choose_chunks` measures."""
    small = replace(NODES, elements=3 * 16 * 16 * BLOCK_SIZE)
    slow = replace(SLOW, network=1e6, latency=0, intra=1e6, memory=1e6)  # more chunks would be faster
    most = max(candidates(small.elements, 16, BLOCK_SIZE))
    assert most == 2 == stage_2(small, slow).chunks < max(candidates(small.elements, 4, BLOCK_SIZE))
    assert stage_2(small, slow, chunks=4).total < stage_2(small, slow).total


def test_two_nodes_exchange_directly():
    """What replies are best is by nodes: no average, one round, and every rank decodes two messages."""
    pair = replace(SLOW, gpus=8)
    step = stage_2(NODES, pair, chunks=1)
    assert step == stage_2(replace(NODES, reply="direct"), pair, chunks=1)
    _, replies = message_bytes(340_000_000, 2, 1, Direct, slices=4)
    mean, spread = 3 / 4 * 680e6 / 4e9 + 3 * 1e-4, 3 / 4 * replies / 4e9 + 3 * 1e-4
    assert step.communication == pytest.approx(mean + replies / 2 / 1e9 + 1e-3 + spread + 2 * 3 * 1e-3)
    passes = (2 + 2 + 4 + 2 / 8 + 4 + 1 / 8) / 4 + (2 / 8 + 4 + 10)
    assert step.local == pytest.approx(340e6 * passes / 9e10)
    assert sent_compressed(NODES, pair)[1] == pytest.approx(replies / 2)
    overlapped = stage_2(replace(NODES, overlap="both", backward=0.0), pair, chunks=1)
    assert overlapped.communication == pytest.approx(step.communication)


def test_lamb_of_two_levels_updates_everything_after_the_last_chunk():
    more = stage_2(replace(NODES, optimizer="lamb"), SLOW, 1).local - stage_2(NODES, SLOW, 1).local
    assert more == pytest.approx(340e6 * (1 / 8 + 1 / 8 + 12) / 9e10)


@pytest.mark.parametrize("elements", [1, 2049, 340_000_000])
@pytest.mark.parametrize("nodes, chunks", [(2, 1), (3, 2), (16, 8)])
@pytest.mark.parametrize("way", [TwoPhases, TwoBitReplies, Direct])
def test_messages_of_slices_have_the_bytes_of_the_wire(elements, nodes, chunks, way):
    form = Format(Layout([elements], ranks=4 * way.shards(nodes), chunks=chunks))
    sent, replies = message_bytes(elements, nodes, chunks, way, slices=4)
    assert sent == (0 if way is Direct else 4 * nodes * chunks * form.nbytes)
    assert replies == 4 * nodes * chunks * form.with_bits(way.reply_bits).nbytes


def test_a_node_sends_what_one_rank_would():
    node = sent_compressed(NODES, SLOW)[1]
    assert node == pytest.approx(sent_compressed(BERT, replace(SLOW, gpus=4, gpus_per_node=1))[1], rel=1e-3)
    size, replies = message_bytes(340_000_000, 4, 1, TwoPhases, slices=4)
    assert node == pytest.approx(3 / 4 * (size + replies))
    many = Cluster(gpus=1024, gpus_per_node=8, network=1e9)
    ratio = sent_compressed(BERT, many)[1] / sent_compressed(NODES, many)[1]
    assert ratio == pytest.approx((8 + 1) / 2, rel=0.01)  # the all-gather passes a node once with one level too


@pytest.mark.parametrize("overlap, gradients", [("none", 1), ("uncompressed", 2), ("both", 1)])
def test_a_gpu_sends_gradients_over_its_node_and_a_slice_over_the_network(overlap, gradients):
    size, replies = message_bytes(340_000_000, 4, 1, TwoPhases, slices=4)
    mean, between, spread = gradients * 3 / 4 * 680e6, 3 / 4 * (size + replies) / 4, 3 / 4 * replies
    assert sent_compressed(replace(NODES, overlap=overlap), SLOW)[0] == pytest.approx(mean + between + spread)


def test_the_mean_over_a_node_hides_where_ddp_or_the_exchange_takes_it():
    long = replace(NODES, backward=1e3)
    exposed = {name: stage_2(replace(long, overlap=name), SLOW, 1).communication for name in ("uncompressed", "both")}
    agreement, last = SLOW.agreement(), BUCKET / 680e6
    alone = stage_2(NODES, SLOW, 1).communication - agreement
    node = Groups.of(SLOW, 2).node
    by_hook, by_slices = node.all_reduce(680e6), node.all_to_all(680e6)
    assert exposed["uncompressed"] == pytest.approx(alone - by_slices + last * by_hook + agreement)
    assert exposed["both"] == pytest.approx(last * alone + agreement)
    short = replace(NODES, backward=0.01, overlap="uncompressed")
    assert stage_2(short, SLOW, 1).communication == pytest.approx(alone - by_slices + by_hook - 0.01 + agreement)


def test_with_overlap_a_chunk_is_averaged_over_the_node_while_another_is_on_the_network():
    """Two chunks, all passes free: the second one's mean over the node hides behind the first one's gather."""
    free = Cluster(gpus=8, gpus_per_node=2, network=4e8, latency=0, intra=1e9, intra_latency=0, memory=1e30)
    model = Model(2**30 // 2, overlap="both", levels=2)
    step = stage_2(model, free, chunks=2)
    mean = 1 / 2 * 2**30 / 1e9 / 2
    size, _ = message_bytes(2**29, 4, 2, TwoPhases, slices=2)
    gather = 3 / 4 * size / 5e7 / 2
    spread = 1 / 2 * size / 1e9 / 2
    assert mean < gather
    assert step.communication == pytest.approx(mean + 4 * gather + spread)
    before = stage_2(replace(model, overlap="none"), free, chunks=2)
    assert before.communication == pytest.approx(2 * mean + 4 * gather + spread)


@pytest.mark.parametrize("overlap", ["none", "uncompressed", "both"])
@pytest.mark.parametrize("reply", ["auto", "direct", 1, 2])
@pytest.mark.parametrize("gpus", [8, 16, 1024])
def test_more_of_a_resource_is_never_slower(overlap, reply, gpus):
    model, cluster = replace(NODES, overlap=overlap, reply=reply), replace(SLOW, gpus=gpus)
    for name, factor in (("network", 1.3), ("intra", 1.3), ("memory", 1.3), ("latency", 0.7), ("intra_latency", 0.7)):
        grown = [replace(cluster, **{name: getattr(cluster, name) * factor**k}) for k in range(-20, 20)]
        totals = [stage_2(model, each).total for each in grown]
        assert all(later <= earlier for earlier, later in itertools.pairwise(totals)), name
        assert totals[-1] < totals[0], name


def test_two_levels_pay_on_slow_networks_and_one_level_on_slow_nodes():
    assert stage_2(NODES, SLOW).total < stage_2(BERT, SLOW).total
    slow_node = replace(SLOW, network=100e9, intra=1e9)
    assert stage_2(NODES, slow_node).total > stage_2(BERT, slow_node).total


@pytest.mark.parametrize(
    "change, cluster, expected",
    [
        ({}, {}, 4 + 4 + 4 / 16 + 1 / 8),
        ({"levels": 2}, {}, 4 + 4 / 4 + 4 / 16 + 1 / 8),
        ({"levels": 2, "reply": 2}, {}, 4 + 4 / 4 + 4 / 16 + 2 / 8),
        ({"levels": 2, "reply": "direct"}, {}, 4 + 4 / 4 + 4 / 8),
        ({"levels": 2}, {"gpus": 8}, 4 + 4 / 4 + 2 / 8),
        ({"levels": 2, "itemsize": 2}, {}, 4 + 4 / 4 + 4 / 16 + 1 / 8 + 4),
        ({"levels": 2, "optimizer": "lamb"}, {}, 4 + 4 + 4 / 4 + 4 / 16 + 2 / 8),
    ],
)
def test_state_in_bytes_an_element(change, cluster, expected):
    assert state_bytes(replace(BERT, **{"itemsize": 4} | change), replace(SLOW, **cluster)) == pytest.approx(expected)


@pytest.mark.parametrize("levels", [0, 3, "both", None])
def test_levels_are_one_or_two(levels):
    with pytest.raises(ValueError, match=r"levels is .*: it is 1"):
        replace(BERT, levels=levels)


def test_a_step_is_its_parts():
    plain, two = uncompressed(BERT, SLOW), stage_2(BERT, SLOW, chunks=1)
    assert plain.total == pytest.approx(0.036 + 0.061 + SLOW.all_reduce(680e6) + 340e6 * (2 + 16 + 10) / 9e10)
    size, _ = message_bytes(340_000_000, 16, 1, TwoPhases)
    assert two.communication == pytest.approx(SLOW.all_to_all(size) + SLOW.all_gather(size) + SLOW.agreement())
    passes = 2 + (2 + 4 + 1 / 8 + 4 + 1 / 8) + (16 / 8 + 8 + 1 / 8) / 16 + (1 / 8 + 4 + 10)  # TARGETS, 16 bits
    assert two.local == pytest.approx(340e6 * passes / 9e10)
    one = stage_1(BERT, SLOW)
    assert one.total - plain.total == pytest.approx(340e6 * 2 / 9e10 + SLOW.agreement())


def test_lamb_reads_its_statistics_too():
    lamb = replace(BERT, optimizer="lamb")
    more = stage_2(lamb, SLOW, 1).local - stage_2(BERT, SLOW, 1).local
    assert more == pytest.approx(340e6 * (1 / 8 + 1 / 8 + 12) / 9e10)
    assert stage_2(lamb, SLOW, 1).communication == pytest.approx(stage_2(BERT, SLOW, 1).communication)


def test_the_best_number_of_chunks_is_taken():
    options = candidates(BERT.elements, SLOW.gpus, BLOCK_SIZE)
    totals = {chunks: stage_2(BERT, SLOW, chunks).total for chunks in options}
    best = stage_2(BERT, SLOW)
    assert best.total == min(totals.values()) == totals[best.chunks] < totals[1]
    calls = [compressed_all_reduce(340_000_000, SLOW, chunks=chunks) for chunks in options]
    assert compressed_all_reduce(340_000_000, SLOW) == min(calls) < calls[0]


def test_overlap_hides_what_backward_is_long_enough_for():
    alone, hidden = uncompressed(BERT, SLOW), uncompressed(replace(BERT, overlap="uncompressed"), SLOW)
    assert alone.communication - hidden.communication == pytest.approx(BERT.backward)
    long = replace(BERT, overlap="uncompressed", backward=1e3)
    assert uncompressed(long, SLOW).communication == pytest.approx(alone.communication * BUCKET / 680e6)
    assert stage_2(replace(BERT, overlap="uncompressed"), SLOW, 1) == stage_2(BERT, SLOW, 1)
    both = stage_2(replace(BERT, overlap="both"), SLOW, 1)
    assert stage_2(BERT, SLOW, 1).communication - both.communication == pytest.approx(BERT.backward)
    many = uncompressed(replace(BERT, overlap="uncompressed", accumulation=3), SLOW)
    assert many.communication == hidden.communication and many.forward == pytest.approx(3 * 0.036)


def test_one_gpu_sends_nothing():
    alone = replace(SLOW, gpus=1)
    assert uncompressed(BERT, alone).communication == 0
    assert stage_2(BERT, alone).communication == pytest.approx(0, abs=1e-12)
    assert sent_compressed(BERT, alone) == (0, 0)


def test_a_given_time_stands_in_for_the_passes():
    given = replace(BERT, local=0.075)
    steps = [step(given, SLOW) for step in (uncompressed, stage_1, stage_2)]
    assert [step.local for step in steps] == [0.075] * 3


def test_measured_rates_stand_in_for_the_memory():
    rates = {"scan": 1e9, "compress": 2e9, "average": 3e9, "adam_update": 4e9}
    step = stage_2(BERT, replace(SLOW, rates=rates, cores=0.5), 1)
    seconds = 2 / 1e9 + 10.25 / 2e9 + 10.125 / 16 / 3e9 + 14.125 / 4e9
    assert step.local == pytest.approx(2 * 340e6 * seconds)


def test_compression_pays_below_the_rate_it_says():
    model, cluster = replace(BERT, overlap="uncompressed"), Cluster(gpus=64, network=100e9)
    rate = pays_below(model, cluster)
    assert 1e9 < rate < 1e12
    for factor, faster in ((0.01, True), (0.98, True), (1.03, False), (100, False)):
        there = replace(cluster, network=factor * rate)
        assert (stage_2(model, there).total < uncompressed(model, there).total) is faster
    assert pays_below(BERT, SLOW) == math.inf  # four GPUs a node that all-reduce at 4 GB/s
    assert pays_below(replace(model, elements=1000), replace(cluster, latency=1)) == 0


def test_a_run_is_a_share_of_each_stage():
    times = stage_1(BERT, SLOW).total, stage_2(BERT, SLOW).total
    for warmup, expected in ((0, times[1]), (1, times[0]), (0.25, 0.25 * times[0] + 0.75 * times[1])):
        assert end_to_end(replace(BERT, warmup=warmup), SLOW) == pytest.approx(expected)

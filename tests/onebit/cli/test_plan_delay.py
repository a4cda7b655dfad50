"""The schedule of a real exchange, played through as the plan has it, and what a round trip between nodes adds."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onebit.cli.plan.delay import Delay
from onebit.cli.plan.model import (
    Cluster,
    Model,
    compressed_all_reduce,
    local_step,
    pipelined,
    rounds,
    sent_once,
    stage_1,
    stage_2,
    uncompressed,
)
from onebit.collectives.direct import Direct
from onebit.collectives.flags import MOST_ELEMENTS
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels.data.layout import BLOCK_SIZE, Layout

FAR = Cluster(gpus=4, gpus_per_node=1, network=8e9, latency=0, rtt=0.05, transport="gloo", memory=1e30)
NEAR = replace(FAR, rtt=0.0)
SMALL = Model(MOST_ELEMENTS, 4, overlap="none")
LARGE = replace(SMALL, elements=MOST_ELEMENTS + 1)


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
        def wait():
            self.device = max(self.device, end)

        return SimpleNamespace(wait=wait)

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


def test_nccl_takes_the_ring_or_the_trees():
    cluster = replace(FAR, transport="nccl", gpus=64)
    assert cluster.all_reduce(0) == pytest.approx(2 * 6 * 0.025)
    near = replace(NEAR, transport="nccl", gpus=64)
    assert near.all_reduce(1e9) == pytest.approx(2 * 63 / 64)  # the fewest bytes


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


def test_agreeing_waits():
    for transport, gpus, waits in (("gloo", 4, 1), ("gloo", 2, 2), ("nccl", 4, 2), ("nccl", 2, 1)):
        far = replace(FAR, transport=transport, gpus=gpus)
        assert far.agreement() - replace(far, rtt=0).agreement() == pytest.approx(waits * 0.05)
    assert stage_1(SMALL, FAR).total - uncompressed(SMALL, FAR).total == pytest.approx(FAR.agreement())  # always


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


def test_one_node_and_a_local_step_do_not_wait():
    model = replace(SMALL, optimizer="zero_one")
    assert local_step(model, FAR) == local_step(model, NEAR)
    delay = Delay(0.05, "gloo", gpus=8, nodes=1, shared=True)
    assert delay.message == delay.all_to_all() == delay.segments(1e9, 1.0, 1) == 0


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


def test_a_longer_way_is_never_faster():
    for transport, gpus, per_node in (("gloo", 4, 1), ("nccl", 16, 4), ("gloo", 64, 1), ("nccl", 4, 4)):
        cluster = Cluster(gpus=gpus, gpus_per_node=per_node, network=1e9, transport=transport)
        grown = [replace(cluster, rtt=rtt) for rtt in (0, 1e-4, 1e-3, 1e-2, 0.1)]
        for step in (uncompressed, stage_1, stage_2):
            totals = [step(replace(LARGE, levels=2), each).total for each in grown]
            assert all(later >= earlier for earlier, later in itertools.pairwise(totals))
            assert (totals[-1] > totals[0]) is (cluster.nodes > 1)

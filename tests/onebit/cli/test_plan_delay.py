"""What a round trip between nodes adds: message by message, and in the schedule of a real exchange."""

from __future__ import annotations

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

CPU = torch.device("cpu")
FAR = Cluster(gpus=4, gpus_per_node=1, network=8e9, latency=0, rtt=0.05, transport="gloo", memory=1e30)
NEAR = replace(FAR, rtt=0.0)
SMALL = Model(MOST_ELEMENTS, 4, overlap="none")
LARGE = replace(SMALL, elements=MOST_ELEMENTS + 1)


def segments_under_way(count: int, window: int, b: float, message: float) -> float:
    """Event by event: a segment leaves when the one `window` before it has arrived, and the link is free."""
    free, arrived = 0.0, []
    for i in range(count):
        asked = arrived[i - window] if i >= window else 0.0
        free = max(free, asked + message / 2) + b
        arrived.append(free + message / 2)
    return arrived[-1]


@pytest.mark.parametrize("size", [2**20, 100e6])
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("rtt", [0.0, 1e-4, 0.01, 0.05, 0.4])
def test_an_all_reduce_over_gloo_takes_what_its_segments_take(size, at_once, rtt):
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


@pytest.mark.parametrize(
    "shape, row, expected, waits",
    [
        ({}, 1e6, True, 0.5),
        ({}, 1e6, False, 1),
        ({"gpus": 2}, 1e6, True, 0.5),
        ({"gpus": 16, "gpus_per_node": 2}, 1e6, True, 7),  # ranks share hosts: Gloo's ring
        ({"gpus": 16, "gpus_per_node": 2}, 1e3, True, 0.5),
        ({"gpus": 64}, 1e6, True, 63),  # more ranks than go in pairs
        ({"gpus": 64}, 1e3, True, 1),
        ({"transport": "nccl"}, 1e3, True, 1.5),
        ({"gpus": 4, "gpus_per_node": 4}, 1e6, True, 0),
    ],
)
def test_replies_wait_as_the_transport_sends_them(shape, row, expected, waits):
    assert replace(FAR, **shape).delay.all_gather(row, expected) == pytest.approx(waits * 0.05)


@pytest.mark.parametrize("transport, gpus, waits", [("gloo", 4, 1), ("gloo", 2, 2), ("nccl", 4, 2), ("nccl", 2, 1)])
def test_agreeing_waits(transport, gpus, waits):
    far = replace(FAR, transport=transport, gpus=gpus)
    assert far.agreement() - replace(far, rtt=0).agreement() == pytest.approx(waits * 0.05)


def test_small_models_do_not_agree_and_take_one_chunk():
    """2.5 round trips of a large model, 1.5 of a small one: what was measured, beside bytes and packing."""
    assert rounds(LARGE, FAR) == 2.5 and rounds(SMALL, FAR) == 1.5
    assert stage_2(SMALL, FAR).chunks == 1
    assert stage_2(SMALL, replace(FAR, network=1e6, memory=1e6)).chunks == 1
    assert stage_2(LARGE, replace(FAR, rtt=0, network=1e6, memory=1e6)).chunks > 1
    gain = stage_2(LARGE, FAR, chunks=1).total - stage_2(SMALL, FAR, chunks=1).total
    assert gain == pytest.approx(0.05, rel=0.01)
    gain = compressed_all_reduce(MOST_ELEMENTS + 1, FAR, chunks=1) - compressed_all_reduce(MOST_ELEMENTS, FAR, chunks=1)
    assert gain == pytest.approx(0.05, rel=0.01)
    several = compressed_all_reduce(MOST_ELEMENTS, FAR, chunks=2) - compressed_all_reduce(MOST_ELEMENTS, NEAR, chunks=2)
    assert several >= 2.5 * 0.05 - 1e-3


def test_stage_1_agrees_always():
    assert stage_1(SMALL, FAR).total - uncompressed(SMALL, FAR).total == pytest.approx(FAR.agreement())


def test_a_local_step_does_not_wait():
    model = replace(SMALL, optimizer="zero_one")
    assert local_step(model, FAR) == local_step(model, NEAR)


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


class Clock:
    """A transport whose messages keep the network, and arrive later."""

    rank, size, name = 0, 2, "clock"

    def __init__(self, gather, scatter, gather_delay, scatter_delay):
        self.device = self.network = 0.0
        self.took = SimpleNamespace(gather=(gather, gather_delay), scatter=(scatter, scatter_delay))

    def send(self, seconds, delay):
        self.network = max(self.network, self.device) + seconds
        end = self.network + delay

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


@pytest.mark.parametrize("way", [TwoPhases, Direct])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("times", [(1, 2, 3, 4, 5, 6, 7), (5, 4, 3, 2, 1, 9, 2), (0, 1, 6, 5, 2, 0, 20)])
def test_the_schedule_is_that_of_an_exchange_with_a_delay(way, chunks, times):
    compress, gather, average, scatter, use, gather_delay, scatter_delay = times
    clock = Clock(gather, scatter, gather_delay, scatter_delay)
    exchange = way(Layout([BLOCK_SIZE * 2 * chunks], ranks=way.shards(2), chunks=chunks), clock, CPU)
    for messages in (exchange.sent,) if way is Direct else (exchange.received, exchange.reply):
        messages.header.copy_(torch.tensor(exchange.format.header, dtype=torch.int32))
    exchange.agree = lambda: None
    exchange.backend = SimpleNamespace(average=lambda *_, **__: clock.work(average))
    exchange.run(lambda chunk: clock.work(compress), lambda chunk: clock.work(use))
    if way is Direct:
        seconds = sent_once(chunks, compress, scatter, use, delay=scatter_delay)
    else:
        late = {"gather_delay": gather_delay, "scatter_delay": scatter_delay}
        seconds = pipelined(chunks, compress, gather, average, scatter, use, **late)
    assert seconds == clock.device


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
@pytest.mark.parametrize("gpus, per_node", [(4, 1), (16, 4), (64, 1), (4, 4)])
def test_a_longer_way_is_never_faster(transport, gpus, per_node):
    cluster = Cluster(gpus=gpus, gpus_per_node=per_node, network=1e9, transport=transport)
    grown = [replace(cluster, rtt=rtt) for rtt in (0, 1e-4, 1e-3, 1e-2, 0.1)]
    for step in (uncompressed, stage_1, stage_2):
        totals = [step(replace(LARGE, levels=2), each).total for each in grown]
        assert all(later >= earlier for earlier, later in itertools.pairwise(totals))
        assert (totals[-1] > totals[0]) is (cluster.nodes > 1)


def test_one_node_has_no_delay():
    delay = Delay(0.05, "gloo", gpus=8, nodes=1, shared=True)
    assert delay.message == delay.all_to_all() == delay.segments(1e9, 1.0, 1) == 0


@pytest.mark.parametrize("change, says", [({"rtt": -1}, "0 or more"), ({"transport": "mpi"}, "one of nccl, gloo")])
def test_what_is_no_delay(change, says):
    with pytest.raises(ValueError, match=says):
        replace(FAR, **change)

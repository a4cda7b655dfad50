"""What random numbers do not have: sums that are 0 or -0, whose bit is that of a positive number, and a flag in one
message of many, for which a shard stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from onebit.kernels.data.wire import Messages
from tests.kernels.agreement import assert_same_messages
from tests.kernels.cases import BF16, Case
from tests.kernels.compare import numpy
from tests.kernels.world import World

ZEROS, FLAG = "compress and average of zeros", "adam_update of a flag"
PASSES = (ZEROS, FLAG)
CASES = {
    "zeros and a flag": Case((200, 40), 96, 2, copies=33),
    "zeros and a flag, one scale": Case((300, 40), 256, 2, scale="tensor", copies=2),
    "zeros and a flag, bf16": Case((200, 40), 96, 2, norm="unbiased", param=BF16, grad=BF16),
}
Around = Callable[[World], AbstractContextManager[object]]


def check(each: str, case: Case, around: Around) -> None:
    ours, theirs = World(case, "ptx"), World(case, "cpu")
    (check_zeros if each == ZEROS else check_flag)(ours, theirs, around)


def check_zeros(ours: World, theirs: World, around: Around) -> None:
    for world in (ours, theirs):
        for array in (*world.g, *world.m, *world.e):
            array[::3], array[1::3] = 0.0, -0.0
        world.scales64[:] = 0.0
    places = [divmod(row, ours.case.ranks) for row in range(ours.rows)]
    with around(ours):
        ours.run("compress")
        averaged = [ours.average(*place, opposite(ours, *place))[0] for place in places]
    theirs.run("compress")
    assert_same_messages(ours.sent, theirs.sent, ours.layout.all())
    for place, got in zip(places, averaged, strict=True):
        want, _ = theirs.average(*place, opposite(theirs, *place))
        if place[1] % 2:  # nothing else is read where there is a flag
            assert got.header.tolist() == want.header.tolist()
        else:
            assert_same_messages(got, want, ours.layout.shard(*place))


def opposite(world: World, chunk: int, rank: int) -> Messages:
    """Messages of one scale, some of whose signs cancel; every other shard's last one has a flag."""
    received = world.received(chunk, rank)
    for row in range(received.rows):
        received.scales(row, world.layout.shard(chunk, rank)).fill_(0.5)
    received.header[-1, 1] = rank % 2
    return received


def check_flag(ours: World, theirs: World, around: Around) -> None:
    for world in (ours, theirs):
        world.replies.header[-1, 1] = 1
    with around(ours):
        ours.run("adam_update")
    theirs.run("adam_update")
    for got, want in zip(ours.params.tensors, theirs.params.tensors, strict=True):
        assert np.array_equal(numpy(got), numpy(want))

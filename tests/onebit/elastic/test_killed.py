"""A process is killed within a step; the others make a new group, reform, and go on to the end."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch.distributed as dist

import onebit
from onebit.collectives import CollectiveError
from onebit.collectives.signs_of_life import end_all_waits
from onebit.collectives.transport import transport_for
from tests.faults.striking import AVERAGE, EXCHANGE, GATHER, SCATTER, Point, Striking
from tests.onebit.optim.contract import backward, give
from tests.onebit.runs import Case, bits
from tests.ranks import group, run_ranks, run_ranks_once

SHAPES = ((7, 9), (33,), (130,), (400,))
STEPS, STRUCK = 10, {1: 3, 2: 7}
A, L, Z = "OneBitAdam", "OneBitLamb", "ZeroOneAdam"
# overlap=True: messages are on their way or have arrived
IN_BACKWARD = Point(2, "between backward and step", "", "before", ())
KILLED = [
    (A, 2, Point(1, "in the all-reduce", AVERAGE, "under way", ())),
    (L, 1, Point(2, "before the last chunk is compressed", f"{GATHER} 0", "before", ())),
    (Z, 0, Point(2, "in the all-gather", f"{SCATTER} 1", "under way", ())),
    (A, 0, Point(2, "after the all-gather", f"{SCATTER} 1", "after", ())),
    (L, 2, Point(2, "in the exchange", f"{EXCHANGE} 1", "under way", (), "direct")),
    (A, 2, IN_BACKWARD),
]


@pytest.mark.parametrize(("kind", "victim", "point"), KILLED, ids=lambda value: getattr(value, "name", str(value)))
def test_survivors_go_on_as_after_a_reform_between_two_steps(kind: str, victim: int, point: Point) -> None:
    found = run_ranks_once(3, train, (kind, victim, point), expect_dead=(victim,))
    left = [each for each in found if each is not None]
    assert len(left) == 2 and left[0] == left[1]
    steps, _ = left[0]
    assert steps in (STRUCK[point.stage] - 1, STRUCK[point.stage])
    assert [each for each in run_ranks(3, train, kind, victim, point, steps) if each is not None] == left


def train(rank: int, size: int, kind: str, victim: int, point: Point, leaves: int = 0) -> tuple[int, bytes] | None:
    """What a rank does that is left: steps when ranks changed, and parameters in the end. leaves: after so many steps,
    where nobody is killed."""
    warnings.simplefilter("ignore", UserWarning)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    overlap, strikes = point == IN_BACKWARD, rank == victim and not leaves
    options = {"freeze_step": 4, "chunks": 3, "reply": point.reply, "overlap": overlap, "elastic": not overlap}
    case = Case(kind, SHAPES, options=options, groups=({}, {"lr": 2e-3}))
    at_a_phase = strikes and not overlap
    ranks = Striking(group(), point, STRUCK[point.stage], die) if at_a_phase else Striking(group())
    params = case.parameters()
    optimizer, reformed = case.build(params, ranks), 0
    while (step := optimizer.steps + 1) <= STEPS:
        if leaves and step == leaves + 1 and not reformed:
            others = transport_for(group()).split(rank == victim)
            if rank == victim:
                return None
            onebit.reform(optimizer, others)
            reformed = leaves
        ranks.begin(step)
        try:
            if overlap:
                backward(case, rank, optimizer, params, step)
            else:
                give(case, params, step, rank)
            if overlap and strikes and step == STRUCK[point.stage]:
                die()
            optimizer.step()
        except CollectiveError:
            onebit.reform(optimizer, group_of_survivors(rank, victim))
            reformed = optimizer.steps
    return reformed, bits(params)


def group_of_survivors(rank: int, victim: int) -> Any:
    """A new world under another prefix of the store, which a process has that does not train."""
    store = dist.distributed_c10d._get_default_store()
    end_all_waits()  # of a survivor for this one, too
    dist.destroy_process_group()
    new = sorted({0, 1, 2} - {victim}).index(rank)
    dist.init_process_group("gloo", store=dist.PrefixStore("survivors", store), rank=new, world_size=2)
    return dist.group.WORLD

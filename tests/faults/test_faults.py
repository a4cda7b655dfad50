"""Ranks that die or stop: the others raise, and the run goes on from its last checkpoint bit for bit. Poisoned runs.

Short: `python -m tests.faults` strikes at all points; `python -m tests.faults.poisoned` and `.soak` are the long runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.faults import poisoned, soak
from tests.faults.__main__ import Combination, strike
from tests.faults.poisoned import Plan
from tests.faults.striking import Fault
from tests.onebit.runs import kinds

SOME = [
    Combination("ranks", "OneBitAdam", Fault("kill", 1, 0)),
    Combination("ranks", "OneBitLamb", Fault("kill", 3, 1)),
    Combination("ranks", "OneBitAdam", Fault("stop", 5, 1)),
    Combination("ranks", "ZeroOneAdam", Fault("kill", 7, 2)),
    Combination("ranks", "OneBitLamb", Fault("kill", 10, 1)),
    Combination("ranks", "OneBitAdam", Fault("kill", 11, 3)),
    Combination("ranks", "ZeroOneAdam", Fault("kill", 13, 0)),
    Combination("torchrun", "OneBitAdam", Fault("kill", 5, 1)),
]


@pytest.mark.parametrize("combination", SOME, ids=str)
def test_survivors_are_told_and_the_restart_is_bit_exact(combination: Combination) -> None:
    with forked.python() as python:
        assert not strike(combination, python=python).problems(combination.fault)


@kinds
def test_a_poisoned_run_ends_as_if_it_had_not_been_poisoned(kind: str) -> None:
    """Poison comes in both stages, and on one rank to all of them at once."""
    plan = Plan(kind, steps=160, freeze=30, resume_every=40, share=0.1)
    poison = {step: found for step in range(1, plan.steps + 1) if (found := plan.poison(step))}
    assert min(poison) < plan.freeze < max(poison) and {len(ranks) for ranks in poison.values()} == {1, 2, 3, 4}
    ranks, problems = poisoned.run(plan)
    assert not problems
    assert ranks[0].resumed == 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: what grows is read in /proc")
@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
def test_nothing_grows(kind: str) -> None:
    for marks in soak.run(kind, 200):
        assert not soak.problems(marks)

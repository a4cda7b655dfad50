"""The poisoned run and the soak, short: `python -m tests.faults.poisoned` and `.soak` are the long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import poisoned, soak
from tests.faults.poisoned import Plan
from tests.onebit.runs import kinds


@kinds
def test_a_poisoned_run_ends_as_if_it_had_not_been_poisoned(kind: str) -> None:
    """In both stages, and on one rank to all of them at once."""
    plan = Plan(kind, steps=160, freeze=30, resume_every=40, share=0.1)
    poison = {step: found for step in range(1, plan.steps + 1) if (found := plan.poison(step))}
    assert min(poison) < plan.freeze < max(poison) and {len(ranks) for ranks in poison.values()} == {1, 2, 3, 4}
    ranks, problems = poisoned.run(plan)
    assert not problems
    assert ranks[0].resumed == 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: what grows is read in /proc")
@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
def test_nothing_grows(kind: str) -> None:
    """With DDP and without."""
    for marks in soak.run(kind, 200):
        assert not soak.problems(marks)

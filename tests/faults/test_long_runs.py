"""The poisoned run and the soak, short: `python -m tests.faults.poisoned` and `.soak` are the long ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import poisoned, soak
from tests.faults.poisoned import Plan
from tests.faults.soak import Mark
from tests.onebit.runs import kinds


@pytest.mark.slow
@kinds
def test_a_poisoned_run_ends_as_if_it_had_not_been_poisoned(kind: str) -> None:
    plan = Plan(kind, steps=160, freeze=30, resume_every=40, share=0.1, record_every=2)
    ranks, problems = poisoned.run(plan)
    assert not problems
    assert ranks[0].resumed == 4
    assert ranks[0].skipped >= 8


def test_poison_comes_in_both_stages_and_on_every_rank() -> None:
    plan = Plan("OneBitAdam")
    bad = {step: poison for step in range(1, plan.steps + 1) if (poison := plan.poison(step))}
    assert len(bad) == pytest.approx(plan.share * plan.steps, rel=0.2)
    assert min(bad) < plan.freeze < max(bad)
    assert {rank for poison in bad.values() for rank in poison} == {0, 1, 2, 3}
    assert {len(poison) for poison in bad.values()} == {1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: what grows is read in /proc")
@kinds
def test_nothing_grows(kind: str) -> None:
    for marks in soak.run(kind, 300):
        assert not soak.problems(marks)


FLAT = [
    Mark(step, memory=50_000, blocks=10_000, objects=200, handles=16, threads=5, residual=1.0)
    for step in range(100, 2100, 100)
]


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("memory", 50_600, "memory goes on growing: 50000 kB at step 1100, now 50600"),
        ("blocks", 30_000, "blocks grew"),
        ("objects", 400, "objects grew"),
        ("handles", 17, "handles grew from 16 to 17"),
        ("threads", 6, "threads grew from 5 to 6"),
        ("residual", 2.0, "residuals grew"),
        ("residual", float("nan"), "residuals grew"),
    ],
)
def test_what_grew_is_named(name: str, value: Any, part: str) -> None:
    assert not soak.problems(FLAT)
    (problem,) = soak.problems([*FLAT[:-1], replace(FLAT[-1], **{name: value})])
    assert part in problem

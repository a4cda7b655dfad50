"""Ranks that die or stop: the others raise, and the run goes on from its last checkpoint bit for bit.

Some of the points; `python -m tests.faults` strikes at all of them, under torchrun and in the network lab too.
"""

from __future__ import annotations

import pytest

from tests.faults.matrix import Combination, Outcome, combinations, strike
from tests.faults.striking import POINTS, SCATTER, Fault
from tests.faults.training import TIMEOUT, Raised
from tests.onebit.runs import OPTIMIZERS

SOME = [
    Combination("ranks", "OneBitAdam", Fault("kill", 1, 0)),
    Combination("ranks", "OneBitLamb", Fault("stop", 0, 2)),
    Combination("ranks", "OneBitLamb", Fault("kill", 3, 1)),
    Combination("ranks", "OneBitAdam", Fault("stop", 5, 1)),
    Combination("ranks", "OneBitAdam", Fault("kill", 7, 2)),
    Combination("ranks", "OneBitAdam", Fault("stop", 9, 0)),
    Combination("ranks", "OneBitLamb", Fault("kill", 10, 1)),
    Combination("ranks", "OneBitAdam", Fault("kill", 11, 3)),
    Combination("ranks", "OneBitLamb", Fault("stop", 13, 0)),
]


@pytest.mark.parametrize(
    "combination", [SOME[0], *(pytest.param(c, marks=pytest.mark.slow) for c in SOME[1:])], ids=str
)
def test_survivors_are_told_and_the_restart_is_bit_exact(combination: Combination) -> None:
    assert not strike(combination).problems(combination.fault)


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint() -> None:
    fault = Fault("kill", 5, 1)
    assert not strike(Combination("torchrun", "OneBitAdam", fault)).problems(fault)


def test_all_points_of_both_stages_are_in_the_matrix() -> None:
    everything = list(combinations())
    light = {(c.kind, c.fault.how, c.fault.at.stage, c.fault.at.name) for c in everything if c.launcher == "ranks"}
    assert len(light) == len(OPTIMIZERS) * 2 * len(POINTS) >= 36
    assert {c.fault.victim for c in everything} == {0, 1, 2}
    assert {c.fault.at.stage for c in everything if c.launcher == "torchrun"} == {1, 2}
    assert [c.fault.at for c in everything if c.launcher == "lab"] == [at for at in POINTS if at.each == 1]


@pytest.mark.parametrize(
    ("outcome", "part"),
    [
        (Outcome({0: Raised(f"{SCATTER} 1) did not end", 0.1)}, False), "does not end as an undisturbed one"),
        (Outcome({0: Raised("", 0.0)}, True), "rank 0 raised nothing"),
        (Outcome({0: None}, True), "rank 0 raised nothing"),
        (Outcome({0: Raised("the first chunk did not end", 0.1)}, True), "rank 0 names another phase"),
        (Outcome({0: Raised(f"{SCATTER} 1) did not end", 2 * TIMEOUT + 1)}, True), "rank 0 waited 9.0 s"),
    ],
)
def test_what_went_wrong_is_named(outcome: Outcome, part: str) -> None:
    (problem,) = outcome.problems(Fault("kill", 6, 1))
    assert part in problem

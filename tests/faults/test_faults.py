"""Ranks that die or stop: the others raise, and the run goes on from its last checkpoint bit for bit.

Short: `python -m tests.faults` strikes at all points; `python -m tests.faults.soak` is the long run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.faults import soak
from tests.faults.__main__ import Combination, strike
from tests.faults.striking import Fault

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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: what grows is read in /proc")
@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
def test_nothing_grows(kind: str) -> None:
    for marks in soak.run(kind, 200):
        assert not soak.problems(marks)

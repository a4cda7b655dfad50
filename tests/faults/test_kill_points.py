"""Ranks that die or stop: the others raise, and the run goes on from its last checkpoint bit for bit.

A point of each phase; `python -m tests.faults` strikes at all of them, under torchrun and in the network lab too.
"""

from __future__ import annotations

import pytest

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
    assert not strike(combination).problems(combination.fault)

"""Profiles show what the passes and the network are doing, by name."""

import pytest
import torch
from torch.profiler import profile

from tests.onebit.optim.contract import started
from tests.onebit.runs import Case, run
from tests.ranks import run_ranks

TWICE = ("compress", "average", "wait for the gather phase", "wait for the scatter phase")  # of two chunks


def ranges(rank: int, size: int, kind: str) -> dict[str, int]:
    """How often each was entered in two steps of stage 2."""
    case = Case(kind, options={"freeze_step": 2, "chunks": 2})
    params, optimizer = started(case, 4, rank, size)
    with profile() as recorded:
        run(case, rank, optimizer, params, 5, 6)
    return {e.key: e.count for e in recorded.key_averages() if e.key.startswith("onebit.")}


@pytest.mark.parametrize(
    ("kind", "updates"),
    [("OneBitAdam", {"onebit.adam_update": 4}), ("OneBitLamb", {"onebit.lamb_statistics": 2, "onebit.adam_update": 2})],
)
def test_a_profile_names_every_pass_and_wait(kind: str, updates: dict[str, int]) -> None:
    for found in run_ranks(2, ranges, kind):
        assert found == {"onebit.scan": 2} | {f"onebit.{name}": 4 for name in TWICE} | updates


def test_a_pass_that_is_not_there_is_an_attribute_error() -> None:
    from onebit import kernels

    with pytest.raises(AttributeError, match="no_such_pass"):
        kernels.backend(torch.device("cpu")).no_such_pass()

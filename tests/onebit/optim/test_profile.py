"""Profiles show what the passes and the network are doing, by name."""

import pytest
import torch
from torch.profiler import profile

from tests.onebit.runs import Case, run
from tests.ranks import group, run_ranks

PASSES = {"onebit.scan", "onebit.compress", "onebit.average"}
WAITS = {"onebit.wait for the gather phase", "onebit.wait for the scatter phase"}


def ranges(rank: int, size: int, kind: str) -> dict[str, int]:
    """How often each was entered in two steps of stage 2."""
    case = Case(kind, options={"freeze_step": 2, "chunks": 2})
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, 4)
    with profile() as recorded:
        run(case, rank, optimizer, params, 5, 6)
    return {e.key: e.count for e in recorded.key_averages() if e.key.startswith("onebit.")}


@pytest.mark.parametrize(
    ("kind", "updates"),
    [("OneBitAdam", {"onebit.adam_update": 4}), ("OneBitLamb", {"onebit.lamb_statistics": 2, "onebit.adam_update": 2})],
)
def test_a_profile_names_every_pass_and_wait(kind: str, updates: dict[str, int]) -> None:
    for found in run_ranks(2, ranges, kind):
        assert found == {"onebit.scan": 2} | dict.fromkeys((PASSES | WAITS) - {"onebit.scan"}, 4) | updates


def test_a_pass_that_is_not_there_is_an_attribute_error() -> None:
    from onebit import kernels

    with pytest.raises(AttributeError, match="no_such_pass"):
        kernels.backend(torch.device("cpu")).no_such_pass()

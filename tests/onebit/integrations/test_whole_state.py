"""What is loaded in the place of one rank's state."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onebit.integrations.whole_state import WholeState, warn_of_total
from tests.checkpoints import Run
from tests.onebit.runs import Case, build, same
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 3})


def whole(run: Run) -> WholeState:
    return WholeState(run.model, run.optimizer)


def put(run: Run, values: list[Tensor]) -> None:
    """A loop loads its model itself."""
    with torch.no_grad():
        for p, value in zip(run.params, values, strict=True):
            p.copy_(value)


def loaded_once(rank: int, size: int, folder: Path, freeze_step: int) -> None:
    case = CASE.but(options={"freeze_step": freeze_step})
    run = Run(case, 6, rank, group())
    whole(run).save(folder / "onebit")
    at_6, values = run.all()[1], [p.detach().clone() for p in run.params]
    of_rank_0 = run.optimizer.state_dict()
    for of_parameter in of_rank_0["state"].values():
        for name in [name for name in of_parameter if name.endswith(f"residual_of_rank_{rank}") and rank > 0]:
            del of_parameter[name]  # what this rank finds in a file that rank 0 alone has written
    run.on(7, 8)
    at_8 = run.all()

    again = Run(case, 2, rank, group())
    state = whole(again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.expect(folder / "onebit")
        again.optimizer.load_state_dict(of_rank_0)
    assert same(again.all()[1], at_6)
    put(again, values)
    again.on(7, 8)
    assert same(again.all(), at_8)

    for how in ("once", "cancelled", "nothing there"):  # then what is given is loaded as it is
        again.on(9, 9)
        if how != "once":
            state.expect(folder / ("onebit" if how == "cancelled" else how))
        if how == "cancelled":
            state.cancel()
        again.optimizer.load_state_dict(run.optimizer.state_dict())
        assert same(again.all()[1], at_8[1]), how


@pytest.mark.parametrize("freeze_step", [50, 3])
def test_the_next_state_is_that_of_the_folder_and_no_other(freeze_step: int, tmp_path: Path) -> None:
    run_ranks(2, loaded_once, tmp_path, freeze_step)


def saved(rank: int, size: int, folder: Path) -> None:
    whole(Run(CASE, 6, rank, group())).save(folder / "onebit")


def on_others(rank: int, size: int, folder: Path) -> None:
    run, direct = Run(CASE, 2, rank, group()), Run(CASE, 2, rank, group())
    direct.load(folder / "onebit")
    state = whole(run)
    state.expect(folder / "onebit")
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert same(run.all()[1], direct.all()[1])
    put(run, direct.params)
    run.on(7, 8)
    direct.on(7, 8)
    assert same(run.all()[1], direct.all()[1])


def test_another_number_of_ranks_has_the_mean_of_the_residuals(tmp_path: Path) -> None:
    run_ranks(2, saved, tmp_path)
    run_ranks(3, on_others, tmp_path)


def seen_by_one(rank: int, size: int, folder: Path) -> None:
    run = Run(CASE, 6, rank, group())
    state = whole(run)
    state.save(folder / "0" / "onebit")
    before = run.all()
    state.expect(folder / str(rank) / "onebit")
    with pytest.raises(ValueError, match=r"rank.* 1 of 2"):
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert same(run.all()[1], before[1])


def test_a_folder_that_one_rank_does_not_see_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(2, seen_by_one, tmp_path)


@pytest.mark.parametrize(
    ("kind", "freeze_step", "warns"),
    [("OneBitAdam", 50, True), ("OneBitAdam", "auto", True), ("OneBitLamb", 49, False), ("ZeroOneAdam", None, False)],
)
def test_a_run_that_ends_before_stage_2_is_warned_of(kind, freeze_step, warns):
    optimizer = build(kind, freeze_step=freeze_step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_total(optimizer, 50)
    assert ["this run has 50 steps" in str(each.message) for each in caught] == [True] * warns

"""What is loaded in the place of one rank's state."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onebit.integrations.whole_state import WholeState
from tests.checkpoints import Run
from tests.onebit.runs import Case, same
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 3})


def put(run: Run, values: list[Tensor]) -> None:
    """A loop loads its model itself."""
    with torch.no_grad():
        for p, value in zip(run.params, values, strict=True):
            p.copy_(value)


def loaded_once(rank: int, size: int, folder: Path, freeze_step: int) -> None:
    case = CASE.but(options={"freeze_step": freeze_step})
    run = Run(case, 6, rank, group())
    WholeState(run.model, run.optimizer).save(folder / "onebit")
    at_6, values = run.all()[1], [p.detach().clone() for p in run.params]
    of_rank_0 = run.optimizer.state_dict()
    for of_parameter in of_rank_0["state"].values():
        for name in [name for name in of_parameter if name.endswith(f"residual_of_rank_{rank}") and rank > 0]:
            del of_parameter[name]  # what this rank finds in a file that rank 0 alone has written
    run.on(7, 8)
    at_8 = run.all()

    again = Run(case, 2, rank, group())
    state = WholeState(again.model, again.optimizer)
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

    again.on(9, 9)
    before = again.all()
    state.expect(folder / ("onebit" if rank == 0 else "nowhere"))
    with pytest.raises(ValueError, match=r"rank.* 1 of 2"):
        again.optimizer.load_state_dict(again.optimizer.state_dict())
    assert same(again.all(), before)


def on_others(rank: int, size: int, folder: Path) -> None:
    run, direct = Run(CASE, 2, rank, group()), Run(CASE, 2, rank, group())
    direct.load(folder / "onebit")
    WholeState(run.model, run.optimizer).expect(folder / "onebit")
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    put(run, direct.params)
    assert same(run.all(), direct.all())


@pytest.mark.parametrize("freeze_step", [50, 3])
def test_the_next_state_is_that_of_the_folder_and_no_other(freeze_step: int, tmp_path: Path) -> None:
    """On as many ranks; on others it is what `onebit.load` gives. A folder that one rank lacks is an error on both."""
    run_ranks(2, loaded_once, tmp_path, freeze_step)
    run_ranks(3, on_others, tmp_path)

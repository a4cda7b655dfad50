"""One checkpoint of all ranks, in a folder: loaded by as many, and by another number."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from tests.checkpoints import Run
from tests.onebit.runs import Case, arrays, bits, kinds, run, same, snapshot
from tests.ranks import group, run_ranks


class Holder(nn.Module):
    """A module around a case's parameters."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(params)


def saving(rank: int, size: int, case: Case, folder: str, more: int) -> dict[str, Any]:
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, case.steps)
    onebit.save(folder, Holder(params), optimizer)
    state = snapshot(optimizer.state_dict())
    residual = mean_residual(optimizer)
    run(case, rank, optimizer, params, case.steps + 1, case.steps + more)
    return {"state": state, "residual": residual, "params": bits(params)}


def loading(rank: int, size: int, case: Case, folder: str, more: int) -> dict[str, Any]:
    params = [nn.Parameter(torch.randn_like(p)) for p in case.parameters()]
    optimizer = case.build(params, group())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the state does not hold the residuals")
        onebit.load(folder, Holder(params), optimizer)
    state = snapshot(optimizer.state_dict())
    residual = mean_residual(optimizer)
    run(case, rank, optimizer, params, case.steps + 1, case.steps + more)
    return {"state": state, "residual": residual, "params": bits(params), "end": arrays(params)}


def mean_residual(optimizer: Any) -> list[np.ndarray]:
    """mean_i e_i + E of each parameter: what the next messages have to make up for."""
    found = []
    transport = optimizer.setup.topology.replicas
    for reducer in optimizer.current.reducers:
        mean, state = reducer.exchange.residual.left_out().clone(), reducer.state
        transport.all_sum(mean, "adding up residuals in a test").wait()
        mean.div_(transport.size).add_(reducer.exchange.gathered_server_residual())
        found += [state.cut(mean, i).double().numpy().copy() for i in range(len(state.params))]
    return found


@kinds
@pytest.mark.parametrize("freeze_step", [50, 4], ids=["stage 1", "stage 2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_ranks_go_on_bit_for_bit(kind: str, freeze_step: int, dtype: str, tmp_path: Path) -> None:
    case = Case(
        kind, dtype=dtype, steps=7, options={"freeze_step": freeze_step, "chunks": 2}, groups=({}, {"lr": 2e-3})
    )
    before = run_ranks(2, saving, case, str(tmp_path / "point"), 4)
    after = run_ranks(2, loading, case, str(tmp_path / "point"), 4)
    for one, other in zip(before, after, strict=True):
        assert same(one["state"], other["state"])
        assert one["params"] == other["params"]


@kinds
@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize(("saved", "loaded"), [(4, 2), (2, 3), (1, 2), (3, 1)])
def test_another_number_of_ranks_keeps_the_mean_residual(
    kind: str, scale: str, saved: int, loaded: int, tmp_path: Path
) -> None:
    case = Case(kind, steps=9, options={"freeze_step": 3, "scale": scale})
    before = run_ranks(saved, saving, case, str(tmp_path), 0)[0]
    after = run_ranks(loaded, loading, case, str(tmp_path), 3)
    for here, there in zip(after[0]["residual"], before["residual"], strict=True):
        if scale == "block":
            np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)
        else:  # with the momentum, which no message of this number of ranks can hold
            assert not np.allclose(here, there, rtol=1e-5, atol=1e-6)
    for one in after:
        assert one["params"] == after[0]["params"]
        assert all(np.isfinite(x).all() for x in one["end"])


@kinds
def test_a_folder_without_a_checkpoint_is_an_error(kind: str, tmp_path: Path) -> None:
    case = Case(kind)
    params = case.parameters()
    with pytest.raises(ValueError, match="holds no checkpoint"):
        onebit.load(tmp_path, Holder(params), case.build(params))
    os.makedirs(tmp_path / "other", exist_ok=True)
    torch.distributed.checkpoint.save({"model": {"x": torch.zeros(2)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(ValueError, match="holds no optimizer"):
        onebit.load(tmp_path / "other", Holder(params), case.build(params))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_run_with_narrower_gradients_is_saved_and_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    case = Case(steps=5, options={"freeze_step": 3, "gradient_dtype": dtype})
    saved, loaded = Run(case, 5), Run(case.but(seed=1), 0)
    saved.save(tmp_path)
    loaded.load(tmp_path)
    assert loaded.all()[0] == saved.all()[0]

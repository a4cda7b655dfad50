"""PyTorch's own recipe: a Stateful with get_state_dict and set_state_dict, dcp.save, dcp.load into a new optimizer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import onebit
from tests.onebit.checkpoint.states import TWO_GROUPS, as_model, other_parameters, set_parameters, trained
from tests.onebit.checkpoint.test_checkpoint import mean_residual
from tests.onebit.checkpoint.test_torch_state_dict import OPTIONS, every_option
from tests.onebit.runs import Case, adam_first, bits, kinds, run, same, snapshot
from tests.ranks import group, run_ranks


class App(Stateful):
    """As PyTorch's tutorial has it."""

    def __init__(self, model: nn.Module, optimizer: Any, options: dict[str, bool]) -> None:
        self.model, self.optimizer, self.options = model, optimizer, StateDictOptions(**options)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=self.options,
        )


def residual_of(case: Case, optimizer: Any) -> Any:
    return mean_residual(optimizer) if case.each == 1 and "reply" not in case.options else None


def saving(rank: int, size: int, case: Case, folder: str, name: str, steps: int) -> Any:
    params, optimizer = trained(case, rank, steps, group())
    app = App(as_model(params), optimizer, OPTIONS[name])
    dcp.save({"app": app}, checkpoint_id=folder, process_group=group())
    state, residual = snapshot(optimizer.state_dict()), residual_of(case, optimizer)
    run(case, rank, optimizer, params, steps + 1, steps + 3)
    return state, residual, bits(params)


def loading(rank: int, size: int, case: Case, folder: str, name: str, steps: int) -> Any:
    params = other_parameters(case)
    optimizer = case.build(params, group())
    model = as_model(params)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the state does not hold the residuals")
        onebit.make_room(folder, model, optimizer)
        dcp.load({"app": App(model, optimizer, OPTIONS[name])}, checkpoint_id=folder, process_group=group())
    state, residual = snapshot(optimizer.state_dict()), residual_of(case, optimizer)
    run(case, rank, optimizer, params, steps + 1, steps + 3)
    assert all(torch.isfinite(p).all() for p in params)
    return state, residual, bits(params)


@adam_first
@every_option
@pytest.mark.parametrize("steps", [2, 6])
def test_a_new_optimizer_goes_on_bit_for_bit(kind: str, name: str, steps: int, tmp_path: Path) -> None:
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    before = run_ranks(2, saving, case, str(tmp_path), name, steps)
    after = run_ranks(2, loading, case, str(tmp_path), name, steps)
    for (state, _, end), (again, _, its_end) in zip(before, after, strict=True):
        assert same(state, again)
        assert end == its_end


@pytest.mark.parametrize("options", [{"reply": "direct"}, {"reply": 2, "chunks": 2}, {"scale": "tensor"}], ids=str)
@pytest.mark.parametrize("each", [1, 2])
def test_so_it_does_with_other_options(options: dict[str, Any], each: int, tmp_path: Path) -> None:
    case = Case(dtype="bfloat16", options={"freeze_step": 3, **options}, groups=TWO_GROUPS, each=each)
    before = run_ranks(4, saving, case, str(tmp_path), "default", 6)
    after = run_ranks(4, loading, case, str(tmp_path), "default", 6)
    assert all(same(one[0], other[0]) and one[2] == other[2] for one, other in zip(before, after, strict=True))


@adam_first
@pytest.mark.parametrize("name", ["default", "flattened", "full"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_keeps_the_mean_residual(kind: str, name: str, ranks: int, tmp_path: Path) -> None:
    case = Case(kind, options={"freeze_step": 3})
    before = run_ranks(2, saving, case, str(tmp_path), name, 6)
    after = run_ranks(ranks, loading, case, str(tmp_path), name, 6)
    for here, there in zip(after[0][1], before[0][1], strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)
    assert len({end for _, _, end in after}) == 1


def test_a_state_of_stage_1_loads_on_another_number_of_ranks_as_it_is(tmp_path: Path) -> None:
    case = Case(options={"freeze_step": 50})
    before = run_ranks(2, saving, case, str(tmp_path), "default", 4)
    after = run_ranks(3, loading, case, str(tmp_path), "default", 4)
    assert same(after[0][0]["state"], before[0][0]["state"])


@kinds
def test_a_flattened_state_goes_on_in_a_new_optimizer_of_the_same_process(kind: str) -> None:
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 6)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = snapshot(get_optimizer_state_dict(as_model(params), optimizer, options=options))
    again = other_parameters(case)
    set_parameters(again, params)
    resumed = case.build(again)
    onebit.make_room(flat, as_model(again), resumed)
    set_optimizer_state_dict(as_model(again), resumed, flat, options=options)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))


def test_an_optimizer_alone_is_found_by_numbers(tmp_path: Path) -> None:
    """dcp.save({"optimizer": optimizer}): its parameters have no names."""
    case = Case(options={"freeze_step": 3}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 6)
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    resumed = case.build(params)
    onebit.make_room(tmp_path, as_model(params), resumed)
    dcp.load({"optimizer": resumed}, checkpoint_id=tmp_path, no_dist=True)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))


class Wrapper(nn.Module):
    """As DDP is, to names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


def test_wrappers_are_no_part_of_names() -> None:
    case = Case(options={"freeze_step": 3})
    params, optimizer = trained(case, 0, 6)
    flat = get_optimizer_state_dict(as_model(params), optimizer)
    for model in (Wrapper(as_model(params)), torch.compile(Wrapper(as_model(params)))):
        resumed = case.build(params)
        onebit.make_room(flat, model, resumed)
        assert set(resumed.state[params[0]]) == set(optimizer.state[params[0]])


def new() -> tuple[Any, Any, Any]:
    case = Case(options={"freeze_step": 3})
    params = case.parameters()
    return case, params, case.build(params)


def test_a_step_before_the_load_is_an_error(tmp_path: Path) -> None:
    case, params, optimizer = new()
    _, saved = trained(case, 0, 6)
    onebit.make_room({"optimizer": saved.state_dict()}, as_model(params), optimizer)
    with pytest.raises(ValueError, match="a step after make_room"):
        run(case, 0, optimizer, params, 1, 1)
    with pytest.raises(ValueError, match="nothing was loaded into what make_room has made"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved.state_dict())
    assert same(snapshot(optimizer.state_dict()), snapshot(saved.state_dict()))


def test_sources_that_hold_nothing_are_errors(tmp_path: Path) -> None:
    case, params, optimizer = new()
    model, before = as_model(params), snapshot(optimizer.state_dict())
    with pytest.raises(ValueError, match="holds no checkpoint"):
        onebit.make_room(tmp_path / "nowhere", model, optimizer)
    with pytest.raises(TypeError, match="not a int"):
        onebit.make_room(3, model, optimizer)
    adamw = torch.optim.AdamW(params)
    run(case, 0, adamw, params, 1, 1)
    with pytest.raises(ValueError, match="no onebit optimizer's"):
        onebit.make_room({"optimizer": adamw.state_dict()}, model, optimizer)
    others: Any = get_optimizer_state_dict(as_model(params), trained(case, 0, 6)[1].__class__(params))
    with pytest.raises(ValueError, match="called by other names"):
        onebit.make_room({k: rename(v) for k, v in others.items()}, model, optimizer)
    assert same(snapshot(optimizer.state_dict()), before)


def rename(value: Any) -> Any:
    return {f"other.{k}": v for k, v in value.items()} if isinstance(value, dict) else value

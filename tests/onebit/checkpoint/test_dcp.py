"""torch.distributed.checkpoint saves optimizers and loads them: PyTorch's own recipe (a Stateful with get_state_dict
and set_state_dict), into an optimizer that has the same state by now, or by way of make_room into a new one."""

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
from tests.onebit.checkpoint.test_checkpoint import residual_of
from tests.onebit.checkpoint.test_torch_state_dict import OPTIONS
from tests.onebit.runs import Case, bits, run, same, snapshot
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


def entries(how: str, params: Any, optimizer: Any) -> dict[str, Any]:
    """By names, as the option `how` has it, or the optimizer alone, whose parameters have numbers."""
    if how == "alone":
        return {"optimizer": optimizer}
    return {"app": App(as_model(params), optimizer, OPTIONS[how])}


def saving(rank: int, size: int, case: Case, folder: str, how: str, steps: int) -> Any:
    params, optimizer = trained(case, rank, steps, group())
    dcp.save(entries(how, params, optimizer), checkpoint_id=folder, process_group=group())
    state, residual, values = snapshot(optimizer.state_dict()), residual_of(case, optimizer), snapshot(list(params))
    run(case, rank, optimizer, params, steps + 1, steps + 3)
    return state, residual, bits(params), values


def loading(rank: int, size: int, case: Case, folder: str, how: str, steps: int, new: bool, values: Any) -> Any:
    """new: the optimizer is, else it has taken as many steps of another run."""
    if new:
        params = other_parameters(case)
        optimizer = case.build(params, group())
        onebit.make_room(folder, as_model(params), optimizer)
    else:
        params, optimizer = trained(case.but(seed=1), rank, steps, group())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the state does not hold the residuals")
        dcp.load(entries(how, params, optimizer), checkpoint_id=folder, process_group=group())
    if how == "alone":
        set_parameters(params, values)
    state, residual = snapshot(optimizer.state_dict()), residual_of(case, optimizer)
    run(case, rank, optimizer, params, steps + 1, steps + 3)
    assert all(torch.isfinite(p).all() for p in params)
    return state, residual, bits(params)


TENSOR = {"scale": "tensor", "chunks": 2}
ROWS: list[tuple[str, str, int, bool, int, dict[str, Any], int, int]] = [
    # optimizer, how, steps, new, ranks there, options, ranks here, ranks a node
    ("OneBitAdam", "default", 2, True, 2, {}, 3, 1),
    ("OneBitLamb", "default", 6, False, 2, TENSOR, 2, 1),
    ("ZeroOneAdam", "default", 6, True, 2, {}, 3, 1),
    ("OneBitAdam", "flattened", 6, True, 2, {}, 1, 1),
    ("OneBitLamb", "flattened", 2, True, 2, {}, 2, 1),
    ("OneBitAdam", "full", 6, True, 2, {}, 3, 1),
    ("OneBitLamb", "offloaded", 6, True, 2, {}, 2, 1),
    ("ZeroOneAdam", "flattened and offloaded", 6, True, 2, {}, 2, 1),
    ("OneBitLamb", "alone", 2, False, 2, TENSOR, 2, 1),
    ("ZeroOneAdam", "alone", 6, False, 2, {}, 2, 1),
    ("OneBitAdam", "alone", 6, True, 1, {}, 1, 1),
    ("OneBitAdam", "default", 6, True, 4, {"reply": "direct", "dtype": "bfloat16"}, 4, 2),
    ("OneBitLamb", "default", 6, True, 4, {"reply": 2, "chunks": 2}, 4, 2),
    ("OneBitAdam", "default", 6, True, 4, {"scale": "tensor", "dtype": "bfloat16"}, 4, 1),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(map(str, row)))
def test_dcp_carries_a_run(row: Any, tmp_path: Path) -> None:
    """Bit for bit on as many ranks; on others stage 1 as it is, stage 2 with the mean residual."""
    kind, how, steps, new, there, options, size, each = row
    options = {"freeze_step": 3, **options}
    case = Case(kind, dtype=options.pop("dtype", "float32"), options=options, groups=TWO_GROUPS, each=each)
    before = run_ranks(there, saving, case, str(tmp_path), how, steps)
    values = before[0][3]
    if steps == 6 and there == 2:
        assert not torch.equal(*(own[0]["state"][3][f"residual_of_rank_{r}"] for r, own in enumerate(before)))
    after = run_ranks(there, loading, case, str(tmp_path), how, steps, new, values)
    for (state, _, end, _), (again, _, its_end) in zip(before, after, strict=True):
        assert same(state, again)
        assert end == its_end
    if size != there:
        after = run_ranks(size, loading, case, str(tmp_path), how, steps, new, values)
        assert len({end for _, _, end in after}) == 1
        if steps == 2:
            assert same(after[0][0]["state"], before[0][0]["state"])
        else:
            for here, was in zip(after[0][1], before[0][1], strict=True):
                np.testing.assert_allclose(here, was, rtol=1e-5, atol=1e-6)


def test_a_flattened_state_goes_on_in_a_new_optimizer_of_the_same_process() -> None:
    case = Case("OneBitLamb", options={"freeze_step": 3}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 6)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = snapshot(get_optimizer_state_dict(as_model(params), optimizer, options=options))
    again = other_parameters(case)
    set_parameters(again, params)
    resumed = case.build(again)
    onebit.make_room(flat, as_model(again), resumed)
    set_optimizer_state_dict(as_model(again), resumed, flat, options=options)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))


# make_room


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


def test_a_step_before_the_load_is_an_error() -> None:
    case = Case(options={"freeze_step": 3})
    params = case.parameters()
    optimizer, (_, saved) = case.build(params), trained(case, 0, 6)
    onebit.make_room({"optimizer": saved.state_dict()}, as_model(params), optimizer)
    with pytest.raises(ValueError, match="a step after make_room"):
        run(case, 0, optimizer, params, 1, 1)
    with pytest.raises(ValueError, match="nothing was loaded into what make_room has made"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved.state_dict())
    assert same(snapshot(optimizer.state_dict()), snapshot(saved.state_dict()))


def rename(value: Any) -> Any:
    return {f"other.{k}": v for k, v in value.items()} if isinstance(value, dict) else value


def test_sources_that_hold_nothing_are_errors(tmp_path: Path) -> None:
    case = Case(options={"freeze_step": 3})
    params, (_, saved) = case.parameters(), trained(case, 0, 6)
    optimizer, model, adamw = case.build(params), as_model(params), torch.optim.AdamW(params)
    run(case, 0, adamw, params, 1, 1)
    before = snapshot(optimizer.state_dict())
    others: Any = get_optimizer_state_dict(model, saved.__class__(params))
    another: Any = snapshot(saved.state_dict())
    another["param_groups"][0]["onebit"]["version"] = 2
    for source, error, match in (
        (tmp_path / "nowhere", ValueError, "holds no checkpoint"),
        (3, TypeError, "not a int"),
        ({"optimizer": adamw.state_dict()}, ValueError, "no onebit optimizer's"),
        ({k: rename(v) for k, v in others.items()}, ValueError, "called by other names"),
        ({"optimizer": another}, ValueError, "version 2"),
    ):
        with pytest.raises(error, match=match):
            onebit.make_room(source, model, optimizer)
    assert same(snapshot(optimizer.state_dict()), before)

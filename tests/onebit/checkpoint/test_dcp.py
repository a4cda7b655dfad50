"""torch.distributed.checkpoint saves optimizers and loads them: PyTorch's own recipe (a Stateful with get_state_dict
and set_state_dict), into an optimizer that has the same state by now, or by way of make_room into a new one."""

import warnings

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
from tests.onebit.checkpoint.states import TWO_GROUPS, as_model, checkpoint, set_parameters, trained
from tests.onebit.checkpoint.test_checkpoint import residual_of
from tests.onebit.checkpoint.test_torch_state_dict import FLATTENED, OPTIONS
from tests.onebit.runs import Case, bits, run, same, snapshot
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 3})


class App(Stateful):
    """As PyTorch's tutorial has it."""

    def __init__(self, model, optimizer, options):
        self.both, self.options = (model, optimizer), StateDictOptions(**options)

    def state_dict(self):
        model, optimizer = get_state_dict(*self.both, options=self.options)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        model, optimizer = state["model"], state["optim"]
        set_state_dict(*self.both, model_state_dict=model, optim_state_dict=optimizer, options=self.options)


def entries(how, params, optimizer):
    """By names, as the option `how` has it, or the optimizer alone, whose parameters have numbers."""
    if how == "alone":
        return {"optimizer": optimizer}
    return {"app": App(as_model(params), optimizer, OPTIONS[how])}


def seen(case, rank, params, optimizer, steps):
    """As it is, and parameters three steps later."""
    (state, values), residual = checkpoint(params, optimizer), residual_of(case, optimizer)
    run(case, rank, optimizer, params, steps + 1, steps + 3)
    assert all(torch.isfinite(p).all() for p in params)
    return state, residual, bits(params), values


def saving(rank, size, case, folder, how, steps):
    params, optimizer = trained(case, rank, steps, group())
    dcp.save(entries(how, params, optimizer), checkpoint_id=folder, process_group=group())
    return seen(case, rank, params, optimizer, steps)


def loading(rank, size, case, folder, how, steps, new, values):
    """new: the optimizer is, else it has taken as many steps of another run."""
    params, optimizer = trained(case.but(seed=1), rank, 0 if new else steps, group())
    if new:
        onebit.make_room(folder, as_model(params), optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the state does not hold the residuals")
        dcp.load(entries(how, params, optimizer), checkpoint_id=folder, process_group=group())
    if how == "alone":
        set_parameters(params, values)
    return seen(case, rank, params, optimizer, steps)


TENSOR = {"scale": "tensor", "chunks": 2}
ROWS = [  # optimizer, how, steps, new, ranks there, options, ranks here, ranks a node
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
def test_dcp_carries_a_run(row, tmp_path):
    """Bit for bit on as many ranks; on others stage 1 as it is, stage 2 with the mean residual."""
    kind, how, steps, new, there, options, size, each = row
    options = {"freeze_step": 3, **options}
    case = Case(kind, dtype=options.pop("dtype", "float32"), options=options, groups=TWO_GROUPS, each=each)
    before = run_ranks(there, saving, case, str(tmp_path), how, steps)
    values = before[0][3]
    if steps == 6 and there == 2:
        assert not torch.equal(*(own[0]["state"][3][f"residual_of_rank_{r}"] for r, own in enumerate(before)))
    after = run_ranks(there, loading, case, str(tmp_path), how, steps, new, values)
    for (state, _, end, _), (again, _, its_end, _) in zip(before, after, strict=True):
        assert same(state, again) and end == its_end
    if size != there:
        after = run_ranks(size, loading, case, str(tmp_path), how, steps, new, values)
        assert len({end for _, _, end, _ in after}) == 1
        if steps == 2:
            assert same(after[0][0]["state"], before[0][0]["state"])
        else:
            for here, was in zip(after[0][1], before[0][1], strict=True):
                np.testing.assert_allclose(here, was, rtol=1e-5, atol=1e-6)


def test_a_flattened_state_goes_on_in_a_new_optimizer_of_the_same_process():
    case = Case("OneBitLamb", options={"freeze_step": 3}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 6)
    flat = snapshot(get_optimizer_state_dict(as_model(params), optimizer, options=FLATTENED))
    again, resumed = trained(case.but(seed=1), 0, 0)
    onebit.make_room(flat, as_model(again), resumed)
    set_optimizer_state_dict(as_model(again), resumed, flat, options=FLATTENED)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))


# make_room


class Wrapper(nn.Module):
    """As DDP is, to names."""

    def __init__(self, model):
        super().__init__()
        self.module = model


def test_wrappers_are_no_part_of_names():
    params, optimizer = trained(CASE, 0, 6)
    flat = get_optimizer_state_dict(as_model(params), optimizer)
    for model in (Wrapper(as_model(params)), torch.compile(Wrapper(as_model(params)))):
        resumed = CASE.build(params)
        onebit.make_room(flat, model, resumed)
        assert set(resumed.state[params[0]]) == set(optimizer.state[params[0]])


def test_a_step_before_the_load_is_an_error():
    (params, optimizer), (_, saved) = trained(CASE, 0, 0), trained(CASE, 0, 6)
    onebit.make_room({"optimizer": saved.state_dict()}, as_model(params), optimizer)
    with pytest.raises(ValueError, match="a step after make_room"):
        run(CASE, 0, optimizer, params, 1, 1)
    with pytest.raises(ValueError, match="nothing was loaded into what make_room has made"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved.state_dict())
    assert same(snapshot(optimizer.state_dict()), snapshot(saved.state_dict()))


def test_sources_that_hold_nothing_are_errors(tmp_path):
    (params, optimizer), (_, saved) = trained(CASE, 0, 0), trained(CASE, 0, 6)
    model, adamw = as_model(params), torch.optim.AdamW(params)
    run(CASE, 0, adamw, params, 1, 1)
    before = snapshot(optimizer.state_dict())
    by_name = get_optimizer_state_dict(model, saved.__class__(params))
    renamed = {
        k: {f"other.{n}": v for n, v in own.items()} if isinstance(own, dict) else own for k, own in by_name.items()
    }
    another = snapshot(saved.state_dict())
    another["param_groups"][0]["onebit"]["version"] = 2
    for source, error, match in (
        (tmp_path / "nowhere", ValueError, "holds no checkpoint"),
        (3, TypeError, "not a int"),
        ({"optimizer": adamw.state_dict()}, ValueError, "no onebit optimizer's"),
        (renamed, ValueError, "called by other names"),
        ({"optimizer": another}, ValueError, "version 2"),
    ):
        with pytest.raises(error, match=match):
            onebit.make_room(source, model, optimizer)
    assert same(snapshot(optimizer.state_dict()), before)

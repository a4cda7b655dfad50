"""States of torch.optim.AdamW load into either stage, and stage 1's states load into AdamW."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.onebit.checkpoint.states import (
    TWO_GROUPS,
    adamw_run,
    assert_step,
    flat,
    meaning,
    other_parameters,
    set_parameters,
    trained,
)
from tests.onebit.runs import Case, freezing_kinds, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks

ADAMW = {
    "plain": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "lr is a tensor": {"lr": torch.tensor(5e-3)},
}


def assert_params_near(params, others):
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@kinds
@pytest.mark.parametrize("name", ADAMW)
def test_adamw_continues_in_stage_1(kind, name):
    case = Case(kind, options={"freeze_step": 20})
    theirs, adamw = adamw_run(case, 5, **ADAMW[name])
    params = other_parameters(case)
    set_parameters(params, theirs)
    optimizer = case.build(params)
    optimizer.load_state_dict(adamw.state_dict())
    group = optimizer.param_groups[0]
    assert (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]) == (
        pytest.approx(5e-3),
        (0.8, 0.99),
        1e-6,
        0.1,
    )
    assert not {"fused", "foreach", "amsgrad", "capturable"} & group.keys()
    for p, q in zip(params, theirs, strict=True):
        assert same(snapshot(optimizer.state[p]["exp_avg"]), snapshot(adamw.state[q]["exp_avg"]))
        assert same(snapshot(optimizer.state[p]["exp_avg_sq"]), snapshot(adamw.state[q]["exp_avg_sq"]))
    run(case, 0, optimizer, params, 6, 9)
    run(case, 0, adamw, theirs, 6, 9)
    if kind == "OneBitAdam":
        assert_params_near(params, theirs)
    assert [int(own["step"]) for own in optimizer.state_dict()["state"].values()] == [9] * 4


@kinds
def test_adamw_continues_in_stage_1_after_its_freeze_step_came(kind):
    """Its steps count: 5 of them, and two more to the freeze."""
    case = Case(kind, options={"freeze_step": 7})
    theirs, adamw = adamw_run(case, 5)
    optimizer = case.build(theirs)
    optimizer.load_state_dict(adamw.state_dict())
    stages = []
    for step in range(6, 9):
        take(case, 0, optimizer, theirs, step)
        stages.append(optimizer.compressing)
    assert stages == [False, False, True]


def test_adamw_in_bf16_continues_in_stage_1():
    case = Case(dtype="bfloat16", options={"freeze_step": 20, "master_weights": False})
    theirs, adamw = adamw_run(case, 5)
    assert adamw.state[theirs[0]]["exp_avg"].dtype == torch.bfloat16
    params = other_parameters(case)
    set_parameters(params, theirs)
    optimizer = case.build(params)
    optimizer.load_state_dict(adamw.state_dict())
    for p, q in zip(params, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][name].dtype == torch.float32
            assert torch.equal(optimizer.state[p][name], adamw.state[q][name].float())
    run(case, 0, optimizer, params, 6, 7)
    run(case, 0, adamw, theirs, 6, 7)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("first", ["parameters", "optimizer"])
def test_adamw_in_bf16_moves_on_from_the_parameters_as_they_are(first):
    """Its state has no master copy: the parameters are it, in whichever order the two are loaded."""
    case = Case(dtype="bfloat16", options={"freeze_step": 20})
    theirs, adamw = adamw_run(case, 5)
    values = [p.detach().clone() for p in theirs]
    params = other_parameters(case)
    if first == "parameters":
        set_parameters(params, values)
    optimizer = case.build(params)
    optimizer.load_state_dict(adamw.state_dict())
    set_parameters(params, values)
    take(case, 0, optimizer, params, 6)
    for p, value in zip(params, values, strict=True):
        assert (p - value).abs().max() < 0.1


def warm_start(rank, size, case, state, values):
    params = other_parameters(case)
    set_parameters(params, values)
    optimizer = case.build(params, group())
    optimizer.load_state_dict(snapshot(state))
    assert not optimizer.compressing
    take(case, rank, optimizer, params, 6)
    assert optimizer.compressing
    return snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]


@pytest.mark.parametrize("size", [1, 2])
def test_adamw_starts_stage_2_at_once(size):
    """1-bit Adam; 1-bit LAMB has no coefficients yet, and says so."""
    case = Case(options={"freeze_step": 0})
    theirs, adamw = adamw_run(case, 5)
    state, values = adamw.state_dict(), [p.detach() for p in theirs]
    results = run_ranks(size, warm_start, case, snapshot(state), values)
    v, m = (np.concatenate([own[k].double().numpy().ravel() for own in state["state"].values()])
            for k in ("exp_avg_sq", "exp_avg"))  # fmt: skip
    own = {"lr": 5e-3, "betas": (0.8, 0.99), "weight_decay": 0.1}
    before = SimpleNamespace(e=0.0, server=0.0, m=m, d=1 / (np.sqrt(v / (1 - 0.99**5)) + 1e-6))
    after = meaning([s for s, _ in results], case)
    assert_step(case.but(options={**case.options, **own}), size, 6, before, after, flat(case, values), results[0][1])


@freezing_kinds
def test_a_fresh_optimizer_can_not_start_in_stage_2(kind):
    case = Case(kind, options={"freeze_step": 0})
    params = case.parameters()
    with pytest.raises(ValueError, match="stage 2 is to begin after 0 steps"):
        take(case, 0, case.build(params), params, 1)


@kinds
def test_an_amsgrad_state_loads_with_a_warning(kind):
    case = Case(kind, options={"freeze_step": 20})
    theirs, adamw = adamw_run(case, 5, amsgrad=True)
    optimizer = case.build(theirs)
    with pytest.warns(UserWarning, match="amsgrad") as caught:
        optimizer.load_state_dict(adamw.state_dict())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(optimizer.state[theirs[0]]["exp_avg_sq"], adamw.state[theirs[0]]["exp_avg_sq"])


@kinds
def test_parameters_that_adamw_never_moved_start_from_zero(kind):
    case = Case(kind, missing=tuple((step, 0, 1) for step in range(1, 6)), options={"freeze_step": 20})
    theirs, adamw = adamw_run(case, 5)
    optimizer = case.build(theirs)
    optimizer.load_state_dict(adamw.state_dict())
    for i, p in enumerate(theirs):
        assert bool(optimizer.state[p]["exp_avg_sq"].any()) == (i != 1)


def test_stage_1_continues_as_adamw():
    case = Case(options={"freeze_step": 20, "weight_decay": 0.1}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 5)
    theirs = other_parameters(case)
    set_parameters(theirs, params)
    groups = [{"params": [p for i, p in enumerate(theirs) if i % 2 == g]} for g in range(2)]
    adamw = torch.optim.AdamW(groups, lr=1.0)
    adamw.load_state_dict(snapshot(optimizer.state_dict()))
    run(case, 0, optimizer, params, 6, 9)
    run(case, 0, adamw, theirs, 6, 9)
    assert_params_near(params, theirs)


def test_a_run_continues_from_an_adamw_that_loaded_it():
    """AdamW counts its own steps, and keeps entries that it does not know as they are."""
    case = Case(options={"freeze_step": 10})
    params, optimizer = trained(case, 0, 5)
    theirs = other_parameters(case)
    set_parameters(theirs, params)
    adamw = torch.optim.AdamW([theirs[p] for p in case.order], lr=1.0)
    adamw.load_state_dict(snapshot(optimizer.state_dict()))
    run(case, 0, adamw, theirs, 6, 9)
    again = case.build(theirs)
    again.load_state_dict(adamw.state_dict())
    assert [int(own["step"]) for own in again.state_dict()["state"].values()] == [9] * 4
    run(case, 0, optimizer, params, 6, 10)
    take(case, 0, again, theirs, 10)
    assert_params_near(params, theirs)
    take(case, 0, again, theirs, 11)
    assert again.compressing

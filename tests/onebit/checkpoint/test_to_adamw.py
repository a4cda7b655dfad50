"""States of either stage go on in torch.optim.AdamW: nobody is locked in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onebit
from tests.onebit.checkpoint.states import TWO_GROUPS, decoded, other_parameters, set_parameters, trained
from tests.onebit.runs import Case, build, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks

ROTATED = {"reply": "direct", "norm": "rotated"}


def adamw_for(case: Case, params: list[Any]) -> torch.optim.AdamW:
    groups = [{"params": [p for i, p in enumerate(params) if case.group_of(i) == g]} for g in range(len(case.groups))]
    return torch.optim.AdamW(groups, lr=1.0)


def state_of(rank: int, size: int, case: Case, steps: int) -> Any:
    params, optimizer = trained(case, rank, steps, group())
    return snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]


def d_and_m(case: Case, state: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """What stage 2 multiplies, float64, from the saved fields alone."""
    found = []
    for key, own in state["state"].items():
        g = next(g for g in state["param_groups"] if key in g["params"])
        numel, is_rotated = int(np.prod(case.shapes[case.order[key]])), case.options.get("norm") == "rotated"
        m = decoded(own, numel, rotated=is_rotated) / float(own.get("gamma", 1.0))
        if "denominator" in own:
            d = own["denominator"].double().numpy().ravel() * float(own.get("gamma", 1.0))
        else:  # 0/1 Adam with full steps 1, 2, 3: each weighs what AdamW's does, but for b of 0.9 at least
            b = min(g["betas"][1], 0.9) if g["betas"][1] < 0.9 else g["betas"][1]
            u = np.sqrt(own["exp_avg_sq"].double().numpy().ravel() / (1 - b**3))
            d = 1 / (np.maximum(u, float(own["least_root"])) + g["eps"])
        found.append((d, m))
    return found


@kinds
@pytest.mark.parametrize("options", [{}, {"reply": "direct"}, {"reply": 2}, {"scale": "tensor"}, ROTATED], ids=str)
def test_adamw_goes_on_with_what_stage_2_multiplies(kind: str, options: dict[str, Any]) -> None:
    case = Case(kind, options={"freeze_step": 3, "betas": (0.8, 0.99), **options}, groups=TWO_GROUPS)
    (state, values), _ = run_ranks(2, state_of, case, 6)
    kept = snapshot(state)
    params = other_parameters(case)
    set_parameters(params, values)
    adamw = adamw_for(case, params)
    adamw.load_state_dict(onebit.adamw_state(state))
    assert same(state, kept)
    ordered = [params[i] for i in case.order]
    for p, (d, m) in zip(ordered, d_and_m(case, state), strict=True):
        own, g = adamw.state[p], next(g for g in adamw.param_groups if any(p is q for q in g["params"]))
        assert int(own["step"]) == 6 and g["lr"] in (1e-2, 3e-3)
        denominator = (own["exp_avg_sq"].double() / (1 - g["betas"][1] ** 6)).sqrt() + g["eps"]
        np.testing.assert_allclose(1 / denominator.numpy().ravel(), d, rtol=1e-5)
        rounding = 1e-6 * np.abs(m).max() if "norm" in options else 1e-12
        np.testing.assert_allclose(own["exp_avg"].double().numpy().ravel(), m, rtol=1e-5, atol=rounding)
    run(case, 0, adamw, params, 7, 12)
    assert all(torch.isfinite(p).all() for p in params)
    if "scale" not in options:  # one scale for all makes m of the small ones large, in stage 2 as well
        assert all((p - v).abs().max() < 0.1 for p, v in zip(params, values, strict=True))


@kinds
def test_stage_1_goes_on_as_adamw(kind: str) -> None:
    case = Case(kind, options={"freeze_step": 20}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 4)
    adamw = adamw_for(case, params)
    adamw.load_state_dict(onebit.adamw_state(optimizer.state_dict()))
    for p in params:
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(adamw.state[p][name], optimizer.state[p][name])
        assert adamw.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert "onebit" not in adamw.param_groups[0]


def test_momentum_that_no_message_has_had_yet() -> None:
    """After a full-precision step of 0/1 Adam it is in the residuals, times beta1."""
    case = Case("ZeroOneAdam", options={"var_update_scaler": 2})
    params, optimizer = trained(case, 0, 5)
    assert optimizer.schedule.kind == "1 bit" and optimizer.compressing
    state = onebit.adamw_state(optimizer.state_dict())["state"]
    sizes = [float(own["exp_avg"].abs().mean()) for own in state.values()]
    take(case, 0, optimizer, params, 6)
    then = [float(own["exp_avg"].abs().mean()) for own in onebit.adamw_state(optimizer.state_dict())["state"].values()]
    assert all(0.2 < a / b < 5 for a, b in zip(sizes, then, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_coordinates_that_did_not_move_start_from_zero(dtype: str) -> None:
    case = Case(dtype=dtype, options={"freeze_step": 3, "zero_variance": "hold"}, untouched=((0, 2, 9),))
    with pytest.warns(UserWarning, match="without a variance"):
        params, optimizer = trained(case, 0, 6)
    adamw = adamw_for(case, params)
    adamw.load_state_dict(onebit.adamw_state(optimizer.state_dict()))
    for name in ("exp_avg", "exp_avg_sq"):
        assert not adamw.state[params[0]][name][:2].any() and adamw.state[params[0]][name][2:].any()
    run(case, 0, adamw, params, 7, 9)
    assert all(torch.isfinite(p).all() for p in params)


@kinds
def test_and_back_again(kind: str) -> None:
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 6)
    again = case.but(options={"freeze_step": 9}).build(params)
    again.load_state_dict(onebit.adamw_state(optimizer.state_dict()))
    assert not again.compressing and again.steps == 6
    run(case, 0, again, params, 7, 12)
    assert again.compressing or kind == "ZeroOneAdam"


def test_what_is_no_such_state_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a state of an optimizer"):
        onebit.adamw_state({})
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], momentum=0.9)
    with pytest.raises(ValueError, match="has no betas"):
        onebit.adamw_state(sgd.state_dict())
    state = build("OneBitAdam").state_dict()
    del state["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="no exp_avg for parameter 0"):
        onebit.adamw_state(state)

"""States of torch.optim.AdamW load into either stage, and those of either stage go on in AdamW: nobody is locked in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import onebit
from tests.onebit.checkpoint import states
from tests.onebit.checkpoint.states import TWO_GROUPS, adamw_run, resumed, trained
from tests.onebit.runs import Case, build, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks

STAGE_1 = {"freeze_step": 20}
BF16 = {"dtype": "bfloat16", "options": {**STAGE_1, "master_weights": False}}
MOMENTS = ("exp_avg", "exp_avg_sq")


def assert_params_near(params, others, rtol=1e-5, atol=1e-6):
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


CONTINUED = [  # optimizer, more of the case, AdamW's options, steps, rtol and atol
    ("OneBitAdam", {}, {}, 9, (1e-5, 1e-6)),
    ("OneBitAdam", {}, {"fused": True}, 9, (1e-5, 1e-6)),
    ("OneBitAdam", {}, {"foreach": True}, 9, (1e-5, 1e-6)),
    ("OneBitAdam", {}, {"lr": torch.tensor(5e-3)}, 9, (1e-5, 1e-6)),
    ("OneBitAdam", BF16, {}, 7, (2**-6, 2**-6)),
    ("OneBitLamb", {}, {}, 9, None),
    ("ZeroOneAdam", {}, {"fused": True}, 9, None),
]


@pytest.mark.parametrize(("kind", "more", "options", "last", "near"), CONTINUED, ids=str)
def test_adamw_continues_in_stage_1(kind, more, options, last, near):
    case = Case(kind, **{"options": STAGE_1, **more})
    theirs, adamw = adamw_run(case, 5, **options)
    params, optimizer = resumed(case, adamw.state_dict(), theirs)
    own = optimizer.param_groups[0]
    assert float(own["lr"]) == pytest.approx(5e-3)
    assert (own["betas"], own["eps"], own["weight_decay"]) == ((0.8, 0.99), 1e-6, 0.1)
    assert not {"fused", "foreach", "amsgrad", "capturable"} & own.keys()
    for p, q in zip(params, theirs, strict=True):
        for name in MOMENTS:
            assert adamw.state[q][name].dtype == q.dtype
            assert same(optimizer.state[p][name], adamw.state[q][name].float())
    run(case, 0, optimizer, params, 6, last)
    run(case, 0, adamw, theirs, 6, last)
    if near:
        assert_params_near(params, theirs, *near)
    assert [int(own["step"]) for own in optimizer.state_dict()["state"].values()] == [last] * 4


@pytest.mark.parametrize("first", ["parameters", "optimizer"])
def test_adamw_in_bf16_moves_on_from_the_parameters_as_they_are(first):
    """Its state has no master copy: the parameters are it, in whichever order the two are loaded."""
    case = Case(dtype="bfloat16", options=STAGE_1)
    theirs, adamw = adamw_run(case, 5)
    before = theirs if first == "parameters" else states.other_parameters(case)
    params, optimizer = resumed(case, adamw.state_dict(), before)
    states.set_parameters(params, theirs)
    take(case, 0, optimizer, params, 6)
    assert all((p - q).abs().max() < 0.1 for p, q in zip(params, theirs, strict=True))


def warm_start(rank, size, case, state, values):
    params, optimizer = resumed(case, snapshot(state), values, group())
    assert not optimizer.compressing
    take(case, rank, optimizer, params, 6)
    assert optimizer.compressing
    return states.checkpoint(params, optimizer)


@pytest.mark.parametrize("size", [1, 2])
def test_adamw_starts_stage_2_at_once(size):
    """1-bit Adam; 1-bit LAMB has no coefficients yet, and says so."""
    case = Case(options={"freeze_step": 0})
    theirs, adamw = adamw_run(case, 5)
    state, values = states.checkpoint(theirs, adamw)
    results = run_ranks(size, warm_start, case, state, values)
    m, v = (np.concatenate([own[k].double().numpy().ravel() for own in state["state"].values()]) for k in MOMENTS)
    before = SimpleNamespace(e=0.0, server=0.0, m=m, d=1 / (np.sqrt(v / (1 - 0.99**5)) + 1e-6))
    after = states.meaning([s for s, _ in results], case)
    case = case.but(options={**case.options, "lr": 5e-3, "betas": (0.8, 0.99), "weight_decay": 0.1})
    states.assert_step(case, size, 6, before, after, states.flat(case, values), results[0][1])


def test_a_fresh_optimizer_can_not_start_in_stage_2():
    for kind in ("OneBitAdam", "OneBitLamb"):
        case = Case(kind, options={"freeze_step": 0})
        params = case.parameters()
        with pytest.raises(ValueError, match="stage 2 is to begin after 0 steps"):
            take(case, 0, case.build(params), params, 1)


def test_an_amsgrad_state_loads_with_a_warning():
    case = Case(options=STAGE_1)
    theirs, adamw = adamw_run(case, 5, amsgrad=True)
    optimizer = case.build(theirs)
    with pytest.warns(UserWarning, match="amsgrad") as caught:
        optimizer.load_state_dict(adamw.state_dict())
    assert [w.filename for w in caught] == [__file__]
    assert torch.equal(optimizer.state[theirs[0]]["exp_avg_sq"], adamw.state[theirs[0]]["exp_avg_sq"])


def test_parameters_that_adamw_never_moved_start_from_zero():
    case = Case("OneBitLamb", missing=tuple((step, 0, 1) for step in range(1, 6)), options=STAGE_1)
    theirs, adamw = adamw_run(case, 5)
    optimizer = case.build(theirs)
    optimizer.load_state_dict(adamw.state_dict())
    for i, p in enumerate(theirs):
        assert bool(optimizer.state[p]["exp_avg_sq"].any()) == (i != 1)


def test_a_run_continues_from_an_adamw_that_loaded_it():
    """AdamW counts its own steps, and keeps entries that it does not know as they are."""
    case = Case(options={"freeze_step": 10})
    params, optimizer = trained(case, 0, 5)
    theirs = states.other_parameters(case)
    states.set_parameters(theirs, params)
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


# To AdamW

ROTATED = {"reply": "direct", "norm": "rotated"}


def adamw_for(case, params, state):
    groups = [{"params": [p for i, p in enumerate(params) if case.group_of(i) == g]} for g in range(len(case.groups))]
    adamw = torch.optim.AdamW(groups, lr=1.0)
    adamw.load_state_dict(state)
    return adamw


def d_and_m(case, state):
    """What stage 2 multiplies, float64, from the saved fields alone."""
    found = []
    for key, own in state["state"].items():
        g = next(g for g in state["param_groups"] if key in g["params"])
        numel, is_rotated = int(np.prod(case.shapes[case.order[key]])), case.options.get("norm") == "rotated"
        m = states.decoded(own, numel, rotated=is_rotated) / float(own.get("gamma", 1.0))
        if "denominator" in own:
            d = own["denominator"].double().numpy().ravel() * float(own.get("gamma", 1.0))
        else:  # 0/1 Adam with full steps 1, 2, 3: each weighs what AdamW's does, but for b of 0.9 at least
            u = np.sqrt(own["exp_avg_sq"].double().numpy().ravel() / (1 - g["betas"][1] ** 3))
            d = 1 / (np.maximum(u, float(own["least_root"])) + g["eps"])
        found.append((d, m))
    return found


MULTIPLIED = [
    ("OneBitAdam", {}),
    ("OneBitAdam", {"reply": 2}),
    ("OneBitAdam", ROTATED),
    ("OneBitLamb", {"scale": "tensor"}),
    ("OneBitLamb", {"reply": "direct"}),
    ("ZeroOneAdam", {"variance_floor": 0.5}),
    ("ZeroOneAdam", {"reply": 2, "scale": "tensor"}),
    ("ZeroOneAdam", ROTATED),
]


@pytest.mark.parametrize(("kind", "options"), MULTIPLIED, ids=str)
def test_adamw_goes_on_with_what_stage_2_multiplies(kind, options):
    case = Case(kind, options={"freeze_step": 3, "betas": (0.8, 0.99), **options}, groups=TWO_GROUPS)
    (state, values), _ = run_ranks(2, states.save_run, case, 6)
    kept = snapshot(state)
    params = states.other_parameters(case)
    states.set_parameters(params, values)
    adamw = adamw_for(case, params, onebit.adamw_state(state))
    assert same(state, kept)
    for i, (d, m) in zip(case.order, d_and_m(case, state), strict=True):
        own, g = adamw.state[params[i]], adamw.param_groups[case.group_of(i)]
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
def test_stage_1_goes_on_as_adamw(kind):
    case = Case(kind, options={"freeze_step": 20, "weight_decay": 0.1}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 4)
    theirs = states.other_parameters(case)
    states.set_parameters(theirs, params)
    adamw = adamw_for(case, theirs, snapshot(onebit.adamw_state(optimizer.state_dict())))
    for p, q in zip(theirs, params, strict=True):
        assert all(torch.equal(adamw.state[p][name], optimizer.state[q][name]) for name in MOMENTS)
        assert adamw.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert "onebit" not in adamw.param_groups[0]
    if kind == "OneBitAdam":  # also without adamw_state
        adamw.load_state_dict(snapshot(optimizer.state_dict()))
        run(case, 0, optimizer, params, 5, 9)
        run(case, 0, adamw, theirs, 5, 9)
        assert_params_near(params, theirs)


def test_momentum_that_no_message_has_had_yet():
    """After a full-precision step of 0/1 Adam it is in the residuals, times beta1."""
    case = Case("ZeroOneAdam", options={"var_update_scaler": 2})
    params, optimizer = trained(case, 0, 5)
    assert optimizer.schedule.kind == "1 bit" and optimizer.compressing
    saved = snapshot(optimizer.state_dict())
    first = snapshot(onebit.adamw_state(saved))["state"]
    take(case, 0, optimizer, params, 6)
    then = onebit.adamw_state(optimizer.state_dict())["state"]
    for key, own in first.items():
        torch.testing.assert_close(0.9 * own["exp_avg"], saved["state"][key]["residual_of_rank_0"])
        assert 0.2 < own["exp_avg"].abs().mean() / then[key]["exp_avg"].abs().mean() < 5


def test_momentum_after_local_steps_has_its_own_unit():
    """Messages then say how far ranks have moved."""
    local = {"var_update_scaler": 2, "var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4}
    case = Case("ZeroOneAdam", options=local)
    _, optimizer = trained(case, 0, 7)
    optimizer.synchronize()
    saved = optimizer.state_dict()["state"]
    for key, own in onebit.adamw_state(optimizer.state_dict())["state"].items():
        factor, m = float(saved[key]["momentum_factor"]), states.decoded(saved[key], own["exp_avg"].numel())
        assert factor > 2
        np.testing.assert_allclose(own["exp_avg"].numpy().ravel(), factor * m, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_coordinates_that_did_not_move_start_from_zero(dtype):
    case = Case(dtype=dtype, options={"freeze_step": 3, "zero_variance": "hold"}, untouched=((0, 2, 9),))
    with pytest.warns(UserWarning, match="without a variance"):
        params, optimizer = trained(case, 0, 6)
    adamw = adamw_for(case, params, onebit.adamw_state(optimizer.state_dict()))
    for name in MOMENTS:
        assert not adamw.state[params[0]][name][:2].any() and adamw.state[params[0]][name][2:].any()
    run(case, 0, adamw, params, 7, 9)
    assert all(torch.isfinite(p).all() for p in params)


@kinds
def test_and_back_again(kind):
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 6)
    again = case.but(options={"freeze_step": 9}).build(params)
    again.load_state_dict(onebit.adamw_state(optimizer.state_dict()))
    assert not again.compressing and again.steps == 6
    run(case, 0, again, params, 7, 12)
    assert again.compressing or kind == "ZeroOneAdam"


def test_what_is_no_such_state_is_an_error():
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], momentum=0.9)
    state = build("OneBitAdam").state_dict()
    del state["state"][0]["exp_avg"]
    for wrong, match in (
        ({}, "not a state of an optimizer"),
        (sgd.state_dict(), "has no betas"),
        (state, "no exp_avg for parameter 0"),
    ):
        with pytest.raises(ValueError, match=match):
            onebit.adamw_state(wrong)

"""States of torch.optim.AdamW load into either stage, and those of either stage go on in AdamW: nobody is locked in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import onebit
from onebit.optim.schedule import VarianceSchedule
from tests import internals
from tests.onebit.checkpoint import states
from tests.onebit.checkpoint.states import TWO_GROUPS, adamw_run, resumed, trained
from tests.onebit.runs import Case, adamw_state, build, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks

STAGE_1 = {"freeze_step": 20}
BF16 = {"dtype": "bfloat16", "options": {**STAGE_1, "master_weights": False}}
MOMENTS = ("exp_avg", "exp_avg_sq")


def assert_params_near(params, others, rtol=1e-5, atol=1e-6):
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


NEVER = {"missing": tuple((step, 0, 1) for step in range(1, 6))}  # of a parameter that AdamW never moved
CONTINUED = [  # optimizer, more of the case, AdamW's options, steps, rtol and atol
    ("OneBitAdam", {}, {}, 9, (1e-5, 1e-6)),
    ("OneBitAdam", {}, {"fused": True}, 9, (1e-5, 1e-6)),
    ("OneBitAdam", {}, {"foreach": True}, 9, (1e-5, 1e-6)),
    ("OneBitAdam", {}, {"lr": torch.tensor(5e-3)}, 9, (1e-5, 1e-6)),
    ("OneBitAdam", BF16, {}, 7, (2**-6, 2**-6)),
    ("OneBitAdam", {"dtype": "bfloat16", "options": STAGE_1}, {}, 6, (0.0, 0.1)),  # there is no fp32 copy in the state
    ("OneBitLamb", NEVER, {}, 9, None),
    ("ZeroOneAdam", {}, {"fused": True}, 9, None),
]


@pytest.mark.parametrize(("kind", "more", "options", "last", "near"), CONTINUED, ids=str)
def test_adamw_continues_in_stage_1(kind, more, options, last, near):
    """The state is loaded before the parameters."""
    case = Case(kind, **{"options": STAGE_1, **more})
    theirs, adamw = adamw_run(case, 5, **options)
    params, optimizer = resumed(case, adamw.state_dict(), states.other_parameters(case))
    states.set_parameters(params, theirs)
    own = optimizer.param_groups[0]
    assert float(own["lr"]) == pytest.approx(5e-3)
    assert (own["betas"], own["eps"], own["weight_decay"]) == ((0.8, 0.99), 1e-6, 0.1)
    assert not {"fused", "foreach", "amsgrad", "capturable"} & own.keys()
    for i, (p, q) in enumerate(zip(params, theirs, strict=True)):
        for name in MOMENTS:
            moment = adamw.state[q].get(name, torch.zeros_like(q))
            assert bool(moment.any()) == (more != NEVER or i != 1) and moment.dtype == q.dtype
            assert same(optimizer.state[p][name], moment.float())
    run(case, 0, optimizer, params, 6, last)
    run(case, 0, adamw, theirs, 6, last)
    if near:
        assert_params_near(params, theirs, *near)
    assert [int(own["step"]) for own in optimizer.state_dict()["state"].values()] == [last] * 4


def warm_start(rank, size, case, state, values):
    params, optimizer = resumed(case, snapshot(state), values, group())
    assert not optimizer.compressing
    take(case, rank, optimizer, params, 6)
    assert optimizer.compressing
    optimizer.synchronize()
    return states.checkpoint(params, optimizer)


@pytest.mark.parametrize("size", [1, 2])
def test_adamw_starts_stage_2_at_once(size):
    """1-bit Adam; 1-bit LAMB has no coefficients yet, and says so: see test_freeze.py."""
    case = Case(options={"freeze_step": 0})
    theirs, adamw = adamw_run(case, 5)
    state, values = states.checkpoint(theirs, adamw)
    results = run_ranks(size, warm_start, case, state, values)
    m, v = (np.concatenate([own[k].double().numpy().ravel() for own in state["state"].values()]) for k in MOMENTS)
    before = SimpleNamespace(e=0.0, m=m, d=states.denominator(v, 1e-6, 1 - 0.99**5))
    after = states.meaning(states.one_of([s for s, _ in results]), case)
    case = case.but(options={**case.options, "lr": 5e-3, "betas": (0.8, 0.99), "weight_decay": 0.1})
    states.assert_step(case, size, 6, before, after, states.flat(case, values), results[0][1])


def test_an_amsgrad_state_loads_with_a_warning():
    case = Case(options=STAGE_1)
    theirs, adamw = adamw_run(case, 5, amsgrad=True)
    optimizer = case.build(theirs)
    with pytest.warns(UserWarning, match="amsgrad") as caught:
        optimizer.load_state_dict(adamw.state_dict())
    assert [w.filename for w in caught] == [__file__]
    assert torch.equal(optimizer.state[theirs[0]]["exp_avg_sq"], adamw.state[theirs[0]]["exp_avg_sq"])


# 0/1 Adam

LR, BETAS, EPS = 1e-2, (0.9, 0.99), 1e-8
ZERO_ONE = Case("ZeroOneAdam", ((8, 16),), options={"lr": LR, "block_size": 32})


def from_adamw(steps, **options):
    """0/1 Adam with AdamW's state of so many steps, its parameter, and that state in float64."""
    state = adamw_state(ZERO_ONE, steps, LR, betas=BETAS, weight_decay=0.0)
    params = ZERO_ONE.parameters()
    optimizer = ZERO_ONE.but(options={**ZERO_ONE.options, **options}).build(params)
    optimizer.load_state_dict(snapshot(state))
    return optimizer, params[0], {name: value.double() for name, value in state["state"][0].items()}


def gradient(step):
    return ZERO_ONE.gradients(0, step)[0].double()


def moved_by(optimizer, p, step):
    before = p.detach().double()
    take(ZERO_ONE, 0, optimizer, [p], step)
    return p.detach().double() - before


@pytest.mark.parametrize("steps", [6, 8, 12, 16, 20])
def test_a_full_step_right_after_adamws_state_has_its_momentum(steps):
    """It is a dense one: m was never sent."""
    optimizer, p, theirs = from_adamw(steps)
    schedule = VarianceSchedule(4)
    assert schedule.is_full(steps + 1)
    moved, g = moved_by(optimizer, p, steps + 1), gradient(steps + 1)
    assert not optimizer.compressing
    b, weight = (of(steps + 1, BETAS[1]) for of in (schedule.decay, schedule.weight))
    m = BETAS[0] * theirs["exp_avg"] + (1 - BETAS[0]) * g
    before = theirs["exp_avg_sq"] / (1 - BETAS[1] ** steps) * schedule.weight(steps, BETAS[1])
    v = b * before + (1 - b) * g * g
    wanted = -LR * m / (1 - BETAS[0] ** (steps + 1)) / ((v / weight).sqrt() + EPS)
    torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=1e-6)
    moved_by(optimizer, p, steps + 2)
    assert optimizer.compressing


@pytest.mark.parametrize("steps", [3, 20, 1000])
def test_adamws_state_comes_back_as_it_was(steps):
    """It does, too, if the steps so far would weigh other than AdamW's."""
    optimizer, _, theirs = from_adamw(steps)
    own = onebit.adamw_state(optimizer.state_dict())["state"][0]
    assert not optimizer.compressing
    for name in MOMENTS:
        torch.testing.assert_close(own[name].double(), theirs[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("first_local", [21, 101])
def test_local_steps_right_after_adamws_state_have_its_momentum(first_local):
    """A rank moves as AdamW with that variance would. What it has to send is what it has moved by."""
    options = {"var_freeze_step": 10, "local_step_scaler": first_local - 11, "local_step_clipper": 8}
    optimizer, p, theirs = from_adamw(100, **options)
    root = (theirs["exp_avg_sq"] / (1 - BETAS[1] ** 100)).sqrt()
    m, way, start = theirs["exp_avg"], torch.zeros_like(root), p.detach().clone().double()
    for step in range(101, 140):
        kind = optimizer.schedule.kind
        m = BETAS[0] * m + (1 - BETAS[0]) * gradient(step)
        way -= LR * m / (1 - BETAS[0] ** step) / (root + EPS)
        moved_by(optimizer, p, step)
        if kind == "sync":
            break
        assert kind == "local"
        torch.testing.assert_close(p.detach().double() - start, way, rtol=1e-4, atol=1e-6)
    else:
        raise AssertionError("there was no sync")
    sent, wanted = (p.detach().double() - start) * (root + EPS), way * (root + EPS)
    along = (sent * wanted).view(-1, 32).sum(1)  # an unbiased scale: what is left out is orthogonal
    torch.testing.assert_close(along, wanted.square().view(-1, 32).sum(1), rtol=1e-3, atol=1e-6)


# To AdamW


def adamw_for(case, params, state):
    groups = [{"params": [p for i, p in enumerate(params) if case.group_of(i) == g]} for g in range(len(case.groups))]
    adamw = torch.optim.AdamW(groups, lr=1.0)
    adamw.load_state_dict(state)
    return adamw


def d_and_m(case, state):
    """What stage 2 multiplies, float64, a pair a parameter."""
    found = states.meaning(state, case)
    if case.kind == "ZeroOneAdam":  # full steps 1, 2, 3: each weighs what AdamW's does, but for b of 0.9 at least
        own = state["state"].values()
        numels = [each["exp_avg"].numel() for each in own]
        least = np.repeat([float(each["least_root"]) for each in own], numels)
        eps = states.per_element(case, lambda o: 1e-8)
        weight = 1 - states.per_element(case, lambda o: o["betas"][1]) ** 3
        weight = weight if case.options.get("bias_correction", True) else 1
        found.d = 1 / (np.maximum(np.sqrt(found.d / weight), least) + eps)
    ends = np.cumsum([each["exp_avg"].numel() for each in state["state"].values()])[:-1]
    return zip(np.split(found.d, ends), np.split(found.m, ends), strict=True)


MULTIPLIED = [
    ("OneBitAdam", {}),
    ("OneBitLamb", {"scale": "tensor"}),
    ("OneBitLamb", {"reply": "direct"}),
    ("ZeroOneAdam", {"variance_floor": 0.5}),
    ("ZeroOneAdam", {"scale": "tensor"}),
    ("ZeroOneAdam", {"bias_correction": False}),
]


@pytest.mark.parametrize(("kind", "options"), MULTIPLIED, ids=str)
def test_adamw_goes_on_with_what_stage_2_multiplies(kind, options):
    """The way goes back again, in stage 1."""
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
        np.testing.assert_allclose(own["exp_avg"].double().numpy().ravel(), m, rtol=1e-5, atol=1e-12)
    again = case.but(options={**case.options, "freeze_step": 9}).build(params)
    again.load_state_dict(onebit.adamw_state(state))
    assert not again.compressing and again.steps == 6
    run(case, 0, adamw, params, 7, 12)
    assert all(torch.isfinite(p).all() for p in params)
    # one scale for all makes m of the small ones large, in stage 2 as well; uncorrected, v is small
    if not {"scale", "bias_correction"} & options.keys():
        assert all((p - v).abs().max() < 0.1 for p, v in zip(params, values, strict=True))


@kinds
def test_stage_1_goes_on_as_adamw_and_comes_back(kind):
    """AdamW counts its own steps, and keeps entries that it does not know as they are."""
    case = Case(kind, options={"freeze_step": 10, "weight_decay": 0.1}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 4)
    theirs = states.other_parameters(case)
    states.set_parameters(theirs, params)
    adamw = adamw_for(case, theirs, snapshot(onebit.adamw_state(optimizer.state_dict())))
    for p, q in zip(theirs, params, strict=True):
        assert all(torch.equal(adamw.state[p][name], optimizer.state[q][name]) for name in MOMENTS)
        assert adamw.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert not {"onebit", "compress"} & adamw.param_groups[0].keys()
    if kind == "OneBitAdam":  # also without adamw_state
        adamw.load_state_dict(snapshot(optimizer.state_dict()))
        run(case, 0, optimizer, params, 5, 9)
        run(case, 0, adamw, theirs, 5, 9)
        assert_params_near(params, theirs)
        again = case.build(theirs)
        again.load_state_dict(adamw.state_dict())
        assert [int(own["step"]) for own in again.state_dict()["state"].values()] == [9] * 4
        take(case, 0, optimizer, params, 10)
        take(case, 0, again, theirs, 10)
        assert_params_near(params, theirs)
        take(case, 0, again, theirs, 11)
        assert again.compressing


@pytest.mark.parametrize("each", [1, 2])
def test_momentum_that_no_message_has_had_yet(each):
    """It is in the residuals after a full-precision step of 0/1 Adam, times beta1."""
    case = Case("ZeroOneAdam", options={"var_update_scaler": 2}, each=each)
    (saved, _), *_ = run_ranks(2 * each, states.save_run, case, 5)
    (then, _), *_ = run_ranks(2 * each, states.save_run, case, 6)
    then = onebit.adamw_state(then)["state"]
    for key, own in onebit.adamw_state(saved)["state"].items():
        assert not saved["state"][key]["exp_avg"].any()
        torch.testing.assert_close(0.9 * own["exp_avg"], saved["state"][key]["residual"])
        assert 0.2 < own["exp_avg"].abs().mean() / then[key]["exp_avg"].abs().mean() < 5


def test_momentum_after_local_steps_has_its_own_unit():
    """Messages then say how far ranks have moved, and states do not."""
    local = {"var_update_scaler": 2, "var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4}
    case = Case("ZeroOneAdam", options=local)
    _, optimizer = trained(case, 0, 7)
    optimizer.synchronize()
    state, own_momentum = optimizer.state_dict(), []
    for key, own in onebit.adamw_state(state)["state"].items():
        assert float(state["state"][key]["momentum_factor"]) > 2
        assert same(own["exp_avg"], state["state"][key]["exp_avg"])
        own_momentum.append(own["exp_avg"])
    (flat,) = internals.states(optimizer)
    for i, m in enumerate(own_momentum):
        torch.testing.assert_close(flat.view("own_momentum", i), m)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_that_did_not_move_start_from_zero(dtype):
    case = Case(dtype=dtype, options={"freeze_step": 3, "zero_variance": "hold"}, untouched=((0, 2, 9),))
    with pytest.warns(UserWarning, match="without a variance"):
        params, optimizer = trained(case, 0, 6)
    adamw = adamw_for(case, params, onebit.adamw_state(optimizer.state_dict()))
    for name in MOMENTS:
        assert not adamw.state[params[0]][name][:2].any() and adamw.state[params[0]][name][2:].any()
    run(case, 0, adamw, params, 7, 9)
    assert all(torch.isfinite(p).all() for p in params)


def test_what_is_no_such_state_is_an_error():
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], momentum=0.9)
    state = build("OneBitAdam").state_dict()
    del state["state"][0]["exp_avg"]
    whole = build("OneBitAdam").state_dict()
    for wrong, match in (
        ({}, "not a state of an optimizer"),
        (sgd.state_dict(), "has no betas"),
        (state, "no exp_avg for parameter 0"),
        ({**whole, "state": {**whole["state"], 9: whole["state"][0]}}, "parameter 9, which no param group names"),
    ):
        with pytest.raises(ValueError, match=match):
            onebit.adamw_state(wrong)

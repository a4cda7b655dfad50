"""A state that does not fit is refused, and leaves the optimizer as it was."""

import warnings

import pytest

from tests.onebit.checkpoint.states import adamw_run, counters, trained
from tests.onebit.runs import Case, bits, freezing_kinds, kinds, run, same, snapshot
from tests.ranks import group, run_ranks


def change(state, path, value):
    """`state` with state[path[0]][path[1]]... = value, or without it where value is None."""
    *way, last = path
    inner = state
    for key in way:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value(inner[last]) if callable(value) else value
    return state


def shorter(tensor):
    return tensor.reshape(-1)[:-1].clone()


def one_number(tensor):
    return tensor.reshape(-1)[:1].clone()


ONE = ("state", 0)
GROUP = ("param_groups", 0)
BROKEN = {
    "no param_groups": (("param_groups",), None, "param_groups"),
    "no state": (("state",), None, "param_groups"),
    "a group too few": (("param_groups",), lambda groups: groups[:1], "groups"),
    "a parameter too few": ((*GROUP, "params"), lambda keys: keys[:-1], "groups"),
    "another version": ((*GROUP, "onebit", "version"), 99, "version"),
    "no version": ((*GROUP, "onebit", "version"), None, "version"),
    "maximize": ((*GROUP, "maximize"), lambda _: True, "maximize"),
}
BROKEN_STAGE_1 = {
    **BROKEN,
    "shape of exp_avg": ((*ONE, "exp_avg"), shorter, "exp_avg"),
    "shape of exp_avg_sq": ((*ONE, "exp_avg_sq"), one_number, "exp_avg_sq"),
    "no exp_avg": ((*ONE, "exp_avg"), None, "exp_avg"),
    "no exp_avg_sq": ((*ONE, "exp_avg_sq"), None, "exp_avg_sq"),
}
BROKEN_STAGE_2 = {
    **BROKEN,
    "another optimizer's": ((*GROUP, "onebit", "optimizer"), "OneBitOther", "OneBitOther"),
    "shape of denominator": ((*ONE, "denominator"), shorter, "denominator"),
    "no denominator": ((*ONE, "denominator"), None, "denominator"),
    "no parameter": (ONE, None, ""),
    "no bits": ((*ONE, "momentum_bits"), None, "momentum_bits"),
    "no scales": ((*ONE, "momentum_scales"), None, "momentum_scales"),
    "bits of fewer blocks": ((*ONE, "momentum_bits"), lambda b: b[:1], "momentum_bits"),
    "scales of fewer blocks": ((*ONE, "momentum_scales"), lambda s: s[:0], "momentum_scales"),
    "no server residual": ((*ONE, "server_residual_of_rank_0"), None, "server_residual"),
    "shape of residual": ((*ONE, "residual_of_rank_0"), shorter, "residual_of_rank_0"),
    "number for a residual": ((*ONE, "residual_of_rank_0"), one_number, "residual_of_rank_0"),
    "shape of server residual": ((*ONE, "server_residual_of_rank_0"), shorter, "server_residual_of_rank_0"),
}


def assert_refused(case, steps, broken, match):
    """Nothing has changed: the next two steps are those of an optimizer that loaded nothing."""
    params, optimizer = trained(case.but(seed=1), 0, steps)
    state, values, numbers = snapshot(optimizer.state_dict()), bits(params), counters(optimizer)
    shown = {p: snapshot(own) for p, own in optimizer.state.items()}
    current = optimizer.current
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=match):
            optimizer.load_state_dict(broken)
    assert optimizer.current is current
    assert bits(params) == values
    assert counters(optimizer) == numbers
    assert same(snapshot(optimizer.state_dict()), state)
    assert all(same(snapshot(optimizer.state[p]), own) for p, own in shown.items())
    others, undisturbed = trained(case.but(seed=1), 0, steps)
    run(case, 0, optimizer, params, steps + 1, steps + 2)
    run(case, 0, undisturbed, others, steps + 1, steps + 2)
    assert bits(params) == bits(others)
    assert same(snapshot(optimizer.state_dict()), snapshot(undisturbed.state_dict()))


def broken_case(kind):
    return Case(kind, options={"freeze_step": 3, "betas": (0.9, 0.95)}, groups=({"lr": 1e-3}, {"weight_decay": 0.1}))


def broken_state(case, steps, path, value):
    state = snapshot(trained(case.but(options={**case.options, "lr": 0.5}), 0, steps)[1].state_dict())
    state["param_groups"][0].setdefault("maximize", False)
    return change(state, path, value)


@kinds
@pytest.mark.parametrize("name", BROKEN_STAGE_1)
def test_a_broken_state_of_stage_1_changes_nothing(kind, name):
    path, value, match = BROKEN_STAGE_1[name]
    case = broken_case(kind)
    assert_refused(case, 2, broken_state(case, 2, path, value), match)


@freezing_kinds
@pytest.mark.parametrize("name", BROKEN_STAGE_2)
@pytest.mark.parametrize("here", [2, 6])
def test_a_broken_state_of_stage_2_changes_nothing(kind, name, here):
    """Neither for an optimizer in stage 1 nor for one in stage 2."""
    path, value, match = BROKEN_STAGE_2[name]
    case = broken_case(kind)
    assert_refused(case, here, broken_state(case, 6, path, value), match)


def save_two_dtypes(rank, size, case, steps):
    params = case.parameters()
    params[1].data = params[1].data.bfloat16()
    optimizer = case.build(params, group())
    for step in range(1, steps + 1):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return snapshot(optimizer.state_dict())


def load_one_dtype(rank, size, case, states):
    params, optimizer = trained(case, rank, 6, group())
    before = snapshot(optimizer.state_dict())
    with pytest.raises(ValueError, match="dtype"):
        optimizer.load_state_dict(states[rank])
    assert same(snapshot(optimizer.state_dict()), before)
    run(case, rank, optimizer, params, 7, 8)


@kinds
def test_a_state_of_other_dtypes_changes_nothing(kind):
    """Saved with parameters in two dtypes, which lie in two flat states; here in one, so that E lies on other ranks."""
    case = broken_case(kind)
    run_ranks(2, load_one_dtype, case, run_ranks(2, save_two_dtypes, case, 6))


@kinds
def test_moments_fit_parameters_of_any_dtype(kind):
    case = broken_case(kind)
    (state,) = run_ranks(1, save_two_dtypes, case, 2)
    params = case.parameters()
    optimizer = case.build(params)
    optimizer.load_state_dict(state)
    loaded = snapshot(optimizer.state_dict()["state"])
    for p, own in state["state"].items():
        assert all(same(loaded[p][name], own[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


@kinds
def test_adamw_with_different_steps_changes_nothing(kind):
    case = Case(kind, missing=((2, 0, 1), (4, 0, 1)), options={"freeze_step": 3})
    _, adamw = adamw_run(case, 5)
    assert_refused(case, 2, adamw.state_dict(), r"different numbers of steps \(\[3, 5\]\)")


@kinds
def test_adamw_that_maximizes_changes_nothing(kind):
    case = Case(kind, options={"freeze_step": 3})
    _, adamw = adamw_run(case, 5, maximize=True)
    assert_refused(case, 2, adamw.state_dict(), "maximize")


@kinds
def test_no_state_at_all_changes_nothing(kind):
    assert_refused(broken_case(kind), 6, {}, "not a state of an optimizer")

"""state_dict and load_state_dict behave as those of any torch.optim.Optimizer: hooks, schedules, groups, copies."""

import pytest
import torch

from tests.onebit.checkpoint import states
from tests.onebit.checkpoint.states import AUTO, TWO_GROUPS, assert_go_on_alike, checkpoint, trained
from tests.onebit.runs import Case, bits, build, kinds, run, same, snapshot, take

FREEZE = {"freeze_step": 3}


@pytest.mark.parametrize(("kind", "steps"), [("OneBitAdam", 2), ("OneBitLamb", 6)])
def test_state_dict_hooks_run_in_order(kind, steps):
    """And may change or wrap the state: what a post hook returns is what the caller gets."""
    _, optimizer = trained(Case(kind, options=FREEZE), 0, steps)
    calls = []

    def after_save(own, state_dict):
        calls.append(("after save", state_dict["param_groups"][0]["onebit"]["steps"]))
        return {"wrapped": state_dict}

    def before_load(own, state_dict):
        calls.append(("before load", list(state_dict)))
        return state_dict["wrapped"]

    optimizer.register_state_dict_pre_hook(lambda own: calls.append(("before save", own is optimizer)))
    optimizer.register_state_dict_post_hook(after_save)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(lambda own: calls.append(("after load", len(own.state))))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state.keys() == {"wrapped"}
    assert calls == [("before save", True), ("after save", steps), ("before load", ["wrapped"]), ("after load", 4)]
    assert optimizer.compressing == (steps == 6)


@kinds
def test_loading_what_was_just_saved_changes_nothing(kind):
    """What Accelerate does at construction."""
    case = Case(kind, options=FREEZE, groups=TWO_GROUPS, dtype="bfloat16")
    for steps in (0, 2, 6):
        (params, optimizer), undisturbed = trained(case, 0, steps), trained(case, 0, steps)
        before = snapshot(optimizer.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        assert same(snapshot(optimizer.state_dict()), before)
        assert_go_on_alike(case, 0, (params, optimizer), undisturbed, steps + 1, steps + 4)


@pytest.mark.parametrize(("kind", "lr"), [("OneBitAdam", 1e-2), ("ZeroOneAdam", torch.tensor(1e-2))])
def test_a_learning_rate_schedule_continues(kind, lr):
    def schedule(optimizer, last_epoch=-1):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t), last_epoch=last_epoch)

    def steps(params, optimizer, scheduler, first, last):
        for step in range(first, last + 1):
            take(case, 0, optimizer, params, step)
            scheduler.step()

    case = Case(kind, options={**FREEZE, "lr": lr.clone() if isinstance(lr, torch.Tensor) else lr})
    params, optimizer = trained(case, 0, 0)
    scheduler = schedule(optimizer)
    steps(params, optimizer, scheduler, 1, 5)
    state, values = checkpoint(params, optimizer)
    kept = snapshot(state)
    again, other = states.resumed(case.but(options={**FREEZE, "lr": 0.7}), state, values)
    assert float(other.param_groups[0]["initial_lr"]) == pytest.approx(1e-2)
    steps(params, optimizer, scheduler, 6, 9)
    steps(again, other, schedule(other, last_epoch=4), 6, 9)
    assert bits(again) == bits(params)
    assert same(state, kept), "training changed the state that was loaded"


@pytest.mark.parametrize(("kind", "steps"), [("OneBitAdam", 6), ("OneBitLamb", 2), ("ZeroOneAdam", 6)])
def test_a_param_group_that_was_added_is_loaded(kind, steps):
    """Added, as in fine-tuning, after the optimizer was built and before it took a step."""
    case = Case(kind, options=FREEZE, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, steps)
    state = snapshot(optimizer.state_dict())
    again = states.other_parameters(case)
    states.set_parameters(again, params)
    other = build(kind, again[::2], lr=1e-2, block_size=64, chunks=1, **FREEZE)
    other.add_param_group({"params": again[1::2]})
    other.load_state_dict(state)
    assert same(snapshot(other.state_dict()), state)
    assert_go_on_alike(case, 0, (params, optimizer), (again, other), steps + 1, steps + 2)


@kinds
def test_parameters_that_do_not_train_have_no_state(kind):
    case = Case(kind, options=FREEZE, dtype="bfloat16")

    def built():
        params = case.parameters()
        params[1].requires_grad_(False)
        return params, case.build(params)

    (params, optimizer), (again, other) = built(), built()
    run(case, 0, optimizer, params, 1, 6)
    state, values = checkpoint(params, optimizer)
    kept = snapshot(state)
    assert sorted(state["state"]) == [0, 2, 3]
    states.set_parameters(again, values)
    other.load_state_dict(state)
    assert_go_on_alike(case, 0, (params, optimizer), (again, other), 7, 8)
    assert same(state, kept), "training changed the state that was loaded"


def test_momentum_in_a_state_is_a_copy():
    """The messages it lies in are written over by the next step."""
    params, optimizer = trained(Case(options=FREEZE), 0, 6)
    state = optimizer.state_dict()["state"]
    before = snapshot(state)
    run(Case(options=FREEZE), 0, optimizer, params, 7, 8)
    for p, own in state.items():
        assert all(same(own[name], before[p][name]) for name in ("momentum_bits", "momentum_scales", "step"))
    assert not same(optimizer.state_dict()["state"][3]["momentum_bits"], before[3]["momentum_bits"])


@pytest.mark.parametrize("there", [2, 3, 5, 9])
@pytest.mark.parametrize(("kind", "options"), [("OneBitAdam", AUTO), ("OneBitLamb", FREEZE)], ids=str)
def test_loading_a_state_of_before_the_freeze_continues_from_it(kind, options, there):
    """As after a spike of the loss: flags of the last step that were not read yet are dropped."""
    case = Case(kind, options=options)
    params, optimizer = trained(case, 0, 2)
    state = snapshot(optimizer.state_dict())
    again, other = trained(case.but(seed=1), 0, there)
    states.set_parameters(again, params)
    other.load_state_dict(state)
    assert not other.compressing
    coefficients = {name for name in state["state"][0] if name.startswith("coeff")}
    assert set(other.state[again[0]]) == {"step", "exp_avg", "exp_avg_sq"} | coefficients
    assert_go_on_alike(case, 0, (params, optimizer), (again, other), 3, 10)
    assert optimizer.compressing

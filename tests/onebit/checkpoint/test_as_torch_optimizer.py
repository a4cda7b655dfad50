"""state_dict and load_state_dict behave as those of any torch.optim.Optimizer: hooks, schedules, groups, copies."""

import pytest
import torch

from tests.onebit.checkpoint.states import AUTO, TWO_GROUPS, other_parameters, set_parameters, trained
from tests.onebit.runs import Case, bits, build, freezing_kinds, kinds, run, same, snapshot, take


@kinds
@pytest.mark.parametrize("steps", [2, 6])
def test_state_dict_hooks_run_in_order(kind, steps):
    case = Case(kind, options={"freeze_step": 3})
    _, optimizer = trained(case, 0, steps)
    calls = []

    def before_save(own):
        calls.append(("before save", own is optimizer))

    def after_save(own, state_dict):
        calls.append(("after save", state_dict["param_groups"][0]["onebit"]["steps"]))
        return {**state_dict, "note": 7}

    def before_load(own, state_dict):
        calls.append(("before load", state_dict["note"]))
        return {k: v for k, v in state_dict.items() if k != "note"}

    def after_load(own):
        calls.append(("after load", len(own.state)))

    optimizer.register_state_dict_pre_hook(before_save)
    optimizer.register_state_dict_post_hook(after_save)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(after_load)
    state = optimizer.state_dict()
    assert state["note"] == 7
    optimizer.load_state_dict(state)
    assert state["note"] == 7
    assert calls == [("before save", True), ("after save", steps), ("before load", 7), ("after load", 4)]


@kinds
def test_a_hook_may_wrap_the_state(kind):
    """As torch's own state_dict: what a post hook returns is what the caller gets."""
    _, optimizer = trained(Case(kind, options={"freeze_step": 3}), 0, 5)
    optimizer.register_state_dict_post_hook(lambda own, state_dict: {"wrapped": state_dict})
    optimizer.register_load_state_dict_pre_hook(lambda own, state_dict: state_dict["wrapped"])
    state = optimizer.state_dict()
    assert state.keys() == {"wrapped"}
    assert state["wrapped"]["param_groups"][0]["onebit"]["steps"] == 5
    optimizer.load_state_dict(state)
    assert optimizer.compressing


@kinds
@pytest.mark.parametrize("steps", [0, 2, 6])
def test_loading_what_was_just_saved_changes_nothing(kind, steps):
    """What Accelerate does at construction."""
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS, dtype="bfloat16")
    params, optimizer = trained(case, 0, steps)
    others, undisturbed = trained(case, 0, steps)
    before = snapshot(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert same(snapshot(optimizer.state_dict()), before)
    run(case, 0, optimizer, params, steps + 1, steps + 4)
    run(case, 0, undisturbed, others, steps + 1, steps + 4)
    assert bits(params) == bits(others)
    assert same(snapshot(optimizer.state_dict()), snapshot(undisturbed.state_dict()))


def scheduled_steps(case, optimizer, params, scheduler, first, last):
    for step in range(first, last + 1):
        take(case, 0, optimizer, params, step)
        scheduler.step()


@kinds
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
def test_a_learning_rate_schedule_continues(kind, lr):
    case = Case(kind, options={"freeze_step": 3, "lr": lr.clone() if isinstance(lr, torch.Tensor) else lr})
    params = case.parameters()
    optimizer = case.build(params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    scheduled_steps(case, optimizer, params, scheduler, 1, 5)
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    scheduled_steps(case, optimizer, params, scheduler, 6, 9)

    other = case.but(options={"freeze_step": 3, "lr": 0.7})
    again = other_parameters(case)
    set_parameters(again, values)
    resumed = other.build(again)
    kept = snapshot(state)
    resumed.load_state_dict(state)
    assert float(resumed.param_groups[0]["initial_lr"]) == pytest.approx(1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(resumed, lambda t: 1 / (1 + t), last_epoch=4)
    scheduled_steps(case, resumed, again, scheduler, 6, 9)
    assert bits(again) == bits(params)
    assert same(state, kept), "training changed the state that was loaded"


@kinds
def test_a_param_group_that_was_added_is_loaded(kind):
    """Added, as in fine-tuning, after the optimizer was built and before it took a step."""
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    for steps in (2, 6):
        params, optimizer = trained(case, 0, steps)
        state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
        run(case, 0, optimizer, params, steps + 1, steps + 2)
        again = other_parameters(case)
        set_parameters(again, values)
        options = {"lr": 1e-2, "block_size": 64, "chunks": 1, **case.options}
        resumed = build(kind, again[::2], **options)
        resumed.add_param_group({"params": again[1::2]})
        resumed.load_state_dict(state)
        assert same(snapshot(resumed.state_dict()), state)
        run(case, 0, resumed, again, steps + 1, steps + 2)
        assert bits(again) == bits(params)


@kinds
def test_parameters_that_do_not_train_have_no_state(kind):
    case = Case(kind, options={"freeze_step": 3})

    def built():
        params = case.parameters()
        params[1].requires_grad_(False)
        return params, case.build(params)

    params, optimizer = built()
    run(case, 0, optimizer, params, 1, 6)
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    assert sorted(state["state"]) == [0, 2, 3]
    run(case, 0, optimizer, params, 7, 8)
    again, resumed = built()
    set_parameters(again, values)
    resumed.load_state_dict(state)
    run(case, 0, resumed, again, 7, 8)
    assert bits(again) == bits(params)


@kinds
def test_momentum_in_a_state_is_a_copy(kind):
    """The messages it lies in are written over by the next step."""
    case = Case(kind, options={"freeze_step": 3})
    params, optimizer = trained(case, 0, 6)
    state = optimizer.state_dict()
    names = ("momentum_bits", "momentum_scales", "step")
    before = snapshot([[own[name] for name in names] for own in state["state"].values()])
    run(case, 0, optimizer, params, 7, 8)
    assert same([[own[name] for name in names] for own in state["state"].values()], before)
    assert not same(snapshot(optimizer.state_dict())["state"][3]["momentum_bits"], before[3][0])


@kinds
def test_what_was_loaded_is_not_shared(kind):
    """Two optimizers, one state: neither trains the other, nor the state."""
    case = Case(kind, options={"freeze_step": 3}, dtype="bfloat16")
    for steps in (2, 6):
        state = snapshot(trained(case, 0, steps)[1].state_dict())
        kept = snapshot(state)
        params = case.parameters()
        optimizer = case.build(params)
        optimizer.load_state_dict(state)
        run(case, 0, optimizer, params, steps + 1, steps + 3)
        assert same(state, kept)


@freezing_kinds
@pytest.mark.parametrize("options", [{"freeze_step": 3}, AUTO])
@pytest.mark.parametrize("there", [2, 3, 5, 9])
def test_loading_an_earlier_state_continues_from_it(kind, options, there):
    """As after a spike of the loss: flags of the last step that were not read yet are dropped."""
    case = Case(kind, options=options)
    params, optimizer = trained(case, 0, 2)
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(case, 0, optimizer, params, 3, 10)
    assert optimizer.compressing
    again, resumed = trained(case.but(seed=1), 0, there)
    set_parameters(again, values)
    resumed.load_state_dict(state)
    assert not resumed.compressing
    assert set(resumed.state[again[0]]) == {"step", "exp_avg", "exp_avg_sq"} | {
        n for n in state["state"][0] if n.startswith("coeff")
    }
    run(case, 0, resumed, again, 3, 10)
    assert bits(again) == bits(params)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))

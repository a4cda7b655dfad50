"""state_dict and load_state_dict behave as those of any torch.optim.Optimizer: hooks, schedules, groups, copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.onebit.checkpoint.states import AUTO, TWO_GROUPS, other_parameters, set_parameters, trained
from tests.onebit.runs import Case, bits, build, kinds, run, same, snapshot, take


@pytest.mark.parametrize(("kind", "steps"), [("OneBitAdam", 2), ("OneBitLamb", 6)])
def test_state_dict_hooks_run_in_order(kind: str, steps: int) -> None:
    """And may change or wrap the state: what a post hook returns is what the caller gets."""
    _, optimizer = trained(Case(kind, options={"freeze_step": 3}), 0, steps)
    calls = []

    def before_save(own: Any) -> None:
        calls.append(("before save", own is optimizer))

    def after_save(own: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append(("after save", state_dict["param_groups"][0]["onebit"]["steps"]))
        return {"wrapped": state_dict}

    def before_load(own: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append(("before load", list(state_dict)))
        return state_dict["wrapped"]

    def after_load(own: Any) -> None:
        calls.append(("after load", len(own.state)))

    optimizer.register_state_dict_pre_hook(before_save)
    optimizer.register_state_dict_post_hook(after_save)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(after_load)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state.keys() == {"wrapped"}
    assert calls == [("before save", True), ("after save", steps), ("before load", ["wrapped"]), ("after load", 4)]
    assert optimizer.compressing == (steps == 6)


@kinds
def test_loading_what_was_just_saved_changes_nothing(kind: str) -> None:
    """What Accelerate does at construction."""
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS, dtype="bfloat16")
    for steps in (0, 2, 6):
        params, optimizer = trained(case, 0, steps)
        others, undisturbed = trained(case, 0, steps)
        before = snapshot(optimizer.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        assert same(snapshot(optimizer.state_dict()), before)
        run(case, 0, optimizer, params, steps + 1, steps + 4)
        run(case, 0, undisturbed, others, steps + 1, steps + 4)
        assert bits(params) == bits(others)
        assert same(snapshot(optimizer.state_dict()), snapshot(undisturbed.state_dict()))


@pytest.mark.parametrize(("kind", "lr"), [("OneBitAdam", 1e-2), ("ZeroOneAdam", torch.tensor(1e-2))])
def test_a_learning_rate_schedule_continues(kind: str, lr: Any) -> None:

    def schedule(optimizer: Any, last_epoch: int = -1) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t), last_epoch=last_epoch)

    def steps(optimizer: Any, params: Any, scheduler: Any, first: int, last: int) -> None:
        for step in range(first, last + 1):
            take(case, 0, optimizer, params, step)
            scheduler.step()

    case = Case(kind, options={"freeze_step": 3, "lr": lr.clone() if isinstance(lr, torch.Tensor) else lr})
    params = case.parameters()
    optimizer = case.build(params)
    scheduler = schedule(optimizer)
    steps(optimizer, params, scheduler, 1, 5)
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    again = other_parameters(case)
    set_parameters(again, values)
    resumed = case.but(options={"freeze_step": 3, "lr": 0.7}).build(again)
    kept = snapshot(state)
    resumed.load_state_dict(state)
    assert float(resumed.param_groups[0]["initial_lr"]) == pytest.approx(1e-2)
    steps(optimizer, params, scheduler, 6, 9)
    steps(resumed, again, schedule(resumed, last_epoch=4), 6, 9)
    assert bits(again) == bits(params)
    assert same(state, kept), "training changed the state that was loaded"


@pytest.mark.parametrize(("kind", "steps"), [("OneBitAdam", 6), ("OneBitLamb", 2), ("ZeroOneAdam", 6)])
def test_a_param_group_that_was_added_is_loaded(kind: str, steps: int) -> None:
    """Added, as in fine-tuning, after the optimizer was built and before it took a step."""
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, steps)
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(case, 0, optimizer, params, steps + 1, steps + 2)
    again = other_parameters(case)
    set_parameters(again, values)
    resumed = build(kind, again[::2], **{"lr": 1e-2, "block_size": 64, "chunks": 1, **case.options})
    resumed.add_param_group({"params": again[1::2]})
    resumed.load_state_dict(state)
    assert same(snapshot(resumed.state_dict()), state)
    run(case, 0, resumed, again, steps + 1, steps + 2)
    assert bits(again) == bits(params)


@kinds
def test_parameters_that_do_not_train_have_no_state(kind: str) -> None:
    case = Case(kind, options={"freeze_step": 3}, dtype="bfloat16")

    def built() -> tuple[Any, Any]:
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
    kept = snapshot(state)
    resumed.load_state_dict(state)
    run(case, 0, resumed, again, 7, 8)
    assert bits(again) == bits(params)
    assert same(state, kept), "training changed the state that was loaded"


def test_momentum_in_a_state_is_a_copy() -> None:
    """The messages it lies in are written over by the next step."""
    case = Case(options={"freeze_step": 3})
    params, optimizer = trained(case, 0, 6)
    state = optimizer.state_dict()
    names = ("momentum_bits", "momentum_scales", "step")
    before = snapshot([[own[name] for name in names] for own in state["state"].values()])
    run(case, 0, optimizer, params, 7, 8)
    assert same([[own[name] for name in names] for own in state["state"].values()], before)
    assert not same(snapshot(optimizer.state_dict())["state"][3]["momentum_bits"], before[3][0])


@pytest.mark.parametrize("there", [2, 3, 5, 9])
@pytest.mark.parametrize(("kind", "options"), [("OneBitAdam", AUTO), ("OneBitLamb", {"freeze_step": 3})], ids=str)
def test_loading_a_state_of_before_the_freeze_continues_from_it(kind: str, options: Any, there: int) -> None:
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

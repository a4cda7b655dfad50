"""What torch asks of every optimizer, in both stages: hooks, closures, schedulers, groups, names, states."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import onebit
from tests.onebit.optim import contract
from tests.onebit.optim.contract import give
from tests.onebit.runs import OPTIMIZERS, Case, bits, build, run, same, snapshot, take

STAGES = {"stage 1": 50, "stage 2": 2}  # freeze_step
both = pytest.mark.parametrize(
    ("kind", "stage"), [("OneBitAdam", "stage 1"), *((kind, "stage 2") for kind in OPTIMIZERS)]
)
START = 4  # steps after which a test begins
GROUPS = ({}, {"lr": 3e-3, "weight_decay": 0.1})


def case_of(kind: str, stage: str, **options: Any) -> Case:
    return Case(kind, options={"freeze_step": STAGES[stage], **options})


def started(case: Case) -> tuple[list[nn.Parameter], Any]:
    """After `START` steps, in the stage that is to be tested."""
    params, optimizer = contract.started(case, START)
    assert optimizer.compressing == (case.options["freeze_step"] < START)
    return params, optimizer


def loaded(case: Case, state: Any, params: list[nn.Parameter]) -> tuple[list[nn.Parameter], Any]:
    """A copy of the parameters, whose optimizer has the state."""
    again = copy.deepcopy(params)
    other = case.build(again)
    other.load_state_dict(state)
    return again, other


def twice(case: Case) -> tuple[list[nn.Parameter], Any, list[nn.Parameter], Any]:
    return (*started(case), *started(case))


def loss_of(params: list[nn.Parameter], power: int = 2) -> Tensor:
    return sum((p.pow(power).sum() for p in params), torch.zeros(()))


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Hooks and the step


@both
def test_step_hooks_run_in_torchs_order_and_may_change_gradients_and_arguments(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, optimizer, others, other = twice(case)
    called: list[str] = []

    def halve(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        called.append("before")
        for p in params:
            p.grad.mul_(0.5)
        return (args[0], lambda: 7.0), {}

    handles = [
        register_optimizer_step_pre_hook(lambda own, *_: called.append(f"any before {own is optimizer}")),
        register_optimizer_step_post_hook(lambda own, *_: called.append(f"any after {own is optimizer}")),
        optimizer.register_step_pre_hook(halve),
        optimizer.register_step_post_hook(lambda own, *_: called.append(f"after {own is optimizer}")),
    ]
    give(case, params, START + 1)
    give(case, others, START + 1)
    try:
        assert optimizer.step(lambda: 3.0) == 7.0
        assert called == ["any before True", "before", "after True", "any after True"]
    finally:
        for handle in handles:
            handle.remove()
    for p in others:
        p.grad.mul_(0.5)
    other.step()
    run(case, 0, optimizer, params, START + 2, START + 2)
    run(case, 0, other, others, START + 2, START + 2)
    assert len(called) == 4 and bits(params) == bits(others)


def test_a_profile_names_the_step_as_torch_does() -> None:
    _, optimizer = started(case_of("OneBitAdam", "stage 1"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#OneBitAdam.step", "Optimizer.zero_grad#OneBitAdam.zero_grad"} <= names


@both
def test_gradients_on_or_off_around_a_step_change_nothing(kind: str, stage: str) -> None:
    case, ends = case_of(kind, stage), set()
    for mode in (torch.no_grad, torch.enable_grad):
        params, optimizer = started(case)
        with mode():
            run(case, 0, optimizer, params, START + 1, START + 2)
            optimizer.load_state_dict(snapshot(optimizer.state_dict()))
            run(case, 0, optimizer, params, START + 3, START + 4)
            assert torch.is_grad_enabled() == (mode is torch.enable_grad)
        assert all(p.requires_grad and p.is_leaf for p in params)
        ends.add(bits(params))
    assert len(ends) == 1


@both
def test_a_closure_is_called_once_a_step_and_its_loss_is_returned(kind: str, stage: str) -> None:
    params, optimizer, others, other = twice(case_of(kind, stage))
    calls: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        calls.append(loss.item())
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == calls[0]
    assert len(calls) == 1
    for p in others:
        p.grad = 2 * p.detach()
    assert other.step() is None
    assert bits(params) == bits(others)


@both
def test_gradients_of_zero_and_none_and_those_with_a_graph_are_gradients(kind: str, stage: str) -> None:
    params, optimizer, others, other = twice(case_of(kind, stage))
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    other.zero_grad()
    assert all(p.grad is None for p in others)
    for own, each in ((params, optimizer), (others, other)):
        loss_of(own).backward()
        each.step()
    assert bits(params) == bits(others)
    for own, each, graph in ((params, optimizer, True), (others, other, False)):
        for p, g in zip(own, torch.autograd.grad(loss_of(own, 3), own, create_graph=graph), strict=True):
            p.grad = g
        each.step()
    assert all(p.grad.requires_grad for p in params)
    assert bits(params) == bits(others)


@both
def test_a_step_keeps_no_gradient_alive(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    for clip in (False, True):
        give(case, params, START + 1 + clip)
        found = [weakref.ref(p.grad) for p in params]
        if clip:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert [ref() for ref in found] == [None] * len(params)


@both
def test_scalars_and_empty_parameters(kind: str, stage: str) -> None:
    """A state has them in their shapes, which AdamW needs too."""
    params = [nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(1, 1, 1))]
    optimizer = (case := case_of(kind, stage)).build(params)
    for _ in range(START):
        optimizer.zero_grad()
        loss_of(params).backward()
        optimizer.step()
    assert params[0].shape == () and float(params[0].detach()) < 2
    theirs = copy.deepcopy(params)
    again, other = loaded(case, snapshot(optimizer.state_dict()), params)
    assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict()))
    adamw = torch.optim.AdamW(theirs)
    adamw.load_state_dict(onebit.adamw_state(optimizer.state_dict()))
    for own, each in ((params, optimizer), (again, other), (theirs, adamw)):
        each.zero_grad()
        loss_of(own).backward()
        each.step()
    assert bits(params) == bits(again)
    assert [adamw.state[p]["exp_avg"].shape for p in theirs] == [p.shape for p in params]


# Schedulers and param groups

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=12),  # betas too
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.3),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, T_max=6)], milestones=[3]
    ),
}


@pytest.mark.parametrize(
    ("name", "kind", "stage"),
    [*((name, "OneBitAdam", "stage 2") for name in SCHEDULES), ("OneCycleLR", "OneBitLamb", "stage 1"),
     ("OneCycleLR", "OneBitLamb", "stage 2"), ("OneCycleLR", "ZeroOneAdam", "stage 2")],
)  # fmt: skip
def test_a_scheduler_sets_what_it_sets_for_adamw_and_steps_use_it(name: str, kind: str, stage: str) -> None:
    """The same numbers, written into the groups of another run by hand, give the same bits."""
    case = case_of(kind, stage).but(groups=GROUPS)
    params, others, theirs = (case.parameters() for _ in range(3))
    optimizer, by_hand = case.build(params), case.build(others)
    adamw = torch.optim.AdamW([{"params": theirs[::2]}, {"params": theirs[1::2], "lr": 3e-3}], lr=1e-2)
    schedulers = [SCHEDULES[name](o) for o in (optimizer, adamw)]
    for step in range(9):
        for mine, hers, hand in zip(optimizer.param_groups, adamw.param_groups, by_hand.param_groups, strict=True):
            assert (mine["lr"], mine["betas"]) == (hers["lr"], hers["betas"])
            hand["lr"], hand["betas"] = mine["lr"], mine["betas"]
        for own, each in ((params, optimizer), (others, by_hand), (theirs, adamw)):
            take(case, 0, each, own, step + 1)
        for each in schedulers:
            each.step(*([1.0 + step] if name == "ReduceLROnPlateau" else []))
    assert bits(params) == bits(others)


@both
def test_rates_and_betas_that_are_tensors(kind: str, stage: str) -> None:
    """A scheduler writes into the rate; what is written into either holds from the next step on; a state has it."""
    rate, betas = (torch.tensor(x, dtype=torch.float64) for x in (1e-2, 0.9)), (0.9, 0.99)
    lr, beta1 = rate
    case, plain = case_of(kind, stage, lr=lr, betas=(beta1, 0.99)), case_of(kind, stage, betas=betas)
    params, optimizer = started(case)
    others, other = started(plain)
    beta1.fill_(0.5)
    other.param_groups[0]["betas"] = (0.5, 0.99)
    schedules = [lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, other)]
    for step in range(START + 1, START + 4):
        take(case, 0, optimizer, params, step)
        take(plain, 0, other, others, step)
        for each in schedules:
            each.step()
    assert optimizer.param_groups[0]["lr"] is lr and float(lr) == pytest.approx(1e-2 / 8)
    assert bits(params) == bits(others)
    again, resumed = loaded(plain, through_a_file(optimizer.state_dict()), params)
    run(case, 0, optimizer, params, START + 4, START + 5)
    run(case, 0, resumed, again, START + 4, START + 5)
    assert bits(params) == bits(again)


def test_betas_that_are_no_numbers_on_the_host() -> None:
    wrong = (torch.tensor([0.9, 0.9]), "each of one number"), (torch.empty((), device="meta"), "on meta.*would wait")
    for beta, why in wrong:
        with pytest.raises(ValueError, match=f"betas.*{why}"):
            build("OneBitAdam", betas=(beta, 0.9))
        optimizer = build("OneBitAdam")
        before = bits(optimizer.param_groups[0]["params"])
        optimizer.param_groups[0]["betas"] = (beta, 0.9)
        with pytest.raises(ValueError, match=f"betas.*{why}"):
            optimizer.step()
        assert bits(optimizer.param_groups[0]["params"]) == before
    with pytest.raises(ValueError, match="below 1"):
        build("OneBitAdam", betas=(torch.tensor(1.5), 0.9))


@both
def test_what_is_written_to_a_group_holds_from_the_next_step_on(kind: str, stage: str) -> None:
    """As in a new optimizer that was built with it. 1-bit Adam has frozen what eps is in."""
    case = case_of(kind, stage).but(groups=GROUPS)
    for change in ({"lr": 1e-3}, {"weight_decay": 0.3}, {"eps": 1e-3}, {"betas": [0.5, 0.9]}):
        params, optimizer, others, plain = twice(case)
        state = snapshot(optimizer.state_dict())
        state["param_groups"][0].update(change)
        again, resumed = loaded(contract.options(case, **change), state, params)
        optimizer.param_groups[0].update(change)
        for own, each in ((params, optimizer), (again, resumed), (others, plain)):
            run(case, 0, each, own, START + 1, START + 3)
        assert bits(params) == bits(again)
        frozen = stage == "stage 2" and kind == "OneBitAdam" and "eps" in change
        assert (bits(params[::2]) != bits(others[::2])) != frozen
        assert bits(params[1::2]) == bits(others[1::2])


@both
def test_a_group_without_a_learning_rate_does_not_move(kind: str, stage: str) -> None:
    case = case_of(kind, stage).but(groups=({}, {"lr": 0.0, "weight_decay": 0.1}))
    before, (params, _) = case.parameters(), started(case)
    assert bits(params[1::2]) == bits(before[1::2])
    assert bits(params[::2]) != bits(before[::2])


# Names and copies


@both
def test_named_parameters_train_and_load_as_others(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, others = case.parameters(), case.parameters()
    names = ["0.weight", "0.bias", "scale", "last"]
    given = (list(zip(names, params, strict=True)), others)
    named, plain = (build(kind, own, lr=1e-2, freeze_step=STAGES[stage]) for own in given)
    runs = ((named, params), (plain, others))
    for optimizer, own in runs:
        run(case, 0, optimizer, own, 1, START)
    assert named.state_dict()["param_groups"][0]["param_names"] == names
    assert list(named.diagnostics()) == names
    states = [snapshot(o.state_dict()) for o in (named, plain)]
    plain.load_state_dict(states[0])
    named.load_state_dict(states[1])
    assert named.param_groups[0]["param_names"] == names
    for optimizer, own in runs:
        run(case, 0, optimizer, own, START + 1, START + 2)
    assert bits(params) == bits(others)


def test_errors_call_named_parameters_by_their_names() -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"with/without names"):
        build("OneBitAdam", [("a", next(net.parameters())), nn.Parameter(torch.ones(2))])
    optimizer = build("OneBitAdam", net.named_parameters())
    with pytest.raises(ValueError, match=r"with/without names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1
    net[1].weight.grad = torch.ones(2, 3).to_sparse()
    with pytest.raises(ValueError, match=r"gradient of parameter 1\.weight"):
        optimizer.step()


def test_what_an_optimizer_shows_of_itself_and_that_it_is_not_copied() -> None:
    optimizer = build("OneBitAdam", lr=0.25)
    for part in ("OneBitAdam", "Parameter Group 0", "lr: 0.25", "betas: (0.9, 0.999)", "weight_decay: 0.0"):
        assert part in repr(optimizer)
    for what in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"can't be copied or pickled.*state_dict"):
            what(optimizer)


# States


@both
def test_a_state_has_torchs_shape_and_travels_by_a_file(kind: str, stage: str) -> None:
    case = case_of(kind, stage).but(groups=GROUPS)
    params, optimizer = started(case)
    state, theirs = optimizer.state_dict(), torch.optim.AdamW(params).state_dict()
    assert list(state) == list(theirs)
    assert [g["params"] for g in state["param_groups"]] == [[0, 1], [2, 3]]
    assert list(state["state"]) == [0, 1, 2, 3]
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25, eps=1e-4, betas=(0.5, 0.9))
    again, other = loaded(case, through_a_file(optimizer.state_dict()), params)
    assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict()))
    for name in ("lr", "weight_decay", "eps", "betas"):
        assert other.param_groups[0][name] == optimizer.param_groups[0][name]
    run(case, 0, optimizer, params, START + 1, START + 3)
    run(case, 0, other, again, START + 1, START + 3)
    assert bits(params) == bits(again)
    other.param_groups[0]["lr"] = 1.0
    assert optimizer.param_groups[0]["lr"] == 0.5


@both
def test_moments_of_another_dtype_are_cast(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    for dtype in (torch.float64, torch.bfloat16):
        state = snapshot(optimizer.state_dict())
        for own in state["state"].values():
            own |= {k: v.to(dtype) for k, v in own.items() if v.is_floating_point() and k != "step"}
        again, other = loaded(case, state, params)
        cast = other.state_dict()["state"]
        for key, own in optimizer.state_dict()["state"].items():
            for name, value in own.items():
                exact = name == "step" or not value.is_floating_point()
                assert cast[key][name].dtype == value.dtype
                assert torch.equal(cast[key][name], value if exact else value.to(dtype).to(value.dtype))
        take(case, 0, other, again, START + 1)


def test_a_load_that_fails_changes_nothing() -> None:
    _, optimizer = started(case_of("OneBitAdam", "stage 1"))
    before = snapshot(optimizer.state_dict())
    for name, value in (("betas", (0.9, 1.5)), ("lr", -1.0), ("eps", float("nan")), ("eps", None)):
        state = snapshot(before)
        state["param_groups"][0][name] = value
        if value is None:
            del state["param_groups"][0][name]
        with pytest.raises(ValueError, match=name if value else "param group 0 of the state has no eps"):
            optimizer.load_state_dict(state)
        assert same(before, snapshot(optimizer.state_dict()))

"""What torch asks of every optimizer, in both stages: hooks, closures, schedulers, groups, states, errors."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import onebit
from tests.onebit.runs import OPTIMIZERS, Case, assert_message, bits, build, kinds, run, same, snapshot, take

STAGES = {"stage 1": 50, "stage 2": 2}  # freeze_step
both = pytest.mark.parametrize(("kind", "stage"), [(kind, stage) for kind in OPTIMIZERS for stage in STAGES])
START = 4  # steps after which a test begins


def case_of(kind: str, stage: str, **options: Any) -> Case:
    return Case(kind, options={"freeze_step": STAGES[stage], **options})


def started(case: Case) -> tuple[list[nn.Parameter], Any]:
    """After `START` steps, in the stage that is to be tested."""
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, START)
    assert optimizer.compressing == (case.options["freeze_step"] < START)
    return params, optimizer


def give(case: Case, params: list[nn.Parameter], step: int) -> None:
    """The gradients of a step."""
    for p, g in zip(params, case.gradients(0, step), strict=True):
        p.grad = g


# Hooks


@both
def test_step_hooks_run_in_torchs_order_and_once_each(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    called: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        def hook(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert own is optimizer
            called.append(name)

        return hook

    handles = [
        register_optimizer_step_pre_hook(noting("any before")),
        register_optimizer_step_post_hook(noting("any after")),
        optimizer.register_step_pre_hook(noting("before")),
        optimizer.register_step_post_hook(noting("after")),
    ]
    try:
        take(case, 0, optimizer, params, START + 1)
        assert called == ["any before", "before", "after", "any after"]
    finally:
        for handle in handles:
            handle.remove()
    take(case, 0, optimizer, params, START + 2)
    assert len(called) == 4


@both
def test_a_hook_before_the_step_may_change_gradients_and_arguments(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    others, other = started(case)

    def halve(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for p in params:
            p.grad.mul_(0.5)
        return (args[0], lambda: 7.0), {}

    optimizer.register_step_pre_hook(halve)
    give(case, params, START + 1)
    assert optimizer.step(lambda: 3.0) == 7.0
    give(case, others, START + 1)
    for p in others:
        p.grad.mul_(0.5)
    other.step()
    assert bits(params) == bits(others)


@kinds
def test_a_profile_names_the_step_as_torch_does(kind: str) -> None:
    case = case_of(kind, "stage 1")
    params, optimizer = started(case)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take(case, 0, optimizer, params, START + 1)
        optimizer.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert {f"Optimizer.step#{kind}.step", f"Optimizer.zero_grad#{kind}.zero_grad"} <= names


# The step


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_gradients_on_or_off_around_a_step_change_nothing(kind: str, stage: str, mode: Any) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    others, other = started(case)
    run(case, 0, other, others, START + 1, START + 2)
    with mode():
        run(case, 0, optimizer, params, START + 1, START + 2)
        state = snapshot(optimizer.state_dict())
        optimizer.load_state_dict(state)
        run(case, 0, optimizer, params, START + 3, START + 4)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    run(case, 0, other, others, START + 3, START + 4)
    assert bits(params) == bits(others)
    assert all(p.requires_grad and p.is_leaf for p in params)


@both
def test_a_closure_is_called_once_a_step_and_its_loss_is_returned(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    others, other = started(case)
    calls: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in params), torch.zeros(()))
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
def test_zero_grad_either_way_goes_on_alike(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    others, other = started(case)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    other.zero_grad()
    assert all(p.grad is None for p in others)
    for own in (params, others):
        sum((p.exp().sum() for p in own), torch.zeros(())).backward()
    optimizer.step()
    other.step()
    assert bits(params) == bits(others)


@both
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_keeps_no_gradient_alive(kind: str, stage: str, clip: bool) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    give(case, params, START + 1)
    found = [weakref.ref(p.grad) for p in params]
    if clip:
        optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert [ref() for ref in found] == [None] * len(params)


@both
def test_gradients_that_have_a_graph_of_their_own(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    others, other = started(case)
    for own, graph in ((params, True), (others, False)):
        for p in own:
            p.grad = None
        loss = sum((p.pow(3).sum() for p in own), torch.zeros(()))
        grads = torch.autograd.grad(loss, own, create_graph=graph)
        for p, g in zip(own, grads, strict=True):
            p.grad = g
    assert all(p.grad is not None and p.grad.requires_grad for p in params)
    optimizer.step()
    other.step()
    assert bits(params) == bits(others)


@both
def test_scalars_and_empty_parameters(kind: str, stage: str) -> None:
    """A state has them in their shapes, which AdamW needs too."""
    params = [nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(1, 1, 1))]
    optimizer = build(kind, params, lr=1e-2, freeze_step=STAGES[stage])
    for _ in range(START):
        sum((p.square().sum() for p in params), torch.zeros(())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert params[0].shape == () and float(params[0].detach()) < 2
    again, theirs = copy.deepcopy(params), copy.deepcopy(params)
    other = build(kind, again, lr=1e-2, freeze_step=STAGES[stage])
    other.load_state_dict(optimizer.state_dict())
    adamw = torch.optim.AdamW(theirs)
    adamw.load_state_dict(onebit.adamw_state(optimizer.state_dict()))
    for own, each in ((params, optimizer), (again, other), (theirs, adamw)):
        sum((p.square().sum() for p in own), torch.zeros(())).backward()
        each.step()
    assert bits(params) == bits(again)
    assert [adamw.state[p]["exp_avg"].shape for p in theirs] == [p.shape for p in params]


# Schedulers

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=12),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.3),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, T_max=6)], milestones=[3]
    ),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.8),
}
GROUPS = ({}, {"lr": 3e-3, "weight_decay": 0.1})


def advance(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0 + step)
    else:
        scheduler.step()


@both
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_sets_what_it_sets_for_adamw_and_steps_use_it(kind: str, stage: str, name: str) -> None:
    """The same numbers, written into the groups of another run by hand, give the same bits."""
    case = case_of(kind, stage).but(groups=GROUPS)
    params, others, theirs = (case.parameters() for _ in range(3))
    optimizer, by_hand = case.build(params), case.build(others)
    adamw = torch.optim.AdamW([{"params": theirs[::2]}, {"params": theirs[1::2], "lr": 3e-3}], lr=1e-2)
    scheduler, reference = SCHEDULES[name](optimizer), SCHEDULES[name](adamw)
    for group, scheduled in zip(by_hand.param_groups, optimizer.param_groups, strict=True):
        group["lr"], group["betas"] = scheduled["lr"], scheduled["betas"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 9):
            take(case, 0, optimizer, params, step)
            take(case, 0, by_hand, others, step)
            take(case, 0, adamw, theirs, step)
            advance(scheduler, step)
            advance(reference, step)
            for mine, hers, hand in zip(optimizer.param_groups, adamw.param_groups, by_hand.param_groups, strict=True):
                assert (mine["lr"], mine["betas"]) == (hers["lr"], hers["betas"])
                hand["lr"], hand["betas"] = mine["lr"], mine["betas"]
    assert bits(params) == bits(others)


@both
def test_a_scheduler_changes_a_learning_rate_that_is_a_tensor(kind: str, stage: str) -> None:
    case = case_of(kind, stage, lr=torch.tensor(1e-2, dtype=torch.float64))
    params, optimizer = started(case)
    others, other = started(case_of(kind, stage))
    rate = optimizer.param_groups[0]["lr"]
    one, two = (lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, other))
    for step in range(START + 1, START + 4):
        take(case, 0, optimizer, params, step)
        take(case, 0, other, others, step)
        one.step()
        two.step()
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(1e-2 / 8)
    assert bits(params) == bits(others)


# Param groups


@both
@pytest.mark.parametrize(
    "change", [{"lr": 1e-3}, {"weight_decay": 0.3}, {"eps": 1e-3}, {"betas": (0.5, 0.9)}, {"betas": [0.5, 0.999]}]
)
def test_what_is_written_to_a_group_holds_from_the_next_step_on(kind: str, stage: str, change: dict[str, Any]) -> None:
    """As in a new optimizer that was built with it. 1-bit Adam has frozen what eps is in."""
    case = case_of(kind, stage).but(groups=GROUPS)
    params, optimizer = started(case)
    others, plain = started(case)
    again = copy.deepcopy(params)
    state = snapshot(optimizer.state_dict())
    state["param_groups"][0].update(change)
    resumed = case.but(options={**case.options, **change}).build(again)
    resumed.load_state_dict(state)
    optimizer.param_groups[0].update(change)
    run(case, 0, optimizer, params, START + 1, START + 3)
    run(case, 0, resumed, again, START + 1, START + 3)
    run(case, 0, plain, others, START + 1, START + 3)
    assert bits(params) == bits(again)
    frozen = stage == "stage 2" and kind == "OneBitAdam" and "eps" in change
    assert (bits(params[::2]) != bits(others[::2])) != frozen
    assert bits(params[1::2]) == bits(others[1::2])


@both
def test_a_group_without_a_learning_rate_does_not_move(kind: str, stage: str) -> None:
    case = case_of(kind, stage).but(groups=({}, {"lr": 0.0, "weight_decay": 0.1}))
    params, before = case.parameters(), case.parameters()
    run(case, 0, case.build(params), params, 1, START + 2)
    assert bits(params[1::2]) == bits(before[1::2])
    assert bits(params[::2]) != bits(before[::2])


@kinds
def test_what_an_optimizer_shows_of_itself(kind: str) -> None:
    shown = repr(build(kind, lr=0.25))
    for part in (kind, "Parameter Group 0", "lr: 0.25", "betas: (0.9, 0.999)", "weight_decay: 0.0"):
        assert part in shown


# Named parameters


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def trained(kind: str, stage: str, net: nn.Module, params: Any, steps: int = START) -> Any:
    optimizer = build(kind, params, lr=1e-2, freeze_step=STAGES[stage])
    for step in range(steps):
        net_step(net, optimizer, step)
    return optimizer


def net_step(net: nn.Module, optimizer: Any, step: int) -> None:
    data = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    net(torch.randn(7, 5, generator=data)).square().mean().backward()
    optimizer.step()


@both
def test_named_parameters_train_and_load_as_others(kind: str, stage: str) -> None:
    one, two = model(), model()
    named = trained(kind, stage, one, one.named_parameters())
    plain = trained(kind, stage, two, two.parameters())
    names = [name for name, _ in one.named_parameters()]
    assert named.param_groups[0]["param_names"] == names
    assert named.state_dict()["param_groups"][0]["param_names"] == names
    assert list(named.diagnostics()) == names
    states = [snapshot(named.state_dict()), snapshot(plain.state_dict())]
    plain.load_state_dict(states[0])
    named.load_state_dict(states[1])
    assert named.param_groups[0]["param_names"] == names
    for step in range(START, START + 2):
        net_step(one, named, step)
        net_step(two, plain, step)
    assert bits(one.parameters()) == bits(two.parameters())


@kinds
def test_errors_call_named_parameters_by_their_names(kind: str) -> None:
    net = model()
    with pytest.raises(ValueError, match=r"with/without names"):
        build(kind, [("a", next(net.parameters())), nn.Parameter(torch.ones(2))])
    optimizer = build(kind, net.named_parameters())
    with pytest.raises(ValueError, match=r"with/without names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1
    weight = net[2].weight
    weight.grad = torch.ones(2, 3).to_sparse()
    with pytest.raises(ValueError, match=r"gradient of parameter 2\.weight"):
        optimizer.step()


# States


@both
def test_a_state_travels_by_a_file_and_loads_with_weights_only(kind: str, stage: str) -> None:
    case = case_of(kind, stage).but(groups=GROUPS)
    params, optimizer = started(case)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = copy.deepcopy(params)
    other = case.build(again)
    other.load_state_dict(state)
    assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict()))
    run(case, 0, optimizer, params, START + 1, START + 3)
    run(case, 0, other, again, START + 1, START + 3)
    assert bits(params) == bits(again)


@both
def test_a_state_has_torchs_shape(kind: str, stage: str) -> None:
    case = case_of(kind, stage).but(groups=GROUPS)
    params, optimizer = started(case)
    state, theirs = optimizer.state_dict(), torch.optim.AdamW(params).state_dict()
    assert list(state) == list(theirs)
    assert [g["params"] for g in state["param_groups"]] == [[0, 1], [2, 3]]
    assert list(state["state"]) == [0, 1, 2, 3]
    assert optimizer.param_groups[0]["params"][0] is params[0]


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moments_of_another_dtype_are_cast(kind: str, stage: str, dtype: torch.dtype) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    state = snapshot(optimizer.state_dict())
    for own in state["state"].values():
        for name, value in own.items():
            if value.is_floating_point() and name != "step":
                own[name] = value.to(dtype)
    again = copy.deepcopy(params)
    other = case.build(again)
    other.load_state_dict(state)
    loaded, saved = other.state_dict()["state"], optimizer.state_dict()["state"]
    for key, own in saved.items():
        for name, value in own.items():
            assert loaded[key][name].dtype == value.dtype
            expected = value if name == "step" or not value.is_floating_point() else value.to(dtype).to(value.dtype)
            assert torch.equal(loaded[key][name], expected)
    take(case, 0, other, again, START + 1)


@both
def test_a_load_takes_the_options_of_the_state(kind: str, stage: str) -> None:
    case = case_of(kind, stage)
    params, optimizer = started(case)
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25, eps=1e-4, betas=(0.5, 0.9))
    other = case.build(copy.deepcopy(params))
    other.load_state_dict(optimizer.state_dict())
    for name in ("lr", "weight_decay", "eps", "betas"):
        assert other.param_groups[0][name] == optimizer.param_groups[0][name]
    other.param_groups[0]["lr"] = 1.0
    assert optimizer.param_groups[0]["lr"] == 0.5


@kinds
def test_a_state_whose_groups_lack_an_option_is_refused(kind: str) -> None:
    case = case_of(kind, "stage 1")
    _, optimizer = started(case)
    state = snapshot(optimizer.state_dict())
    del state["param_groups"][0]["eps"]
    with pytest.raises(ValueError, match="param group 0 of the state has no eps"):
        optimizer.load_state_dict(state)


# Errors

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "one tensor": (lambda: nn.Parameter(torch.ones(3)), TypeError, "iterable"),
    "no tensor": (lambda: [nn.Parameter(torch.ones(3)), 3], TypeError, "one of the params is int"),
    "no leaf": (lambda: [nn.Parameter(torch.ones(3)) * 2], ValueError, "non-leaf"),
    "nothing": (lambda: [], ValueError, "empty parameter list"),
    "a set": (lambda: [{"params": {nn.Parameter(torch.ones(3))}}], TypeError, "ordered"),
    "no params": (lambda: [{"lr": 0.1}], TypeError, "params"),
    "complex": (lambda: [nn.Parameter(torch.ones(3, dtype=torch.complex64))], TypeError, "complex64"),
    "twice": (lambda: [nn.Parameter(torch.ones(3))] * 2, ValueError, "parameter 1 .* given twice"),
    "in two groups": (lambda: _in_two_groups(nn.Parameter(torch.ones(3))), ValueError, "more than one parameter group"),
}


def _in_two_groups(p: nn.Parameter) -> list[dict[str, Any]]:
    return [{"params": [p]}, {"params": [p]}]


@kinds
@pytest.mark.parametrize("name", WRONG)
def test_wrong_parameters_are_refused(kind: str, name: str) -> None:
    params, error, match = WRONG[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch only warns of a parameter that is there twice
        with pytest.raises(error, match=match):
            build(kind, params())


# Arguments of AdamW


@kinds
@pytest.mark.parametrize(
    "given",
    [
        *({name: value} for name in ("foreach", "fused", "capturable") for value in (None, False, True)),
        {"maximize": False, "differentiable": False, "amsgrad": False, "fused": True},
    ],
)
def test_arguments_of_adamw_that_change_nothing_are_taken(kind: str, given: dict[str, Any]) -> None:
    case = Case(kind, options={"freeze_step": 3})
    params, others = case.parameters(), case.parameters()
    one, other = case.but(options={**case.options, **given}).build(params), case.build(others)
    run(case, 0, one, params, 1, 5)
    run(case, 0, other, others, 1, 5)
    assert bits(params) == bits(others)
    assert one.state_dict()["param_groups"][0].keys() == other.state_dict()["param_groups"][0].keys()


@kinds
@pytest.mark.parametrize(
    ("name", "why"),
    [("maximize", "Negate the loss"), ("differentiable", "by its address"), ("amsgrad", "no new variance")],
)
def test_arguments_of_adamw_that_would_change_something_are_refused(kind: str, name: str, why: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(kind, **{name: True})
    assert_message(caught, f"{name}=True", why)


@kinds
@pytest.mark.parametrize("name", ["foreach", "fused", "capturable", "maximize"])
def test_they_are_true_false_or_none(kind: str, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(kind, **{name: "yes"})
    assert_message(caught, f"{name}='yes'", "True, False or None")


@both
def test_betas_that_are_tensors(kind: str, stage: str) -> None:
    """What is written into them holds from the next step on."""
    betas = (torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.99, dtype=torch.float64))
    case, plain = case_of(kind, stage, betas=betas), case_of(kind, stage, betas=(0.9, 0.99))
    params, optimizer = started(case)
    others, other = started(plain)
    betas[0].fill_(0.5)
    other.param_groups[0]["betas"] = (0.5, 0.99)
    run(case, 0, optimizer, params, START + 1, START + 2)
    run(plain, 0, other, others, START + 1, START + 2)
    assert bits(params) == bits(others)
    again = copy.deepcopy(params)
    resumed = plain.build(again)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run(case, 0, optimizer, params, START + 3, START + 4)
    run(case, 0, resumed, again, START + 3, START + 4)
    assert bits(params) == bits(again)


@kinds
@pytest.mark.parametrize(
    ("beta", "why"),
    [
        (torch.tensor([0.9, 0.9]), "each of one number"),
        (torch.empty((), device="meta"), "on meta.*would wait"),
    ],
)
def test_betas_that_are_no_numbers_on_the_host(kind: str, beta: Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=f"betas.*{why}"):
        build(kind, betas=(beta, 0.9))
    optimizer = build(kind)
    before = bits(optimizer.param_groups[0]["params"])
    optimizer.param_groups[0]["betas"] = (beta, 0.9)
    with pytest.raises(ValueError, match=f"betas.*{why}"):
        optimizer.step()
    assert bits(optimizer.param_groups[0]["params"]) == before
    with pytest.raises(ValueError, match="below 1"):
        build(kind, betas=(torch.tensor(1.5), 0.9))

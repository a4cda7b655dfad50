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

from tests.checkpoints import Run
from tests.onebit.optim.contract import give, options
from tests.onebit.runs import OPTIMIZERS, Case, bits, build, snapshot, take

CASES = [Case(options={"freeze_step": 50}), *(Case(kind, options={"freeze_step": 2}) for kind in OPTIMIZERS)]
both = pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.kind}-stage {1 + (case.options['freeze_step'] == 2)}"
)
START = 4  # steps after which a test begins
GROUPS = ({}, {"lr": 3e-3, "weight_decay": 0.1})


def started(case: Case) -> Run:
    """Take `START` steps: the run is in the stage that is to be tested."""
    trained = Run(case, START)
    assert trained.optimizer.compressing == (case.options["freeze_step"] < START)
    return trained


def loaded(case: Case, state: Any, params: list[nn.Parameter]) -> Run:
    """A copy of the parameters, whose optimizer has the state."""
    again = Run(case, 0)
    for p, q in zip(again.params, params, strict=True):
        p.data.copy_(q.data)
    again.optimizer.load_state_dict(state)
    return again


def both_on(one: Run, other: Run, first: int, last: int) -> None:
    """They take the same steps, and end with the same bits."""
    for trained in (one, other):
        trained.on(first, last)
    assert bits(one.params) == bits(other.params)


def loss_of(params: list[nn.Parameter], power: int = 2) -> Tensor:
    return sum((p.pow(power).sum() for p in params), torch.zeros(()))


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Hooks and the step


@both
def test_step_hooks_run_in_torchs_order_and_may_change_gradients_and_arguments(case: Case) -> None:
    one, other = started(case), started(case)
    called: list[str] = []

    def halve(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        called.append("before")
        for p in one.params:
            p.grad.mul_(0.5)
        return (args[0], lambda: 7.0), {}

    def note(text: str) -> Callable[..., None]:
        return lambda own, *_: called.append(f"{text} {own is one.optimizer}")

    handles = [
        register_optimizer_step_pre_hook(note("any before")),
        register_optimizer_step_post_hook(note("any after")),
        one.optimizer.register_step_pre_hook(halve),
        one.optimizer.register_step_post_hook(note("after")),
    ]
    for trained in (one, other):
        give(case, trained.params, START + 1)
    try:
        assert one.optimizer.step(lambda: 3.0) == 7.0
        assert called == ["any before True", "before", "after True", "any after True"]
    finally:
        for handle in handles:
            handle.remove()
    for p in other.params:
        p.grad.mul_(0.5)
    other.optimizer.step()
    both_on(one, other, START + 2, START + 2)
    assert len(called) == 4


@both
def test_a_closure_is_called_once_a_step_and_its_loss_is_returned(case: Case) -> None:
    one, other = started(case), started(case)
    calls: list[float] = []

    def closure() -> Tensor:
        one.optimizer.zero_grad()
        loss = loss_of(one.params)
        loss.backward()
        calls.append(loss.item())
        return loss

    with torch.no_grad():
        assert [one.optimizer.step(closure).item()] == calls
    for p in other.params:
        p.grad = 2 * p.detach()
    assert other.optimizer.step() is None
    assert bits(one.params) == bits(other.params)


@both
def test_gradients_of_zero_and_none_and_those_with_a_graph_are_gradients(case: Case) -> None:
    one, other = started(case), started(case)
    one.optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in one.params)
    other.optimizer.zero_grad()
    assert all(p.grad is None for p in other.params)
    for trained in (one, other):
        loss_of(trained.params).backward()
        trained.optimizer.step()
        grads = torch.autograd.grad(loss_of(trained.params, 3), trained.params, create_graph=trained is one)
        for p, g in zip(trained.params, grads, strict=True):
            p.grad = g
        trained.optimizer.step()
    assert all(p.grad.requires_grad for p in one.params)
    assert bits(one.params) == bits(other.params)


@both
def test_a_step_keeps_no_gradient_alive(case: Case) -> None:
    trained = started(case)
    for clip in (False, True):
        give(case, trained.params, START + 1 + clip)
        found = [weakref.ref(p.grad) for p in trained.params]
        if clip:
            trained.optimizer.clip_grad_norm_(0.1)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        gc.collect()
        assert [ref() for ref in found] == [None] * len(found)


# Schedulers and param groups


@pytest.mark.parametrize(("name", "case"), [("OneCycleLR", case) for case in CASES] + [("ReduceLROnPlateau", CASES[1])])
def test_a_scheduler_sets_what_it_sets_for_adamw_and_steps_use_it(name: str, case: Case) -> None:
    """The same numbers, written into another run's groups by hand, give the same bits. OneCycleLR sets betas too."""
    own, by_hand = (Run(case.but(groups=GROUPS), 0) for _ in range(2))
    theirs, given = case.parameters(), {"total_steps": 12, "max_lr": 2e-2} if name == "OneCycleLR" else {"patience": 1}
    adamw = torch.optim.AdamW([{"params": theirs[::2]}, {"params": theirs[1::2], "lr": 3e-3}], lr=1e-2)
    schedulers = [getattr(lr_scheduler, name)(o, **given) for o in (own.optimizer, adamw)]
    for step in range(9):
        groups = (o.param_groups for o in (own.optimizer, adamw, by_hand.optimizer))
        for mine, hers, hand in zip(*groups, strict=True):
            assert (mine["lr"], mine["betas"]) == (hers["lr"], hers["betas"])
            hand["lr"], hand["betas"] = mine["lr"], mine["betas"]
        take(case, 0, adamw, theirs, step + 1)
        both_on(own, by_hand, step + 1, step + 1)
        for each in schedulers:
            each.step(*([1.0 + step] if name == "ReduceLROnPlateau" else []))


@both
def test_rates_and_betas_that_are_tensors(case: Case) -> None:
    """A scheduler writes into the rate; what is written into either holds from the next step on; a state has it."""
    lr, beta1 = (torch.tensor(x, dtype=torch.float64) for x in (1e-2, 0.9))
    own, other = started(options(case, lr=lr, betas=(beta1, 0.99))), started(options(case, betas=(0.9, 0.99)))
    beta1.fill_(0.5)
    other.optimizer.param_groups[0]["betas"] = (0.5, 0.99)
    schedules = [lr_scheduler.ExponentialLR(trained.optimizer, 0.5) for trained in (own, other)]
    for step in range(START + 1, START + 4):
        both_on(own, other, step, step)
        for each in schedules:
            each.step()
    assert own.optimizer.param_groups[0]["lr"] is lr and float(lr) == pytest.approx(1e-2 / 8)
    resumed = loaded(other.case, through_a_file(own.optimizer.state_dict()), own.params)
    both_on(own, resumed, START + 4, START + 5)


@both
@pytest.mark.parametrize("change", [{"lr": 1e-3}, {"weight_decay": 0.3}, {"eps": 1e-3}, {"betas": [0.5, 0.9]}], ids=str)
def test_what_is_written_to_a_group_holds_from_the_next_step_on(case: Case, change: dict[str, Any]) -> None:
    """The optimizer goes on as a new one that was built with it. 1-bit Adam has frozen what eps is in."""
    case = case.but(groups=GROUPS)
    changed, plain = started(case), started(case)
    plain.optimizer.synchronize()  # as `state_dict` does
    changed.optimizer.param_groups[0].update(change)
    resumed = loaded(options(case, **change), snapshot(changed.optimizer.state_dict()), changed.params)
    both_on(changed, resumed, START + 1, START + 3)
    plain.on(START + 1, START + 3)
    frozen = plain.optimizer.compressing and case.kind == "OneBitAdam" and "eps" in change
    assert (bits(changed.params[::2]) != bits(plain.params[::2])) != frozen
    assert bits(changed.params[1::2]) == bits(plain.params[1::2])


# Names and copies


@both
def test_named_parameters_train_and_load_as_others(case: Case) -> None:
    names, plain, named = ["0.weight", "0.bias", "scale", "last"], Run(case, 0), Run(case, 0)
    own = {"lr": 1e-2, "block_size": 64, "chunks": 1, "reply": 1, "variance_floor": 0.0}
    named.optimizer = build(case.kind, list(zip(names, named.params, strict=True)), **own, **case.options)
    both_on(named, plain, 1, START)
    assert named.optimizer.state_dict()["param_groups"][0]["param_names"] == names
    assert list(named.optimizer.diagnostics()) == names
    states = [snapshot(trained.optimizer.state_dict()) for trained in (named, plain)]
    plain.optimizer.load_state_dict(states[0])
    named.optimizer.load_state_dict(states[1])
    assert named.optimizer.param_groups[0]["param_names"] == names
    both_on(named, plain, START + 1, START + 2)


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

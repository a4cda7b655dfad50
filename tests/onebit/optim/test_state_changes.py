"""What users do to `optimizer.state`, to param groups and to the optimizer itself has its effect, or is an error."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.onebit.optim.contract import started
from tests.onebit.runs import Case, assert_message, bits, build, kinds, parameters, run, same, snapshot, take
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 50, "weight_decay": 0.1})


def pair() -> tuple[list[nn.Parameter], Any, list[nn.Parameter], Any]:
    """1-bit Adam and AdamW after four steps of stage 1."""
    params, optimizer = started(CASE, 4)
    theirs = CASE.parameters()
    adamw = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    run(CASE, 0, adamw, theirs, 1, 4)
    return params, optimizer, theirs, adamw


def assign_nothing(o: Any, params: list[nn.Parameter]) -> None:
    o.state = defaultdict(dict)


def assign_other_moments(o: Any, params: list[nn.Parameter]) -> None:
    for p in params:
        o.state[p] = {"step": torch.tensor(9.0), "exp_avg": p.detach() * 0.1, "exp_avg_sq": p.detach().square() + 1}


def assign_one_tensor(o: Any, params: list[nn.Parameter]) -> None:
    o.state[params[1]]["exp_avg"] = torch.ones_like(params[1])


def copies(o: Any, params: list[nn.Parameter]) -> None:
    """As tools do that bring state to a device."""
    for p in params:
        o.state[p] = {name: value.clone() for name, value in o.state[p].items()}


def replace_a_parameter(o: Any, params: list[nn.Parameter]) -> None:
    old, new = params[1], nn.Parameter(params[1].detach().clone())
    o.param_groups[0]["params"][1] = params[1] = new
    o.state[new] = o.state.pop(old)


CHANGES: dict[str, Callable[[Any, list[nn.Parameter]], object]] = {
    "clear": lambda o, params: o.state.clear(),
    "nothing": assign_nothing,
    "other moments": assign_other_moments,
    "one tensor": assign_one_tensor,
    "written into": lambda o, params: o.state[params[1]]["exp_avg"].fill_(1.0),
    "copies": copies,
    "another parameter": replace_a_parameter,
}


@pytest.mark.parametrize("name", CHANGES)
def test_state_that_was_changed_holds_as_in_adamw(name: str) -> None:
    params, optimizer, theirs, adamw = pair()
    for own, each in ((optimizer, params), (adamw, theirs)):
        CHANGES[name](own, each)
    run(CASE, 0, optimizer, params, 5, 8)
    run(CASE, 0, adamw, theirs, 5, 8)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert int(optimizer.state[p]["step"]) == int(adamw.state[q]["step"])
    saved = optimizer.state_dict()["state"]
    assert all(int(own["step"]) == optimizer.steps for own in saved.values())


def test_it_holds_for_what_is_saved_at_once() -> None:
    params, optimizer = started(CASE, 4)
    assign_other_moments(optimizer, params)
    state = optimizer.state_dict()["state"]
    assert [int(own["step"]) for own in state.values()] == [9] * 4
    assert torch.equal(state[1]["exp_avg"], params[1].detach() * 0.1)


def cleared(rank: int, size: int, kind: str) -> None:
    case = Case(kind, options={"freeze_step": 3})
    params, optimizer = started(case, 6, rank, size)
    fresh = copy.deepcopy(params)
    optimizer.state.clear()
    other = case.build(fresh, group())
    for own, each in ((params, optimizer), (fresh, other)):
        run(case, rank, each, own, 7, 12)
    assert bits(params) == bits(fresh)
    assert same(snapshot(optimizer.state_dict()), snapshot(other.state_dict()))


@kinds
def test_clearing_after_the_freeze_begins_anew(kind: str) -> None:
    run_ranks(2, cleared, kind)


@kinds
def test_other_changes_after_the_freeze_are_errors(kind: str) -> None:
    case = Case(kind, options={"freeze_step": 3})
    params, optimizer = started(case, 6)
    before, kept = bits(params), optimizer.state[params[1]]
    optimizer.state[params[1]] = {"step": torch.tensor(3.0)}
    for what in (lambda: take(case, 0, optimizer, params, 7), optimizer.state_dict):
        with pytest.raises(ValueError) as caught:
            what()
        assert_message(caught, "parameter 1", "after the freeze", "load_state_dict", "state.clear()")
    assert bits(params) == before
    optimizer.state[params[1]] = kept
    take(case, 0, optimizer, params, 7)


def state(**changes: Any) -> dict[str, Any]:
    own = {"step": torch.tensor(4.0), "exp_avg": torch.zeros(33), "exp_avg_sq": torch.zeros(33), **changes}
    return {name: value for name, value in own.items() if value is not None}


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (state(step=None), ["no step"]),
        (state(step=torch.tensor(1.0)), ["different"]),
        (state(exp_avg=torch.zeros(3)), ["shape"]),
        ([1], ["not a dict"]),
        (None, ["nothing for parameter 1", "same steps for all", "state.clear()"]),
    ],
    ids=["no step", "other steps", "another shape", "no dict", "taken away"],
)
def test_what_is_no_state_is_an_error(value: Any, parts: list[str]) -> None:
    params, optimizer = started(CASE, 4)
    optimizer.state[params[1]] = value
    if value is None:
        del optimizer.state[params[1]]
    with pytest.raises((ValueError, TypeError)) as caught:
        take(CASE, 0, optimizer, params, 5)
    assert_message(caught, *parts)


def test_reading_the_state_of_others_changes_nothing() -> None:
    """A defaultdict makes an entry of it."""
    params, optimizer = started(CASE, 4)
    current = optimizer.current
    assert optimizer.state[nn.Parameter(torch.zeros(2))] == {}
    take(CASE, 0, optimizer, params, 5)
    assert optimizer.current is current


# Param groups


def test_a_key_that_would_be_passed_over_is_an_error() -> None:
    for key, value in (("exp_avg_mask", torch.ones(40)), ("momentum", 0.9), ("maximize", True), ("amsgrad", True)):
        with pytest.raises(ValueError, match=key):
            build("OneBitAdam", [{"params": parameters((40,)), key: value}])
        params = parameters((40,))
        optimizer = build("OneBitAdam", params, freeze_step=3)
        with pytest.raises(ValueError, match=key):
            optimizer.add_param_group({"params": parameters((4,)), key: value})
        assert len(optimizer.param_groups) == 1
        optimizer.param_groups[0][key] = value
        params[0].grad = torch.ones(40)
        before = bits(params)
        with pytest.raises(ValueError, match=key):
            optimizer.step()
        assert bits(params) == before
        del optimizer.param_groups[0][key]
        optimizer.step()


def test_keys_of_schedulers_and_of_adamw_that_change_nothing_may_be_there() -> None:
    params = parameters((40,))
    more = {"name": "all", "lr_scale": 0.5, "maximize": False, "amsgrad": False, "foreach": None, "fused": True}
    optimizer = build("OneBitAdam", [{"params": params, **more}], freeze_step=3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=5)
    params[0].grad = torch.ones(40)
    optimizer.step()
    scheduler.step()
    other = build("OneBitAdam", parameters((40,)), freeze_step=3)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["max_lr"] == 1e-2


def test_a_key_of_a_loaded_state_that_is_unknown_is_left_out_with_a_warning() -> None:
    params, optimizer, _, adamw = pair()
    adamw.param_groups[0]["note"] = 3
    with pytest.warns(UserWarning, match="have note, with which nothing is done"):
        optimizer.load_state_dict(adamw.state_dict())
    assert "note" not in optimizer.param_groups[0]
    take(CASE, 0, optimizer, params, 5)


# Attributes


def test_an_option_set_as_an_attribute_is_an_error() -> None:
    own = {"OneBitAdam": "freeze_step", "OneBitLamb": "coeff_beta", "ZeroOneAdam": "var_freeze_step"}
    for kind, first in own.items():
        optimizer = build(kind)
        for name in (first, "lr", "betas", "weight_decay", "overlap", "scale", "zero_variance"):
            with pytest.raises(AttributeError) as caught:
                setattr(optimizer, name, 3)
            where = "param_groups" if name in ("lr", "betas", "weight_decay") else f"{kind}(..., {name}=...)"
            assert_message(caught, name, "would change nothing", where)
    optimizer = build("OneBitAdam")
    optimizer.coeff_beta = 0.5  # which is no option of 1-bit Adam's
    optimizer.note = "mine"

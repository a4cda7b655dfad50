"""What users do to `optimizer.state`, to param groups and to the optimizer itself has its effect, or is an error."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from onebit.optim.reducer import MomentumReducer
from tests import internals
from tests.onebit.optim.contract import started
from tests.onebit.optim.test_parameter_changes import step_refused
from tests.onebit.runs import Case, bits, build, kinds, on_ranks, parameters, refused, run, same, snapshot, take
from tests.ranks import group

CASE = Case(options={"freeze_step": 50, "weight_decay": 0.1})


def adamw() -> tuple[list[nn.Parameter], Any]:
    """Train AdamW four steps as 1-bit Adam of the case does."""
    theirs = CASE.parameters()
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    run(CASE, 0, optimizer, theirs, 1, 4)
    return theirs, optimizer


def assign_other_moments(o: Any, params: list[nn.Parameter]) -> None:
    for p in params:
        o.state[p] = {"step": torch.tensor(9.0), "exp_avg": p.detach() * 0.1, "exp_avg_sq": p.detach().square() + 1}


def copies(o: Any, params: list[nn.Parameter]) -> None:
    """Put copies into the state, as tools do that bring state to a device."""
    for p in params:
        o.state[p] = {name: value.clone() for name, value in o.state[p].items()}


def replace_a_parameter(o: Any, params: list[nn.Parameter]) -> None:
    old, new = params[1], nn.Parameter(params[1].detach().clone())
    o.param_groups[0]["params"][1] = params[1] = new
    o.state[new] = o.state.pop(old)


CHANGES: dict[str, Callable[[Any, list[nn.Parameter]], object]] = {
    "clear": lambda o, params: o.state.clear(),
    "nothing": lambda o, params: setattr(o, "state", defaultdict(dict)),
    "other moments": assign_other_moments,
    "one tensor": lambda o, params: o.state[params[1]].update(exp_avg=torch.ones_like(params[1])),
    "written into": lambda o, params: o.state[params[1]]["exp_avg"].fill_(1.0),
    "copies": copies,
    "another parameter": replace_a_parameter,
}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_state_that_was_changed_holds_as_in_adamw(name: str, begun: bool) -> None:
    """begun: between the first bucket of a backward pass and step."""
    (params, optimizer), (theirs, plain) = started(CASE, 4), adamw()
    if begun:
        optimizer.begin_step()
    for own, each in ((optimizer, params), (plain, theirs)):
        CHANGES[name](own, each)
        run(CASE, 0, own, each, 5, 8)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert int(optimizer.state[p]["step"]) == int(plain.state[q]["step"])
    saved = optimizer.state_dict()["state"]
    assert all(int(own["step"]) == optimizer.steps for own in saved.values())


def test_it_holds_for_what_is_saved_at_once() -> None:
    params, optimizer = started(CASE, 4)
    assign_other_moments(optimizer, params)
    state = optimizer.state_dict()["state"]
    assert [int(own["step"]) for own in state.values()] == [9] * 4
    assert torch.equal(state[1]["exp_avg"], params[1].detach() * 0.1)


@kinds
@on_ranks(2)
def test_clearing_after_the_freeze_begins_anew(rank: int, kind: str) -> None:
    case = Case(kind, options={"freeze_step": 3})
    params, optimizer = started(case, 6, rank, 2)
    fresh = copy.deepcopy(params)
    optimizer.state.clear()
    other = case.build(fresh, group())
    for own, each in ((params, optimizer), (fresh, other)):
        run(case, rank, each, own, 7, 12)
    assert bits(params) == bits(fresh)
    assert same(snapshot(optimizer.state_dict()), snapshot(other.state_dict()))


@kinds
def test_other_changes_after_the_freeze_are_errors(kind: str) -> None:
    case = Case(kind, options={"freeze_step": 3})
    params, optimizer = started(case, 6)
    kept, says = optimizer.state[params[1]], ("parameter 1", "after the freeze", "load_state_dict", "state.clear()")
    optimizer.state[params[1]] = {"step": torch.tensor(3.0)}
    step_refused(optimizer, params, ValueError, *says)
    with refused(ValueError, *says):
        optimizer.state_dict()
    optimizer.state[params[1]] = kept
    take(case, 0, optimizer, params, 7)


OWN = {"step": torch.tensor(4.0), "exp_avg": torch.zeros(33), "exp_avg_sq": torch.zeros(33)}


def test_what_is_no_state_is_an_error() -> None:
    for value, *parts in (
        ({name: own for name, own in OWN.items() if name != "step"}, "no step"),
        (OWN | {"step": torch.tensor(1.0)}, "different"),
        (OWN | {"exp_avg": torch.zeros(3)}, "shape"),
        ([1], "not a dict"),
        (None, "nothing for parameter 1", "same steps for all", "state.clear()"),
    ):
        params, optimizer = started(CASE, 4)
        optimizer.state[params[1]] = value
        if value is None:
            del optimizer.state[params[1]]
        step_refused(optimizer, params, (ValueError, TypeError), *parts)


def test_reading_the_state_of_others_changes_nothing() -> None:
    """A defaultdict makes an entry of it."""
    params, optimizer = started(CASE, 4)
    current = internals.state(optimizer)
    assert optimizer.state[nn.Parameter(torch.zeros(2))] == {}
    take(CASE, 0, optimizer, params, 5)
    assert internals.state(optimizer) is current


# Param groups and attributes


def test_a_key_that_would_be_passed_over_is_an_error() -> None:
    for key, value in (
        ("exp_avg_mask", torch.ones(40)), ("momentum", 0.9), ("maximize", True), ("amsgrad", True),
        ("weight_decy", 0.1), ("beta", 0.9), ("freeze_step", 3), ("zero_varianc", "hold"),
    ):  # fmt: skip
        params = parameters((40,))
        with pytest.raises(ValueError, match=key):
            build("OneBitAdam", [{"params": params, key: value}])
        optimizer = build("OneBitAdam", params, freeze_step=3)
        with pytest.raises(ValueError, match=key):
            optimizer.add_param_group({"params": parameters((4,)), key: value})
        assert len(optimizer.param_groups) == 1
        optimizer.param_groups[0][key] = value
        params[0].grad = torch.ones(40)
        step_refused(optimizer, params, ValueError, key)
        del optimizer.param_groups[0][key]
        optimizer.step()


def test_labels_and_keys_of_schedulers_and_of_adamw_that_change_nothing_may_be_there() -> None:
    params = parameters((40,))
    labels = {"param_group": "bias", "layer_id": 3, "use_muon": False, 7: "seven"}  # also as ultralytics has them
    more = {
        "name": "all",
        "lr_scale": 0.5,
        **labels,
        "maximize": False,
        "amsgrad": False,
        "foreach": None,
        "fused": True,
    }
    optimizer = build("OneBitAdam", [{"params": params, **more}], freeze_step=3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=5)
    params[0].grad = torch.ones(40)
    optimizer.step()
    scheduler.step()
    other = build("OneBitAdam", [{"params": parameters((40,)), **labels}], freeze_step=3)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["max_lr"] == 1e-2
    assert {key: optimizer.param_groups[0][key] for key in labels} == labels


def test_a_key_of_a_loaded_state_that_is_unknown_is_left_out_with_a_warning() -> None:
    (params, optimizer), (_, plain) = started(CASE, 4), adamw()
    plain.param_groups[0]["note"] = 3
    with pytest.warns(UserWarning, match="have note, with which nothing is done"):
        optimizer.load_state_dict(plain.state_dict())
    assert "note" not in optimizer.param_groups[0]
    take(CASE, 0, optimizer, params, 5)


def test_an_option_set_as_an_attribute_is_an_error() -> None:
    own = {"OneBitLamb": "coeff_beta", "ZeroOneAdam": "var_freeze_step", "OneBitAdam": "freeze_step"}
    for kind, first in own.items():
        optimizer = build(kind)
        for name in (first, "lr", "betas", "weight_decay", "overlap", "scale", "zero_variance"):
            where = "param_groups" if name in ("lr", "betas", "weight_decay") else f"{kind}(..., {name}=...)"
            with refused(AttributeError, name, "would change nothing", where):
                setattr(optimizer, name, 3)
    optimizer.coeff_beta = 0.5  # which is no option of 1-bit Adam's
    optimizer.note = "mine"


# A step that did not end


@kinds
def test_after_a_step_that_was_interrupted_a_load_goes_on_and_nothing_else(kind: str) -> None:
    """Residuals have changed, and no parameter has moved."""
    schedule = {"var_update_scaler": 1} if kind == "ZeroOneAdam" else {"freeze_step": 3}
    case = Case(kind, options={"block_size": 32, "chunks": 2, **schedule})
    (params, optimizer), (others, twin) = started(case, 8), started(case, 8)
    states = [snapshot(each.state_dict()) for each in (optimizer, twin)]
    whole = MomentumReducer.all_reduce

    def interrupted(self: Any, *args: Any) -> None:
        whole(self, *args)
        raise KeyboardInterrupt

    with mock.patch.object(MomentumReducer, "all_reduce", interrupted), pytest.raises(KeyboardInterrupt):
        take(case, 0, optimizer, params, 9)
    for call in (optimizer.step, optimizer.synchronize, optimizer.state_dict):
        with refused(ValueError, "an interrupt has ended while messages were exchanged", "load_state_dict"):
            call()
    for each, state in zip((optimizer, twin), states, strict=True):
        each.load_state_dict(state)
    for each, its in ((optimizer, params), (twin, others)):
        run(case, 0, each, its, 9, case.steps)
    assert bits(params) == bits(others)

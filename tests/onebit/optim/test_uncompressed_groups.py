"""A param group with compress=False: its gradients are averaged in every step, its parameters stay in stage 1, and the
others are as without it.

Two optimizers stand beside the one: one with the compressed parameters alone, one with the others, in stage 1 for good.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onebit
from tests import internals
from tests.onebit.optim.contract import give, options, started
from tests.onebit.runs import Case, bits, build, kinds, on_ranks, on_warnings, parameters, refused, run, same
from tests.ranks import group

APART = {"compress": False}
GROUPS = ({}, APART)  # parameters 1 and 3 are in the second
OPTIONS: dict[str, Any] = {"freeze_step": 4, "chunks": 2, "weight_decay": 0.1}
CASE = Case(steps=11, groups=GROUPS, options=OPTIONS)
SPACED = {"freeze_step": None, "var_update_scaler": 2}  # with full-precision steps between compressed ones
ELEMENTS = 9 * 7 + 2, 33 + 130  # compressed, and not


def halves(tensors: list[Any]) -> tuple[list[Any], list[Any]]:
    return tensors[::2], tensors[1::2]


ALONE = {  # ranks and the case
    "Adam": (3, CASE),
    "Adam, direct": (2, options(CASE, reply="direct")),
    "Adam, tensor scale": (1, options(CASE, scale="tensor")),
    "Adam, 16 bits, some missing": (2, CASE.but(dtype="bfloat16", missing=((6, 0, 1), (7, 1, 0)))),
    "LAMB, tensor scale": (2, options(CASE.but(kind="OneBitLamb"), scale="tensor")),
    "LAMB of nodes": (4, CASE.but(kind="OneBitLamb", each=2)),
    "0/1 Adam, one level, 16 bits": (2, CASE.but(kind="ZeroOneAdam", dtype="bfloat16")),
    "0/1 Adam": (3, options(CASE.but(kind="ZeroOneAdam", steps=16), **SPACED)),
    "0/1 Adam, direct": (2, options(CASE.but(kind="ZeroOneAdam", steps=16), reply="direct", **SPACED)),
}


@pytest.mark.parametrize(("size", "case"), ALONE.values(), ids=ALONE)
@on_ranks()
def test_both_are_what_they_are_alone(rank: int, size: int, case: Case) -> bytes:
    one, two = case.parameters(), case.parameters()
    optimizer = case.build(one, group())
    first = case.but(groups=({},)).build(halves(two)[0], group())
    stage_1 = {**{k: v for k, v in case.options.items() if k not in SPACED}, "freeze_step": 10**6, "overlap": False}
    kind = "OneBitLamb" if case.kind == "OneBitLamb" else "OneBitAdam"
    second = case.but(kind=kind, groups=({},), options=stage_1).build(halves(two)[1], group())
    for step in range(1, case.steps + 1):
        run(case, rank, optimizer, one, step, step)
        give(case, two, step, rank)
        first.step()
        second.step()
        for ours, theirs, what in zip(halves(one), halves(two), ("compressed", "others"), strict=True):
            assert bits(ours) == bits(theirs), f"step {step}: {what}"
    assert optimizer.compressing and first.compressing and not second.compressing
    assert optimizer.wire_bytes == first.wire_bytes
    return bits(one)


# States


@kinds
def test_adamw_takes_their_moments_as_they_are(kind: str) -> None:
    _, optimizer = started(CASE.but(kind=kind), 7)
    state = optimizer.state_dict()
    theirs = onebit.adamw_state(state)
    assert not any("compress" in g for g in theirs["param_groups"])
    torch.optim.AdamW([{"params": list(half)} for half in halves(CASE.parameters())]).load_state_dict(theirs)
    for own, saved in ((theirs["state"][key], state["state"][key]) for key in (2, 3)):  # in the order of the groups
        assert same(own["exp_avg"], saved["exp_avg"]) and same(own["exp_avg_sq"], saved["exp_avg_sq"])
        assert "residual" not in saved


@kinds
@on_ranks(2)
def test_a_state_of_another_choice_is_for_stage_1_alone(rank: int, kind: str) -> None:
    case = CASE.but(kind=kind)
    early, late = (started(case, at, rank, 2)[1] for at in (3, 7))
    late.synchronize()
    other = case.but(groups=({}, {})).build(case.parameters(), group())
    other.load_state_dict(early.state_dict())
    assert other.param_groups[1]["compress"] is True
    with refused(ValueError, "compress=False in param group 1", "it is True", "Give the group what it had"):
        other.load_state_dict(late.state_dict())


# What it shows


@on_ranks(2)
def test_the_report_counts_what_they_send_and_the_watch_looks_at_them(rank: int) -> None:
    """An all-reduce of two ranks sends 4 B an element."""
    case = options(CASE, check_every=11)
    params, optimizer = started(case, 10, rank, 2)
    sent = optimizer.report().sent - optimizer.wire_bytes
    assert sent == 4 * (4 * sum(ELEMENTS) + 6 * ELEMENTS[1])
    if rank == 1:
        internals.uncompressed(optimizer)[0]["exp_avg"][:1] += 1
    with pytest.raises(onebit.DivergenceError, match="exp_avg of parameter"):
        run(case, rank, optimizer, params, 11, 11)


@kinds
def test_diagnostics_have_all_and_only_what_is_compressed_must_have_a_variance_by_then(kind: str) -> None:
    case = CASE.but(kind=kind, untouched=((1, 3, 99),))  # of the second group
    with on_warnings("error"):
        _, optimizer = started(case, 8)
    found = list(optimizer.diagnostics().values())  # in the order of the groups
    assert ["momentum_scale" in own for own in found] == [True, True, False, False]
    assert all(own["variance_norm"] > 0 for own in found[2:])
    with pytest.warns(UserWarning, match="elements without a variance"):
        started(case.but(untouched=((0, 3, 99),)), 8)


# Errors


def test_groups_that_cannot_be() -> None:
    first, second = parameters((3,), (4,))
    for value in (None, 1, "no", 0.5):
        with refused(ValueError, f"compress={value!r}", "True", "False"):
            build("OneBitAdam", [{"params": [first]}, {"params": [second], "compress": value}])
    groups = [{"params": [first]}, {"params": [second], **APART}]
    with pytest.raises(ValueError, match="local_step_scaler"):
        onebit.ZeroOneAdam(groups, var_freeze_step=4, local_step_scaler=2)
    with pytest.raises(ValueError, match="nothing would be compressed"):
        build("OneBitAdam", [{"params": parameters((3,)), **APART}])
    first.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would be compressed"):
        build("ZeroOneAdam", groups)


@kinds
def test_a_group_that_is_switched(kind: str) -> None:
    """A switch in stage 1 holds from the next step on, with the moments there are; later it is an error."""
    case = CASE.but(kind=kind)
    params, others = case.parameters(), case.parameters()
    optimizer, always = case.but(groups=({}, {})).build(params), case.build(others)
    run(case, 0, optimizer, params, 1, 2)
    optimizer.param_groups[1]["compress"] = False
    run(case, 0, optimizer, params, 3, 8)
    run(case, 0, always, others, 1, 8)
    assert bits(params) == bits(others)
    optimizer.param_groups[1]["compress"] = True
    with pytest.raises(ValueError, match="its group's compress was switched"):
        run(case, 0, optimizer, params, 9, 9)

"""A param group with compress=False: its gradients are averaged in every step, its parameters stay in stage 1, and the
others are as without it.

Two optimizers stand beside the one: one with the compressed parameters alone, one with the others, in stage 1 for good.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.runs import (
    Case,
    adam_first,
    assert_message,
    bits,
    build,
    kinds,
    options_of,
    parameters,
    run,
    same,
    snapshot,
    take,
)
from tests.onebit.runs import unchanged as as_it_was
from tests.ranks import group, run_ranks

APART = {"compress": False}
GROUPS = ({}, APART)  # parameters 1 and 3 are in the second
OPTIONS: dict[str, Any] = {"freeze_step": 4, "chunks": 2, "weight_decay": 0.1}
CASE = Case(steps=11, groups=GROUPS, options=OPTIONS)
SPACED = {"freeze_step": None, "var_update_scaler": 2}  # with full-precision steps between compressed ones
ELEMENTS = 9 * 7 + 2, 33 + 130  # compressed, and not


def halves(tensors: list[Any]) -> tuple[list[Any], list[Any]]:
    return tensors[::2], tensors[1::2]


def apart_alone(case: Case, params: list[nn.Parameter]) -> Any:
    kind = "OneBitLamb" if case.kind == "OneBitLamb" else "OneBitAdam"
    options = {k: v for k, v in case.options.items() if k not in SPACED}
    alone = case.but(kind=kind, groups=({},), options={**options, "freeze_step": 10**6, "overlap": False})
    return alone.build(params, group())


def beside_two(rank: int, size: int, case: Case) -> dict[str, Any]:
    one, two = case.parameters(), case.parameters()
    optimizer = case.build(one, group())
    first = case.but(groups=({},)).build(halves(two)[0], group())
    second = apart_alone(case, halves(two)[1])
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, one, step)
        for p, g in zip(two, case.gradients(rank, step), strict=True):
            p.grad = g
        first.step()
        second.step()
        for ours, theirs, what in zip(halves(one), halves(two), ("compressed", "others"), strict=True):
            assert bits(ours) == bits(theirs), f"step {step}: {what}"
    assert optimizer.compressing and first.compressing and not second.compressing
    return {"bits": bits(one), "sent": (optimizer.wire_bytes, first.wire_bytes)}


def all_alike(found: list[dict[str, Any]]) -> None:
    assert len({own["bits"] for own in found}) == 1
    for own in found:
        assert own["sent"][0] == own["sent"][1]


@adam_first
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"reply": "direct"}, {"scale": "tensor"}], ids=str)
def test_both_are_what_they_are_alone(kind: str, size: int, options: dict[str, Any]) -> None:
    all_alike(run_ranks(size, beside_two, CASE.but(kind=kind, options={**OPTIONS, **options})))


@kinds
def test_of_16_bits_and_with_gradients_that_are_missing(kind: str) -> None:
    case = CASE.but(kind=kind, dtype="bfloat16", missing=((6, 0, 1), (7, 1, 0)))
    all_alike(run_ranks(2, beside_two, case))


@pytest.mark.parametrize("options", [{}, {"reply": "direct"}], ids=str)
def test_between_full_precision_steps(options: dict[str, Any]) -> None:
    case = CASE.but(kind="ZeroOneAdam", steps=16, options={**OPTIONS, **SPACED, **options})
    all_alike(run_ranks(2, beside_two, case))


@adam_first
def test_nodes_of_two_ranks(kind: str) -> None:
    all_alike(run_ranks(4, beside_two, CASE.but(kind=kind, each=2)))


def beside_adamw(rank: int, size: int, case: Case) -> float:
    one, two = case.parameters(), case.parameters()
    optimizer, other = case.build(one, group()), torch.optim.AdamW(halves(two)[1], lr=1e-2, weight_decay=0.1)
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, one, step)
        everyone = [case.gradients(r, step) for r in range(size)]
        for i, p in enumerate(two):
            p.grad = torch.stack([of[i] for of in everyone]).mean(0)
        other.step()
    return max(float((a - b).abs().max()) for a, b in zip(halves(one)[1], halves(two)[1], strict=True))


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
def test_the_others_are_adamws(kind: str) -> None:
    case = CASE.but(kind=kind, dtype="float64", steps=12)
    case = case.but(dtype="float32", options={**OPTIONS, **(SPACED if kind == "ZeroOneAdam" else {})})
    assert max(run_ranks(2, beside_adamw, case)) < 2e-6


# Steps


def skipped(rank: int, size: int, case: Case) -> bytes:
    params = case.parameters()
    optimizer = case.build(params, group())
    for step in range(1, case.steps + 1):
        optimizer.zero_grad()
        before, values = snapshot(optimizer.state_dict()), bits(params)
        backward(case, rank, optimizer, params, step)
        optimizer.step()
        is_bad = step in {when for when, _, _ in case.bad}
        assert (bits(params) == values) == is_bad, f"step {step}"
        assert not is_bad or as_it_was(snapshot(optimizer.state_dict()), before), f"step {step}"
    assert optimizer.skipped_steps == len(case.bad)
    return bits(params)


def backward(case: Case, rank: int, optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    terms = [(p * g).sum() for p, g in zip(params, case.gradients(rank, step), strict=True) if g is not None]
    sum(terms).backward()  # type: ignore[union-attr]


@adam_first
@pytest.mark.parametrize("place", ["compressed", "others"])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"chunks": 1, "reply": "direct"}], ids=str)
def test_a_bad_gradient_of_either_stops_both(kind: str, place: str, options: dict[str, Any]) -> None:
    """The last parameter's, which is in the second group."""
    groups = GROUPS if place == "others" else GROUPS[::-1]
    bad = ((3, 0, math.inf), (7, 1, math.nan), (9, 0, -math.inf))
    case = CASE.but(kind=kind, groups=groups, bad=bad, options={**OPTIONS, **options})
    assert len(set(run_ranks(2, skipped, case))) == 1


def overlapped(rank: int, size: int, case: Case) -> tuple[bytes, bool]:
    found, early = [], False
    for overlap in (True, False):
        params = case.parameters()
        optimizer = case.but(options={**case.options, "overlap": overlap}).build(params, group())
        for step in range(1, case.steps + 1):
            optimizer.zero_grad()
            backward(case, rank, optimizer, params, step)
            early |= optimizer.overlap.in_flight
            optimizer.step()
        found.append((bits(params), snapshot(optimizer.state_dict())))
    assert found[0][0] == found[1][0] and as_it_was(found[0][1], found[1][1])
    return found[0][0], early


@adam_first
@pytest.mark.parametrize("each", [1, 2])
def test_messages_may_leave_in_backward(kind: str, each: int) -> None:
    found = run_ranks(2 * each, overlapped, CASE.but(kind=kind, each=each))
    assert len({own for own, _ in found}) == 1 and all(early for _, early in found)


def clipped(rank: int, size: int, case: Case) -> list[tuple[float, float]]:
    """The norm that the optimizer finds in each step, and that of the equations."""
    params, found = case.parameters(), []
    optimizer = case.build(params, group())
    for step in range(1, case.steps + 1):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = g
        norm = float(optimizer.clip_grad_norm_(1.0))
        nodes = [case.node_gradients(node, step) for node in range(size // case.each)]
        mean = [np.mean([np.asarray(of[i]) for of in nodes], axis=0) for i in range(len(params))]
        squares = sum(float((a**2).sum()) for a in halves(mean)[1])
        if step <= case.options["freeze_step"]:
            squares += sum(float((a**2).sum()) for a in halves(mean)[0])
        else:
            squares += np.mean([sum(float((np.asarray(g) ** 2).sum()) for g in halves(of)[0]) for of in nodes])
        found.append((norm, math.sqrt(squares)))
        optimizer.step()
    return found


@adam_first
@pytest.mark.parametrize("each", [1, 2])
def test_one_norm_of_both(kind: str, each: int) -> None:
    for found in run_ranks(2 * each, clipped, CASE.but(kind=kind, each=each)):
        for norm, expected in found:
            assert norm == pytest.approx(expected, rel=1e-5)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))


def in_ddp(rank: int, size: int, kind: str, attached: bool, overlap: bool) -> list[bytes]:
    net = model()
    groups = [{"params": net[:-1].parameters()}, {"params": net[-1].parameters(), "compress": False}]
    options = options_of(kind, {**OPTIONS, **(SPACED if kind == "ZeroOneAdam" else {})})
    optimizer = build(kind, groups, lr=1e-2, block_size=32, overlap=overlap, process_group=group(), **options)
    module: nn.Module = net
    if attached:
        module = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.003)
        onebit.attach(module, optimizer)
    found = []
    for step in range(12):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        (module(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        found.append(bits(net.parameters()))
    assert optimizer.compressing
    return found


@adam_first
@pytest.mark.parametrize("overlap", [False, True])
def test_within_ddp_and_without(kind: str, overlap: bool) -> None:
    """Of two ranks a mean is the same, whoever adds."""
    within, without = run_ranks(2, in_ddp, kind, True, overlap), run_ranks(2, in_ddp, kind, False, False)
    assert within[0] == within[1] == without[0] == without[1]


# States


def resumed(rank: int, size: int, case: Case, at: int, folder: str) -> None:
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, at)
    state = snapshot(optimizer.state_dict())
    assert optimizer.compressing == (at > 4)
    again = [nn.Parameter(p.detach().clone()) for p in params]
    other = case.build(again, group())
    file = Path(folder) / f"{rank}.pt"
    torch.save(state, file)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same(snapshot(other.state_dict()), state)
    run(case, rank, optimizer, params, at + 1, at + 4)
    run(case, rank, other, again, at + 1, at + 4)
    assert bits(params) == bits(again)


@adam_first
@pytest.mark.parametrize("at", [3, 4, 7])
def test_a_run_goes_on_bit_for_bit(kind: str, at: int, tmp_path: Path) -> None:
    run_ranks(2, resumed, CASE.but(kind=kind, options={**OPTIONS, "chunks": "auto"}), at, str(tmp_path))


def saved(rank: int, size: int, case: Case) -> tuple[dict[str, Any], list[torch.Tensor]]:
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, 7)
    return snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]


def loaded(
    rank: int, size: int, case: Case, states: list[Any], values: list[torch.Tensor]
) -> tuple[dict[str, Any], bytes]:
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = case.build(params, group())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(onebit.merge_states(states))
    state = snapshot(optimizer.state_dict())
    run(case, rank, optimizer, params, 8, 10)
    return state, bits(params)


@kinds
def test_another_number_of_ranks_keeps_the_moments(kind: str) -> None:
    case = CASE.but(kind=kind)
    found = run_ranks(2, saved, case)
    states, values = [state for state, _ in found], found[0][1]
    later = run_ranks(3, loaded, case, states, values)
    assert len({end for _, end in later}) == 1
    for state, _ in later:
        for key in (2, 3):  # in the order of the groups
            for name in ("exp_avg", "exp_avg_sq"):
                assert bits([state["state"][key][name]]) == bits([states[0]["state"][key][name]])
            assert not any("residual" in name or "momentum_bits" in name for name in state["state"][key])
    assert any("residual" in name for name in states[0]["state"][0])


@kinds
def test_adamw_goes_on_with_their_moments(kind: str) -> None:
    (state, _), _ = run_ranks(2, saved, CASE.but(kind=kind))
    theirs = onebit.adamw_state(state)
    for key in (2, 3):
        for name in ("exp_avg", "exp_avg_sq"):
            assert bits([theirs["state"][key][name]]) == bits([state["state"][key][name]])
    assert not any("compress" in g for g in theirs["param_groups"])
    params = CASE.parameters()
    torch.optim.AdamW([{"params": list(half)} for half in halves(params)]).load_state_dict(theirs)


def saved_to_a_folder(rank: int, size: int, case: Case, folder: str) -> None:
    params = case.parameters()
    net, optimizer = nn.ParameterList(params), case.build(params, group())
    run(case, rank, optimizer, params, 1, 7)
    onebit.save(folder, net, optimizer)
    again = [nn.Parameter(torch.zeros_like(p)) for p in params]
    other = case.build(again, group())
    onebit.load(folder, nn.ParameterList(again), other)
    run(case, rank, optimizer, params, 8, 10)
    run(case, rank, other, again, 8, 10)
    assert bits(params) == bits(again)


@kinds
def test_a_checkpoint(kind: str, tmp_path: Path) -> None:
    run_ranks(2, saved_to_a_folder, CASE.but(kind=kind), str(tmp_path))


def another_choice(rank: int, size: int, kind: str, at: int) -> None:
    case = CASE.but(kind=kind)
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, at)
    other = case.but(groups=({}, {})).build(case.parameters(), group())
    if at <= 3:
        other.load_state_dict(snapshot(optimizer.state_dict()))
        assert other.param_groups[1]["compress"] is True
    else:
        with pytest.raises(ValueError) as caught:
            other.load_state_dict(snapshot(optimizer.state_dict()))
        assert_message(caught, "compress=False in param group 1", "it is True", "Give the group what it had")


@kinds
@pytest.mark.parametrize("at", [3, 7])
def test_a_state_of_another_choice_is_for_stage_1_alone(kind: str, at: int) -> None:
    run_ranks(2, another_choice, kind, at)


# What it shows


def reported(rank: int, size: int) -> tuple[float, float]:
    params = CASE.parameters()
    optimizer = CASE.build(params, group())
    run(CASE, rank, optimizer, params, 1, 10)
    return optimizer.report().sent, optimizer.wire_bytes


def test_the_report_counts_what_they_send() -> None:
    """Of two ranks an all-reduce sends 4 B an element."""
    for sent, messages in run_ranks(2, reported):
        assert sent - messages == 4 * (4 * sum(ELEMENTS) + 6 * ELEMENTS[1])


def diverged(rank: int, size: int) -> None:
    case = CASE.but(options={**OPTIONS, "check_every": 1})
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, 7)
    if rank == 1:
        optimizer.current.uncompressed[0]["exp_avg"][:1] += 1
    with pytest.raises(onebit.DivergenceError, match="exp_avg of parameter"):
        take(case, rank, optimizer, params, 8)


def test_the_watch_looks_at_them_too() -> None:
    run_ranks(2, diverged)


@kinds
def test_diagnostics_have_all(kind: str) -> None:
    params = CASE.parameters()
    optimizer = CASE.but(kind=kind).build(params)
    run(CASE, 0, optimizer, params, 1, 6)
    found = list(optimizer.diagnostics().values())  # in the order of the groups
    assert all("momentum_scale" in own for own in found[:2]) and not any("momentum_scale" in own for own in found[2:])
    assert all(own["variance_norm"] > 0 for own in found[2:])


@kinds
def test_nobody_is_warned_of_coordinates_that_have_a_variance_to_come(kind: str) -> None:
    case = CASE.but(kind=kind, untouched=((1, 3, 99),))  # of the second group
    params = case.parameters()
    optimizer = case.build(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(case, 0, optimizer, params, 1, 8)
    other = case.but(untouched=((0, 3, 99),))
    with pytest.warns(UserWarning, match="coordinates without a variance"):
        run(other, 0, other.build(again := other.parameters()), again, 1, 8)


# Errors


@kinds
@pytest.mark.parametrize("value", [None, 1, "no", 0.5])
def test_true_or_false(kind: str, value: Any) -> None:
    first, second = parameters((3,), (4,))
    with pytest.raises(ValueError) as caught:
        build(kind, [{"params": [first]}, {"params": [second], "compress": value}])
    assert_message(caught, f"compress={value!r}", "True", "False")


@kinds
def test_something_must_be_left_to_compress(kind: str) -> None:
    with pytest.raises(ValueError, match="nothing would be compressed"):
        build(kind, [{"params": parameters((3,)), "compress": False}])
    first, second = parameters((3,), (4,))
    first.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would be compressed"):
        build(kind, [{"params": [first]}, {"params": [second], "compress": False}])


def test_not_with_local_steps() -> None:
    first, second = parameters((3,), (4,))
    groups = [{"params": [first]}, {"params": [second], "compress": False}]
    with pytest.raises(ValueError, match="local_step_scaler"):
        onebit.ZeroOneAdam(groups, var_freeze_step=4, local_step_scaler=2)


@kinds
def test_a_group_that_is_switched(kind: str) -> None:
    """In stage 1 it holds from the next step on, with the moments there are; later it is an error."""
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
        take(case, 0, optimizer, params, 9)


def differing(rank: int, size: int) -> None:
    case = CASE.but(groups=({}, {"compress": rank == 0}))
    params = case.parameters()
    optimizer = case.build(params, group())
    with pytest.raises(ValueError, match="compress"):
        take(case, rank, optimizer, params, 1)


def test_ranks_that_differ() -> None:
    run_ranks(2, differing)

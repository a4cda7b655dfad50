"""What a program around the optimizer may do: defaults of torch, copies, groups made late, gradients dropped."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.collectives.transport.protocol import LocalTransport
from tests.internals import forget_process_group
from tests.onebit.runs import Case, arrays, bits, build, freezing_kinds, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks


@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_a_default_dtype_changes_nothing(kind: str, dtype: torch.dtype, scale: str) -> None:
    case = Case(kind, options={"freeze_step": 3, "scale": scale}, groups=({}, {"betas": (0.8, 0.99)}))
    found = []
    for default in (torch.float32, dtype):
        params = case.parameters()
        torch.set_default_dtype(default)
        try:
            optimizer = case.build(params)
            run(case, 0, optimizer, params, 1, 7)
            optimizer.clip_grad_norm_(1.0)
            state = snapshot(optimizer.state_dict())
            optimizer.load_state_dict(state)
            run(case, 0, optimizer, params, 8, 10)
            optimizer.diagnostics()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append((bits(params), state))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


@kinds
@pytest.mark.parametrize("what", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(kind: str, what: Any) -> None:
    case = Case(kind)
    with pytest.raises(TypeError, match=r"can't be copied or pickled.*state_dict"):
        what(case.build(case.parameters()))


def dropping_clipped_gradients(rank: int, size: int, kind: str, how: str) -> list[bytes]:
    """Stage 1 without DDP; after one clip the gradients are set to None by hand."""
    case = Case(kind, options={"freeze_step": 50})
    params = case.parameters()
    optimizer = case.build(params, group())
    after = []
    for step in range(1, 7):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = g
        optimizer.clip_grad_norm_(0.01 if step == 3 else 1e6)
        if step == 3:
            for p in params:
                p.grad = None
            continue
        if how == "more" and step == 5:
            for p, g in zip(params, case.gradients(rank, 9), strict=True):
                p.grad.add_(g)
        optimizer.step()
        after.append(bits(params))
    return after


@kinds
@pytest.mark.parametrize("how", ["dropped", "more"])
def test_gradients_dropped_after_a_clip_are_averaged_anew(kind: str, how: str) -> None:
    """The next ones are averaged and checked anew, and so are those to which more was added."""
    first, *others = run_ranks(3, dropping_clipped_gradients, kind, how)
    assert all(other == first for other in others)


@kinds
def test_a_clip_is_not_used_for_other_gradients(kind: str) -> None:
    case = Case(kind, options={"freeze_step": 50})
    clipped, plain = case.parameters(), case.parameters()
    one, other = case.build(clipped), case.build(plain)
    for p, g in zip(clipped, case.gradients(0, 9), strict=True):
        p.grad = g
    one.clip_grad_norm_(1e-3)
    for p in clipped:
        p.grad = None
    run(case, 0, one, clipped, 1, 3)
    run(case, 0, other, plain, 1, 3)
    assert bits(clipped) == bits(plain)


@kinds
def test_a_new_gradient_in_the_memory_of_a_checked_one_is_checked(kind: str) -> None:
    p = nn.Parameter(torch.ones(64))
    optimizer = build(kind, [p], freeze_step=50)
    for _ in range(20):  # memory is reused now and then
        p.grad = torch.ones(64)
        optimizer.clip_grad_norm_(1.0)
        p.grad = None
        p.grad = torch.full((64,), math.nan)
        optimizer.step()
    assert optimizer.skipped_steps == 20
    assert bool(torch.isfinite(p).all())


@kinds
def test_two_clips_are_one_after_the_other(kind: str) -> None:
    case = Case(kind, options={"freeze_step": 50})
    twice, once = case.parameters(), case.parameters()
    one, other = case.build(twice), case.build(once)
    for params in (twice, once):
        for p, g in zip(params, case.gradients(0, 1), strict=True):
            p.grad = g
    raw = one.clip_grad_norm_(1.0)
    assert raw > 1
    assert one.clip_grad_norm_(math.inf) == pytest.approx(1.0, rel=1e-4)
    other.clip_grad_norm_(1.0)
    one.step()
    other.step()
    for a, b in zip(arrays(twice), arrays(once), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@kinds
def test_a_load_that_fails_leaves_the_groups(kind: str) -> None:
    case = Case(kind, options={"freeze_step": 50})
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 3)
    before = snapshot(optimizer.state_dict())
    for name, value in (("betas", (0.9, 1.5)), ("lr", -1.0), ("eps", math.nan)):
        state = snapshot(before)
        state["param_groups"][0][name] = value
        with pytest.raises(ValueError, match=name):
            optimizer.load_state_dict(state)
        assert same(before, snapshot(optimizer.state_dict()))


def late_group(rank: int, size: int, kind: str) -> tuple[int, bytes]:
    """The optimizer is made before it is known which group it is for."""
    case = Case(kind, steps=6, options={"freeze_step": 3})
    params = case.parameters()
    optimizer = case.build(params, LocalTransport())
    forget_process_group(optimizer)
    run(case, rank, optimizer, params, 1, case.steps)
    return optimizer.setup.topology.replicas.size, bits(params)


@kinds
def test_a_process_group_that_was_made_later_is_found(kind: str) -> None:
    found = run_ranks(8, late_group, kind)
    assert {size for size, _ in found} == {8}
    assert len({values for _, values in found}) == 1


def attach_another_model(rank: int, size: int, kind: str) -> str:
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    ddp = DistributedDataParallel(one, process_group=group())
    optimizer = build(kind, [*one.parameters(), *other.parameters()], process_group=group())
    try:
        onebit.attach(ddp, optimizer)
    except ValueError as error:
        return str(error)
    return ""


@kinds
def test_attaching_with_parameters_of_another_model_is_an_error(kind: str) -> None:
    for text in run_ranks(2, attach_another_model, kind):
        assert "does not hold parameter" in text and "DDP would not average" in text


@kinds
def test_frozen_parameters_may_be_of_any_kind(kind: str) -> None:
    frozen = [nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)]
    frozen += [nn.Parameter(torch.ones(3, 4).t(), requires_grad=False)]
    trained = nn.Parameter(torch.ones(5))
    optimizer = build(kind, [*frozen, trained], weight_decay=0.5)
    trained.grad = torch.ones(5)
    optimizer.step()
    assert bool((frozen[1] == 1).all()) and bool((trained != 1).all())


def warning_as_error(rank: int, size: int, kind: str) -> str:
    """A freeze warning on rank 0, where warnings are errors; the other ranks go on to the next step's collectives."""
    import warnings

    case = Case(kind, options={"freeze_step": 2}, untouched=((0, 3, 50),))
    params = case.parameters()
    optimizer = case.build(params, group())
    text = ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 5):
            try:
                take(case, rank, optimizer, params, step)
            except UserWarning as warning:
                text = str(warning)
    assert optimizer.steps == 4
    return text


@freezing_kinds
def test_warnings_that_are_errors_leave_no_rank_waiting(kind: str) -> None:
    first, second = run_ranks(2, warning_as_error, kind)
    assert "coordinates without a variance" in first
    assert second == ""


@kinds
@pytest.mark.parametrize("freeze_step", [50, 2], ids=["stage 1", "stage 2"])
def test_values_written_to_a_16_bit_parameter_are_kept(kind: str, freeze_step: int) -> None:
    case = Case(kind, dtype="bfloat16", options={"freeze_step": freeze_step})
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 4)
    others = [optimizer.state[p]["master"].clone() for p in params[1:]]
    with torch.no_grad():
        params[0].fill_(5.0)
    take(case, 0, optimizer, params, 5)
    assert float((params[0].detach() - 5).abs().max()) < 0.5
    for p, before in zip(params[1:], others, strict=True):
        assert float((optimizer.state[p]["master"] - before).abs().max()) < 0.5
        assert not same(optimizer.state[p]["master"], optimizer.state[p]["master"].bfloat16().float())

"""Steps whose gradients are scaled, accumulated or clipped, what is checked of them, and what a step sends.

test_contract.py has skipped and clipped steps of every optimizer.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.collectives.transport.protocol import LocalTransport
from tests.onebit.optim.contract import give, started
from tests.onebit.optim.test_parameter_changes import step_refused
from tests.onebit.runs import Case, arrays, bits, build, kinds, on_ranks, run, snapshot, take, unchanged
from tests.ranks import group


@pytest.mark.parametrize(
    ("kind", "unscale", "missing"),
    [
        ("OneBitAdam", False, False),
        ("OneBitLamb", True, False),
        ("ZeroOneAdam", True, False),
        ("OneBitAdam", False, True),
        ("ZeroOneAdam", False, True),
    ],
)
@on_ranks(2)
def test_grad_scaler_with_an_inf_on_one_rank_in_either_stage(
    rank: int, kind: str, unscale: bool, missing: bool
) -> bytes:
    """All back off where one has met it, and all grow; the run is one without scaling and without those steps. Scales
    are powers of 2, so that both are equal bit for bit. missing: the other rank has no gradients at all then, nor in
    steps in which all are finite."""
    case, infinite, scales = Case(kind, options={"freeze_step": 5}), (3, 8), []
    case = case.but(missing=tuple((step, 0, p) for step in (3, 4, 8, 9) for p in range(4)) if missing else ())
    (params, optimizer), (plain, other) = (started(case, 0, rank, 2) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    scaler.scale(torch.zeros(()))
    for step in range(1, 13):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = None if g is None else g * scaler.get_scale()
        if step in infinite:
            optimizer.begin_step()
            before = snapshot(optimizer.state_dict()), bits(params)
            if rank == 1:
                params[0].grad.view(-1)[0] = math.inf
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step in infinite:
            assert unchanged(before[0], snapshot(optimizer.state_dict())) and before[1] == bits(params)
        else:
            take(case, rank, other, plain, step)
        scales.append(scaler.get_scale())
    assert optimizer.skipped_steps == len(infinite) and optimizer.compressing
    assert scales == [2.0**10] * 2 + [2.0**9] * 4 + [2.0**10] + [2.0**9] * 4 + [2.0**10]
    assert bits(params) == bits(plain)
    return bits(params)


def accumulating(rank: int, kind: str, freeze_step: int, micro: int, how: str) -> list[np.ndarray]:
    """10 steps of `micro` backward passes each, over the same 8 samples a step."""
    torch.manual_seed(5)
    model: Any = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3))
    params = list(model.parameters())
    optimizer = build(kind, params, lr=1e-2, block_size=32, freeze_step=freeze_step, process_group=group())
    if how != "alone":
        model = DistributedDataParallel(model, process_group=group(), bucket_cap_mb=0.0002)
        onebit.attach(model, optimizer)
    for step in range(10):
        source = torch.Generator().manual_seed(100 * step + rank)
        x, y = (torch.randn(8, n, generator=source) for n in (9, 3))
        for i, (a, b) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
            with model.no_sync() if how == "no_sync" and i < micro - 1 else nullcontext():
                nn.functional.mse_loss(model(a), b).div(micro).backward()
        averaged = bits(p.grad for p in params)
        optimizer.step()
        if how != "alone" and not optimizer.compressing:
            assert bits(p.grad for p in params) == averaged, "DDP has averaged them already"
        optimizer.zero_grad()
    assert optimizer.compressing == (freeze_step < 10)
    return arrays(params)


@kinds
@on_ranks(2)
def test_accumulating_gradients_equals_one_backward_pass(rank: int, kind: str) -> None:
    """With no_sync, without it, and without DDP."""
    for freeze_step in (50, 3):
        whole = accumulating(rank, kind, freeze_step, 1, "alone")
        for micro, how in ((4, "alone"), (4, "no_sync"), (4, "every pass"), (1, "every pass")):
            if (micro, how, freeze_step) == (4, "every pass", 50):
                continue  # DDP averages partial sums again and again: torch's rule, not ours
            for a, b in zip(whole, accumulating(rank, kind, freeze_step, micro, how), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=f"{freeze_step} {micro} {how}")


# Clipped, and changed after that

STAGE_1 = Case(options={"freeze_step": 50})


@pytest.mark.parametrize("how", ["zero_grad", "zeros", "by hand", "more"])
@on_ranks(3)
def test_gradients_dropped_or_changed_after_a_clip_are_averaged_anew_and_not_clipped(rank: int, how: str) -> bytes:
    """Stage 1 without DDP. More: added to those that were averaged, and their mean over ranks is that of the sum."""
    (params, one), (plain, other) = (started(STAGE_1, 0, rank, 3) for _ in range(2))
    give(STAGE_1, params, 9, rank)
    one.clip_grad_norm_(1e6 if how == "more" else 1e-3)
    if how == "by hand":
        for p in params:
            p.grad = None
    elif how != "more":
        one.zero_grad(set_to_none=how == "zero_grad")
    for p, g in zip(params, STAGE_1.gradients(rank, 1), strict=True):
        p.grad = g if p.grad is None else p.grad.add_(g)
    one.step()
    run(STAGE_1, rank, one, params, 2, 3)
    run(STAGE_1, rank, other, plain, 1, 3)
    assert how == "more" or bits(params) == bits(plain)
    return bits(params)


@on_ranks(4)
def test_gradients_of_a_node_that_are_changed_after_a_clip_are_an_error(rank: int) -> None:
    """With two levels a rank's gradient is the node's mean in its slice alone: it can't be averaged again."""
    case = Case(each=2, options={"freeze_step": 2})
    params, optimizer = started(case, 3, rank, 4)
    give(case, params, 4, rank)
    optimizer.clip_grad_norm_(1.0)
    for p in params:
        p.grad.mul_(2)
    step_refused(optimizer, params, ValueError, "changed in place after clip_grad_norm_")


def test_two_clips_are_one_after_the_other() -> None:
    (twice, one), (once, other) = started(STAGE_1, 0), started(STAGE_1, 0)
    give(STAGE_1, twice, 1)
    give(STAGE_1, once, 1)
    assert one.clip_grad_norm_(1.0) > 1
    assert one.clip_grad_norm_(math.inf) == pytest.approx(1.0, rel=1e-4)
    other.clip_grad_norm_(1.0)
    one.step()
    other.step()
    for a, b in zip(arrays(twice), arrays(once), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_clip_ends_with_its_step() -> None:
    """The hyper-parameters of stage 2 stay as they are, and nothing else would take its coefficient back."""
    case = Case(options={"freeze_step": 2})
    (params, optimizer), (plain, other) = started(case, 3), started(case, 3)
    give(case, params, 4)
    norm = optimizer.clip_grad_norm_(1e-3)
    for p, g in zip(plain, case.gradients(0, 4), strict=True):
        p.grad = g * (1e-3 / (norm + 1e-6))
    for each, own in ((optimizer, params), (other, plain)):
        each.step()
        run(case, 0, each, own, 5, 8)
    for ours, theirs in zip(params, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@kinds
def test_clipping_does_not_hide_gradients_that_are_not_finite(kind: str) -> None:
    """Nor does it those that were changed after it."""
    case = Case(kind, options={"freeze_step": 1})
    for after in (False, True):
        params, optimizer = started(case, 1)
        give(case, params, 2)
        before = bits(params)
        if not after:
            params[0].grad.mul_(math.nan)
        assert math.isnan(optimizer.clip_grad_norm_(1.0)) != after
        if after:
            params[0].grad.mul_(math.nan)
        optimizer.step()
        assert bits(params) == before and optimizer.skipped_steps == 1


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
    assert optimizer.skipped_steps == 20 and bool(p.isfinite().all())


def test_a_max_norm_that_is_not_positive_is_an_error() -> None:
    for max_norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm"):
            build("OneBitAdam").clip_grad_norm_(max_norm)


# What is sent


class Counting(LocalTransport):
    """Counts what a step sends."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_to_all(self, *of: Any) -> Any:
        self.calls.append("all_to_all")
        return super().all_to_all(*of)

    def all_gather(self, *of: Any) -> Any:
        self.calls.append("all_gather")
        return super().all_gather(*of)

    def all_max(self, values: torch.Tensor, phase: str) -> None:
        self.calls.append(f"all_max of {values.numel()}")


@pytest.mark.parametrize(
    ("kind", "chunks"), [("OneBitAdam", 1), ("OneBitAdam", 3), ("OneBitLamb", 3), ("ZeroOneAdam", 3)]
)
def test_a_step_of_stage_2_is_two_collectives_a_chunk_and_one_number(kind: str, chunks: int) -> None:
    case, transport = Case(kind, options={"freeze_step": 2, "chunks": chunks}), Counting()
    params = case.parameters()
    optimizer = case.build(params, transport)
    run(case, 0, optimizer, params, 1, 4)
    transport.calls.clear()
    take(case, 0, optimizer, params, 5)
    assert sorted(transport.calls) == ["all_gather"] * chunks + ["all_max of 1"] + ["all_to_all"] * chunks

"""What a scaler has found, gradients that are clipped or changed after that, and what a step sends.

test_contract.py has skipped, scaled and clipped steps of every optimizer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onebit.collectives.transport.protocol import LocalTransport
from onebit.optim.gradients import Gradients
from tests.onebit.optim.contract import give, started
from tests.onebit.optim.test_parameter_changes import step_refused
from tests.onebit.runs import Case, arrays, bits, build, kinds, on_ranks, run, take


def test_what_a_scaler_has_found_skips_the_step() -> None:
    case = Case(options={"freeze_step": 2})
    params, optimizer = started(case, 3)
    before = bits(params)
    for scale, found_inf in ((None, 1.0), (torch.tensor(2.0), 1.0), (torch.tensor(2.0), 0.0)):
        optimizer.grad_scale, optimizer.found_inf = scale, torch.tensor(found_inf)
        take(case, 0, optimizer, params, 4)
        assert (bits(params) == before) == (found_inf > 0)
    assert optimizer.skipped_steps == 2


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


@on_ranks(3)
def test_a_clip_of_a_dropped_batch_is_no_part_of_the_next_clip(rank: int) -> bytes:
    """Gradients are zeroed in place, which nobody tells the optimizer, and the next batch has small ones."""
    (params, one), (plain, other) = (started(STAGE_1, 0, rank, 3) for _ in range(2))
    give(STAGE_1, params, 9, rank)
    one.clip_grad_norm_(1e-3)
    for p, g in zip(params, STAGE_1.gradients(rank, 1), strict=True):
        p.grad.copy_(g)
    give(STAGE_1, plain, 1, rank)
    for optimizer in (one, other):
        optimizer.clip_grad_norm_(1e6)
        optimizer.step()
    assert bits(params) == bits(plain)
    return bits(params)


@on_ranks(4)
def test_gradients_of_a_node_that_are_changed_after_a_clip_are_an_error(rank: int) -> None:
    """A rank's gradient with two levels is the node's mean in its slice alone: it can't be averaged again."""
    case = Case(each=2, options={"freeze_step": 2})
    params, optimizer = started(case, 3, rank, 4)
    give(case, params, 4, rank)
    optimizer.clip_grad_norm_(1.0)
    for p in params:
        p.grad.mul_(2)
    step_refused(optimizer, params, ValueError, "changed in place after clip_grad_norm_")


@kinds
def test_clipping_does_not_hide_gradients_that_are_not_finite(kind: str) -> None:
    """It does not hide those that were changed after it either."""
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


def test_a_clip_of_gradients_that_are_still_scaled_has_its_part_in_the_step() -> None:
    case = Case(options={"freeze_step": 2}, groups=({}, {"lr": 2e-3}))
    (params, scaled), (plain, other) = (started(case, 0) for _ in range(2))
    for step in range(1, 5):
        give(case, params, step)
        give(case, plain, step)
        for p in params:
            p.grad.mul_(1024)
        scaled.clip_grad_norm_(0.1 * 1024)
        scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
        assert float(other.clip_grad_norm_(0.1)) > 0.1
        scaled.step()
        other.step()
    for a, b in zip(arrays(params), arrays(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


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


def test_ddps_hook_averages_over_a_node_what_the_exchange_does_not() -> None:
    """A bucket that it leaves to the step leaves those after it, too."""
    gradients = Gradients(torch.device("cpu"))
    assert [gradients.claim_node_mean(by_exchange) for by_exchange in (False, True, False)] == [True, False, False]


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
    params, optimizer = case.made(transport)
    run(case, 0, optimizer, params, 1, 4)
    transport.calls.clear()
    take(case, 0, optimizer, params, 5)
    assert sorted(transport.calls) == ["all_gather"] * chunks + ["all_max of 1"] + ["all_to_all"] * chunks

"""Local steps of 0/1 Adam: what they are not to break. test_zero_one.py has their numbers and errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import onebit
from tests.onebit.optim.contract import options, started
from tests.onebit.optim.test_zero_one import LOCAL as CASE
from tests.onebit.optim.zero_one_simulation import record_run
from tests.onebit.runs import Case, bits, run, take
from tests.ranks import run_ranks


def a_rate_of_zero(rank: int, size: int, case: Case, first: int) -> tuple[list[bytes], bool]:
    (params, optimizer), found = started(case, 0, rank, size), []
    for step in range(1, case.steps + 1):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.0 if first <= step <= first + 3 else 1e-2)
        take(case, rank, optimizer, params, step)
        if optimizer.synchronized:
            found.append(bits(params))
    return found, all(bool(p.isfinite().all()) for p in params)


@pytest.mark.parametrize("first", [9, 13])
def test_a_rate_of_zero_that_is_a_tensor(first: int) -> None:
    """In the first local steps, and later."""
    found = run_ranks(2, a_rate_of_zero, CASE, first)
    assert found[0] == found[1] and found[0][1]


def a_rate_that_rises_again(rank: int, size: int, case: Case, low: float) -> float:
    """The largest step of a coordinate after an interval of small steps, in units of the rate."""
    (params, optimizer), largest = started(case, 0, rank, size), 0.0
    for step in range(1, 41):
        optimizer.param_groups[0]["lr"] = low if 17 <= step <= 20 else 1e-2
        if step == 23:
            optimizer.synchronize()  # after two steps, as if the interval had been shorter
        before = [p.detach().clone() for p in params]
        take(case, rank, optimizer, params, step)
        moved = max(float((p - b).abs().max()) for p, b in zip(params, before, strict=True) if p.numel())
        largest = max(largest, moved / 1e-2) if step > 20 else largest
    return largest


def test_momentum_does_not_grow_where_the_rate_falls_and_rises() -> None:
    """What was left out when steps were larger is not momentum."""
    case = CASE.but(missing=())
    usual, lowered = (run_ranks(2, a_rate_that_rises_again, case, low)[0] for low in (1e-2, 1e-5))
    assert lowered < 2 * usual, f"steps of {lowered:.1f} times the rate, {usual:.1f} where it stays"


def changed_by_hand(rank: int, size: int, case: Case) -> tuple[bytes, float]:
    params, optimizer = started(case, 16, rank, size)
    with torch.no_grad():
        for p in params:
            p.fill_(5.0)
    run(case, rank, optimizer, params, 17, 20)
    return bits(params), min(float(p.min()) for p in params if p.numel())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_user_writes_where_ranks_agree_stays(dtype: str) -> None:
    found = run_ranks(2, changed_by_hand, CASE.but(dtype=dtype))
    assert found[0] == found[1] and found[0][1] > 4


def between_syncs(rank: int, size: int, case: Case) -> list[Any]:
    (params, optimizer), found = started(case, 14, rank, size), []
    for refused in (optimizer.state_dict, partial(onebit.save, "nowhere", nn.Linear(1, 1), optimizer)):
        with pytest.raises(ValueError) as caught:
            refused()
        found.append(str(caught.value))
    optimizer.synchronize()
    end = bits(params)
    optimizer.synchronize()
    assert end == bits(params) and optimizer.synchronized
    optimizer.state_dict()
    return [found, end, optimizer.schedule]


def test_between_syncs_nothing_is_saved() -> None:
    found = run_ranks(2, between_syncs, CASE)
    assert found[0] == found[1]
    for text in found[0][0]:
        assert "optimizer.synchronized" in text and "optimizer.synchronize()" in text
    assert found[0][2].kind == "local" and found[0][2].next_sync == 16


def at_last_sync(rank: int, size: int, case: Case) -> list[Any]:
    (params, optimizer), found = started(case, 0, rank, size), []
    for step in range(1, 20):
        take(case, rank, optimizer, params, step)
        own = bits(params)
        with optimizer.at_last_sync():
            found.append((bits(params), own == bits(params)))
            if step == 15:
                other = case.build(case.parameters()).state_dict()
                for refused in (
                    optimizer.step, optimizer.synchronize, partial(optimizer.load_state_dict, other),
                    optimizer.at_last_sync().__enter__,
                ):  # fmt: skip
                    with pytest.raises(ValueError, match="within at_last_sync"):
                        refused()
        assert bits(params) == own
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_of_the_last_sync(dtype: str) -> None:
    """It is that of all ranks, and looking at it changes nothing."""
    case = CASE.but(dtype=dtype, steps=19)
    found = run_ranks(2, at_last_sync, case)
    plain = run_ranks(2, record_run, case)
    for i, ((one, unmoved), (other, _)) in enumerate(zip(*found, strict=True)):
        last = max(j for j in range(i + 1) if j not in plain[0].alone or not plain[0].alone[j].taken)
        assert one == other == plain[0].bits[last] and unmoved == (last == i)


def watched(rank: int, size: int, case: Case, damaged: int) -> int:
    """The step at which a rank's damaged parameter is found."""
    params, optimizer = started(case, 0, rank, size)
    for step in range(1, case.steps + 1):
        try:
            take(case, rank, optimizer, params, step)
        except onebit.DivergenceError:
            return step
        if step == damaged and rank == 1:
            [part] = optimizer.current.parts
            part.state["exp_avg_sq"][3] *= 1.5
    return 0


def test_the_watch_waits_for_a_sync() -> None:
    case = options(CASE, check_every=5)
    assert run_ranks(2, watched, case, 0) == [0, 0]
    assert run_ranks(2, watched, case, 12) == [16, 16]  # due with step 15

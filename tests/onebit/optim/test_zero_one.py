"""0/1 Adam, with local steps and without: its schedules, every kind of step against the float64 oracle, other numbers
of ranks, what local steps are not to break, warnings and errors. test_contract.py has what holds for all optimizers."""

from __future__ import annotations

import math
import tracemalloc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onebit
from onebit.optim.schedule import SyncSchedule, VarianceSchedule
from tests import internals
from tests.checkpoints import Holder
from tests.onebit.optim import simulation
from tests.onebit.optim.contract import options, started
from tests.onebit.optim.simulation import GROUPS, record_run
from tests.onebit.optim.zero_one_simulation import ZeroOneSimulation
from tests.onebit.runs import Case, bits, on_ranks, on_warnings, refused, run, snapshot, step_by, take
from tests.oracle import zero_one
from tests.ranks import run_ranks

SHAPES = ((7, 9), (33,), (0,), (2,), (130,), (1,))
LATER = ((6, 0, 0), (9, 0, 1), (11, 0, 4))
CASE = Case("ZeroOneAdam", SHAPES, steps=24, options={"var_update_scaler": 2}, missing=((1, 0, 1), (3, 0, 4), *LATER))
# Steps 1 to 5 are full but the fourth, 6 to 8 have 1 bit. Syncs: 10, 12, 16, 20, 24.
LOCAL = options(
    CASE.but(steps=26, missing=((1, 0, 1), *LATER, (14, 1, 0))),
    var_freeze_step=5, local_step_scaler=3, local_step_clipper=4,
)  # fmt: skip


@pytest.mark.parametrize("kappa", [1, 2, 3, 4, 7])
def test_the_schedule_of_full_steps(kappa: int) -> None:
    for last in (None, 1, 3, 9, 40):
        schedule = VarianceSchedule(kappa, last)
        full = zero_one.full_steps(4000, kappa, last)
        assert [t for t in range(1, 2001) if schedule.is_full(t)] == [t for t in full if t <= 2000]
        assert schedule.dense_start == zero_one.dense_start(kappa, last)
        for t in (1, 2, 5, 17, 300, 2000):
            assert schedule.next_full(t) == next((f for f in full if f > t), None)
            for beta2 in (0.999, 0.95, 0.5):
                found = schedule.decay(t, beta2), schedule.weight(t, beta2)
                assert found == pytest.approx(zero_one.weight_at(t, beta2, kappa, last), rel=1e-12)


def test_a_beta2_that_changes_with_every_step_takes_no_memory() -> None:
    schedule, fixed = VarianceSchedule(4), VarianceSchedule(4).weight(1000, 0.99)
    tracemalloc.start()
    try:
        for t in range(3000):
            schedule.weight(1000, 0.9 + t * 1e-5)
            assert schedule.weight(1000, 0.99) == fixed
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("scaler", [1, 2, 3, 8])
def test_the_schedule_of_local_steps(scaler: int) -> None:
    for clipper in (1, 2, 3, 16):
        schedule, first = SyncSchedule(7, scaler, clipper), 8 + scaler
        syncs = zero_one.sync_steps(3000, 7, scaler, clipper)
        assert [t for t in range(8, 2001) if schedule.is_sync(t)] == [t for t in syncs if t <= 2000]
        assert schedule.first_local == (None if clipper == 1 else first)
        for t in range(1, 60):
            assert schedule.is_alone(t) == (clipper > 1 and t >= first)
            after = max(t, first - 1)
            assert schedule.next_sync(t) == (None if clipper == 1 else next(s for s in syncs if s > after))


# Numbers

FEW = ((0, 3, 30), (4, 40, 6), (1, 33, 6))  # without a variance: one for good, others until a full step
BAD = ((9, 1, math.nan), (10, 0, math.inf), (14, 0, math.nan), (15, 1, math.nan), (17, 0, math.inf))
GROWN = ((11, 30, 100.0),)
ROWS = {  # ranks, the case, its options
    "alone": (1, CASE, {}),
    "nothing at first": (2, CASE.but(untouched=tuple((p, 9**9, 6) for p in (0, 1, 3, 4, 5))), {"weight_decay": 0.1}),
    "three ranks": (3, CASE, {}),
    "nodes": (4, CASE.but(each=2), {"chunks": 2}),
    "tensor scale": (2, CASE, {"scale": "tensor"}),
    "direct": (3, CASE, {"reply": "direct"}),
    "mean sizes, direct": (2, CASE, {"norm": "l1", "reply": "direct"}),
    "floors": (2, CASE, {"variance_floor": 0.3, "chunks": 3}),
    "hold": (3, CASE, {"zero_variance": "hold", "scale": "tensor", "norm": "l2"}),
    "frozen": (2, CASE, {"var_freeze_step": 7, "bias_correction": False}),
    "frozen in the dense start": (1, CASE, {"var_freeze_step": 2}),
    "local, alone": (1, LOCAL, {}),
    "shortened": (2, CASE.but(groups=GROUPS), {"update_limit": 0.4, "chunks": 2}),
    "direct, shortened": (3, CASE, {"update_limit": 0.4, "reply": "direct"}),
    "nodes, shortened": (4, CASE.but(each=2), {"update_limit": 0.4, "scale": "tensor", "norm": "l1"}),
    "local, shortened": (3, LOCAL.but(groups=GROUPS), {"update_limit": 0.2, "variance_floor": 0.01}),
    "local, nodes, shortened": (4, LOCAL.but(each=2), {"update_limit": 0.2, "chunks": 2}),
    "grown": (3, CASE.but(groups=GROUPS, grown=GROWN), {"update_limit": "auto"}),
    "nodes, grown": (4, CASE.but(each=2, grown=GROWN), {"update_limit": "auto", "reply": "direct"}),
    "local, grown": (2, LOCAL.but(groups=GROUPS, grown=GROWN), {"update_limit": "auto"}),
    "local, nodes": (4, LOCAL.but(each=2), {"chunks": 2}),
    "local, direct": (3, LOCAL, {"reply": "direct"}),
    "local, floors": (2, LOCAL, {"variance_floor": 0.3, "chunks": 3}),
    "local, hold": (2, LOCAL, {"zero_variance": "hold", "scale": "tensor", "norm": "l2"}),
    "local, no correction": (2, LOCAL, {"bias_correction": False, "weight_decay": 0.1}),
    "local, from the dense start on": (3, LOCAL, {"var_freeze_step": 2, "local_step_scaler": 1}),
    "local, left out by a rank": (2, LOCAL.but(bad=BAD, missing=()), {}),
    "float16": (1, CASE.but(dtype="float16"), {}),
    "local, bfloat16": (1, LOCAL.but(dtype="bfloat16"), {}),
    "local, left out, tensor scale": (2, LOCAL.but(bad=BAD, missing=()), {"scale": "tensor"}),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_step_is_the_oracles(name: str) -> None:
    """A rank leaves out what is not finite: in the first local step, a sync, and between. Another exchange comes where
    nobody planned it."""
    ranks, case, own = ROWS[name]
    case = options(case, **own)
    if not (case.groups != ({},) or case.each > 1 or case.bad or case.untouched):
        case = case.but(untouched=FEW)
    extra_syncs = (15,) if "local" in name and case.untouched else ()
    reasons = simulation.check(case, simulation.on_ranks(ranks, record_run, case, extra_syncs), ZeroOneSimulation)
    assert ("shortened" in reasons) == ("update_limit" in own)


# Another number of ranks


def saved(rank: int, size: int, case: Case, last: int) -> dict[str, Any]:
    params, optimizer = started(case, last, rank, size)
    found = to_send(optimizer, case)
    optimizer.synchronize()
    return {"state": snapshot(optimizer.state_dict()), "x": [p.detach().clone() for p in params], "found": found}


def to_send(optimizer: Any, case: Case) -> list[list[torch.Tensor]]:
    """What this rank would send of zero gradients, by parameter; with local steps what is left out, and m."""
    [state], [exchange] = internals.states(optimizer), internals.exchanges(optimizer)
    [m] = internals.last_momentum(optimizer)
    gathered = exchange.gathered_server_residual()
    left_out = exchange.residual.left_out() + (0 if gathered is None else gathered)
    kept = [state.cut(left_out, i) for i in range(len(m))]
    if "local_step_scaler" in case.options:
        return [kept, [each.clone() for each in m]]
    return [[e + 0.9 * m for e, m in zip(kept, m, strict=True)]]


def loaded(rank: int, size: int, case: Case, saved: Any) -> tuple[int, list[list[torch.Tensor]], bytes]:
    """What it would send, with local steps its own momentum after one, and where it ends."""
    params, optimizer = started(case, 0, rank, size)
    for p, x in zip(params, saved["x"], strict=True):
        p.data.copy_(x)
    optimizer.load_state_dict(saved["state"])
    schedule, found = optimizer.schedule, to_send(optimizer, case)
    local = "local_step_scaler" in case.options
    if local:
        step_by(optimizer, torch.zeros_like)
        [state] = internals.states(optimizer)
        found.append([state.view("own_momentum", i).clone() for i in range(len(params))])
    run(case.but(missing=()), rank, optimizer, params, schedule.step + local, 26)
    if local:
        optimizer.synchronize()
    return schedule.step, found, bits(params)


def mean_of(ranks: list[list[list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
    """Average over ranks."""
    return [[torch.stack(of).mean(0) for of in zip(*each, strict=True)] for each in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("case", "last", "more"),
    [
        (CASE, 4, 1e-3), (CASE, 5, 1e-3),
        *((LOCAL, last, 1e-5) for last in (8, 10, 12)), (options(LOCAL, reply="direct"), 12, 1e-5),
    ],
    ids=["1 bit", "full", "before local steps", "a sync", "later", "direct"],
)  # fmt: skip
def test_another_number_of_ranks_goes_on_with_all_that_was_left_out(case: Case, last: int, more: float) -> None:
    """The mean of residuals, and momentum, are as they were before the save."""
    states, found = run_ranks(2, saved, case, last), []
    before = mean_of([state["found"] for state in states])
    for ranks in (2, 1, 3):
        other = options(case, reply=1) if ranks == 1 else case
        own = simulation.on_ranks(ranks, loaded, other, states[-1])
        assert all(one[0] == last + 1 and one[2] == own[0][2] for one in own)
        found.append(mean_of([one[1] for one in own]))
    assert min(max(float(e.abs().max()) for e in each if e.numel()) for each in found[0]) > more
    tolerance = {"rtol": 1e-5, "atol": 1e-6 if case is CASE else 1e-7}
    for other in found:
        for ours, theirs in zip([*before, *found[0][len(before) :]], other, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, **tolerance)


# What local steps are not to break


@pytest.mark.parametrize("first", [9, 13])
@on_ranks(2)
def test_a_rate_of_zero_that_is_a_tensor(rank: int, size: int, first: int) -> list[bytes]:
    """It comes in the first local steps, and later."""
    (params, optimizer), found = started(LOCAL, 0, rank, size), []
    for step in range(1, LOCAL.steps + 1):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.0 if first <= step <= first + 3 else 1e-2)
        take(LOCAL, rank, optimizer, params, step)
        if optimizer.synchronized:
            found.append(bits(params))
    assert all(bool(p.isfinite().all()) for p in params)
    return found


def a_rate_that_rises_again(rank: int, size: int, case: Case, low: float) -> float:
    """The largest step of a element after an interval of small steps, in units of the rate."""
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
    case = LOCAL.but(missing=())
    usual, lowered = (run_ranks(2, a_rate_that_rises_again, case, low)[0] for low in (1e-2, 1e-5))
    assert lowered < 2 * usual, f"steps of {lowered:.1f} times the rate, {usual:.1f} where it stays"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_ranks(2)
def test_what_a_user_writes_where_ranks_agree_stays(rank: int, size: int, dtype: str) -> bytes:
    case = LOCAL.but(dtype=dtype)
    params, optimizer = started(case, 16, rank, size)
    with torch.no_grad():
        for p in params:
            p.fill_(5.0)
    run(case, rank, optimizer, params, 17, 20)
    assert min(float(p.min()) for p in params if p.numel()) > 4
    return bits(params)


@pytest.mark.parametrize("by_save", [False, True])
@on_ranks(2)
def test_between_syncs_nothing_is_saved(rank: int, size: int, by_save: bool, tmp_path: Path) -> bytes:
    """onebit.save synchronizes itself."""
    params, optimizer = started(LOCAL, 14, rank, size)
    with refused(ValueError, "optimizer.synchronized", "optimizer.synchronize()"):
        optimizer.state_dict()
    if by_save:
        onebit.save(tmp_path, Holder(params), optimizer)
    else:
        optimizer.synchronize()
    end = bits(params)
    optimizer.synchronize()
    assert end == bits(params) and optimizer.synchronized
    optimizer.state_dict()
    assert optimizer.schedule.kind == "local" and optimizer.schedule.next_sync == 16
    return end


@on_ranks(2)
def test_ranks_that_have_taken_other_numbers_of_steps_do_not_end_as_if_they_had_not(rank: int, size: int) -> None:
    params, optimizer = started(LOCAL, 14, rank, size)
    if rank:
        take(LOCAL, rank, optimizer, params, 15)
    before = bits(params)
    with refused(ValueError, "other numbers of steps ([14, 15]", "drop_last=True"):
        optimizer.synchronize()
    assert bits(params) == before and not optimizer.synchronized


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_ranks(2)
def test_the_model_of_the_last_sync(rank: int, size: int, dtype: str) -> list[bytes]:
    """It is that of all ranks, and looking at it changes nothing."""
    case = LOCAL.but(dtype=dtype, steps=19)
    (params, optimizer), found, synced = started(case, 0, rank, size), [], b""
    for after in record_run(rank, size, case):
        take(case, rank, optimizer, params, after.step)
        own = bits(params)
        synced = synced if after.fields.get("taken") else after.bits
        assert own == after.bits
        with optimizer.at_last_sync():
            found.append(bits(params))
            assert found[-1] == synced
            if after.step == 15:
                other = case.build(case.parameters()).state_dict()
                for call in (
                    optimizer.step, optimizer.synchronize, partial(optimizer.load_state_dict, other),
                    optimizer.at_last_sync().__enter__,
                ):  # fmt: skip
                    with pytest.raises(ValueError, match="within at_last_sync"):
                        call()
        assert bits(params) == own
    return found


@pytest.mark.parametrize(("damaged", "found"), [(0, None), (12, 16)])
@on_ranks(2)
def test_the_watch_waits_for_a_sync(rank: int, size: int, damaged: int, found: int | None) -> None:
    """It is due with step 15."""
    case = options(LOCAL, check_every=5)
    params, optimizer = started(case, damaged, rank, size)
    if damaged and rank == 1:
        internals.states(optimizer)[0]["exp_avg_sq"][3] *= 1.5
    run(case, rank, optimizer, params, damaged + 1, (found or case.steps + 1) - 1)
    if found:
        with pytest.raises(onebit.DivergenceError):
            take(case, rank, optimizer, params, found)


# Warnings


@pytest.mark.parametrize(
    ("last", "broken", "warned"), [(2, 0, [3]), (6, 0, [5]), (5, 0, [5]), (None, 0, []), (6, 5, [6])]
)
def test_what_will_never_have_a_variance_is_said_once(last: int | None, broken: int, warned: list[int]) -> None:
    """The first parameter has gradients of its own, the second in its first half alone, the third none before the tenth
    step. A last full step that is left out is not the last."""
    params = [nn.Parameter(torch.ones(6)) for _ in range(3)]
    optimizer, found = onebit.ZeroOneAdam(params, var_update_scaler=2, var_freeze_step=last), []
    for step in range(1, 13):
        params[0].grad, params[1].grad = torch.randn(6), torch.tensor([1.0, 1, 1, 0, 0, 0])
        params[2].grad = torch.randn(6) if step >= 10 else None
        if step == broken:
            params[0].grad[0] = torch.nan
        with on_warnings() as said:
            optimizer.step()
        for text in (each for each in said if "variance" in each):
            found.append(step)
            assert ("at the freeze" if last == 2 else "after step 5, the last one that updates it") in text
            assert "1 of group 0 (shape (6,)) (3 of 6), 2 of group 0 (shape (6,)) (6 of 6)" in text
            assert "where there are none (2 of group 0 (shape (6,))), they will not move" in text
    assert found == warned


# Errors


NAMES = ("var_update_scaler", "var_freeze_step", "local_step_scaler", "local_step_clipper")


def test_arguments_that_cannot_be() -> None:
    """There is no freeze, and local steps need a variance that stays."""
    wrong = [(ValueError, name, {"var_freeze_step": 3, name: v}) for name in NAMES for v in (0, -1, 1.5, "4", True)]
    wrong.append((ValueError, "var_freeze_step=N", {"local_step_scaler": 3}))
    wrong.append((TypeError, "'freeze_step', which is of other .*var_freeze_step=N ends", {"freeze_step": 4}))
    for error, text, own in wrong:
        with pytest.raises(error, match=text):
            onebit.ZeroOneAdam([nn.Parameter(torch.ones(2))], **own)


ENDLESS = {"var_freeze_step": None, "local_step_scaler": None}


@pytest.mark.parametrize(
    ("last", "own", "problem"),
    [
        (10, {"var_update_scaler": 3}, "var_update_scaler=2, here it is 3"),
        (4, {"var_update_scaler": 3}, "var_update_scaler=2, here it is 3"),
        (2, {"var_update_scaler": 3}, None),
        (10, {"var_freeze_step": 8}, "var_freeze_step=5, here it is 8"),
        (10, ENDLESS, "var_freeze_step=5, here it is none"),
        (4, {"var_freeze_step": 8}, None),
        (5, ENDLESS, None),
        (10, {"local_step_clipper": 2}, "local_step_clipper=4, here it is 2"),
        (8, {"local_step_scaler": None}, "local_step_scaler=3, here it is none"),
        (5, {"local_step_scaler": 7}, None),
    ],
)
def test_a_state_of_another_schedule(last: int, own: dict[str, Any], problem: str | None) -> None:
    """What it has done already has to be the same, what comes may be another."""
    case = LOCAL.but(missing=())
    params, optimizer = started(case, last)
    other = options(case, **own).build(params)
    with nullcontext() if problem is None else pytest.raises(ValueError, match=problem):
        other.load_state_dict(optimizer.state_dict())


def test_a_state_without_local_steps_where_there_are_some() -> None:
    _, optimizer = started(CASE.but(options={"var_update_scaler": 2, "var_freeze_step": 5}), 12)
    with pytest.raises(ValueError, match="local_step_scaler=none, here it is 3"):
        LOCAL.build(LOCAL.parameters()).load_state_dict(optimizer.state_dict())


def test_messages_are_made_without_a_mask_where_every_element_takes_part() -> None:
    """They are, with zero_variance="hold", after the full step that gives the last one a variance, and of a state that
    is loaded."""

    def masked(optimizer: Any) -> bool:
        [exchange] = internals.exchanges(optimizer)
        return exchange.live_in(exchange.layout.all()) is not None

    params = [nn.Parameter(torch.zeros(n)) for n in (40, 0, 7)]
    build = partial(onebit.ZeroOneAdam, params, lr=0.1, var_update_scaler=2, zero_variance="hold", reply=1)
    optimizer, source, found = build(), torch.Generator().manual_seed(0), {}
    for step in range(1, 16):
        kind = optimizer.schedule.kind
        for p in params:
            p.grad = torch.randn(p.shape, generator=source)
        params[0].grad[3] *= step > 7
        params[0].grad[5] *= float("nan") if step == 9 else 1.0
        optimizer.step()
        if kind == "1 bit":
            found[step] = masked(optimizer)
    assert found == {step: step < 12 for step in (4, 6, 8, 9, 10, 11, 13, 14, 15)}  # the twelfth is a full one
    other = build()
    other.load_state_dict(optimizer.state_dict())
    assert not masked(other)

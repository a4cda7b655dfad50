"""0/1 Adam, with local steps and without: its schedules, every kind of step against the float64 oracle, other numbers
of ranks, warnings and errors. test_contract.py has what holds for all optimizers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit.optim.schedule import SyncSchedule, VarianceSchedule
from tests.onebit.optim.contract import options, started
from tests.onebit.optim.simulation import GROUPS, on_ranks
from tests.onebit.optim.zero_one_simulation import check, record_run
from tests.onebit.runs import Case, bits, run, snapshot, take
from tests.oracle import zero_one
from tests.ranks import group, run_ranks

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


def test_the_kinds_of_steps() -> None:
    (params, optimizer), kinds = started(LOCAL, 0), []
    for step in range(1, LOCAL.steps + 1):
        schedule = optimizer.schedule
        kinds.append(schedule.kind)
        take(LOCAL, 0, optimizer, params, step)
        assert optimizer.synchronized == (schedule.kind != "local")
        assert (schedule.next_sync == step) == (schedule.kind == "sync")
    assert sum(VarianceSchedule(4).is_full(t) for t in range(1, 1201)) == 33
    start = ["full"] * 3 + ["1 bit", "full"] + ["1 bit"] * 3
    assert kinds == start + ["local", "sync"] * 2 + (["local"] * 3 + ["sync"]) * 3 + ["local"] * 2


# Numbers

FEW = ((0, 3, 30), (4, 40, 6), (1, 33, 6))  # without a variance: one for good, others until a full step
BAD = ((9, 1, math.nan), (10, 0, math.inf), (14, 0, math.nan), (15, 1, math.nan), (17, 0, math.inf))
ROWS = {  # ranks, the case, its options
    "alone": (1, CASE, {}),
    "two ranks, groups": (2, CASE.but(groups=GROUPS), {}),
    "three ranks": (3, CASE, {}),
    "nodes": (4, CASE.but(each=2), {"chunks": 2}),
    "tensor scale": (2, CASE, {"scale": "tensor"}),
    "direct": (3, CASE, {"reply": "direct"}),
    "mean sizes": (3, CASE, {"norm": "l1", "chunks": 2}),
    "mean sizes, direct": (2, CASE, {"norm": "l1", "reply": "direct"}),
    "2 bits": (3, CASE, {"reply": 2, "chunks": 2}),
    "floors": (2, CASE, {"variance_floor": 0.3, "chunks": 3}),
    "hold": (3, CASE, {"zero_variance": "hold", "scale": "tensor", "norm": "l2"}),
    "frozen": (2, CASE, {"var_freeze_step": 7, "bias_correction": False}),
    "frozen in the dense start": (1, CASE, {"var_freeze_step": 2}),
    "local, alone": (1, LOCAL, {}),
    "local, two ranks, groups": (2, LOCAL.but(groups=GROUPS), {}),
    "local, three ranks": (3, LOCAL, {}),
    "local, nodes": (4, LOCAL.but(each=2), {"chunks": 2}),
    "local, tensor scale": (2, LOCAL, {"scale": "tensor"}),
    "local, direct": (3, LOCAL, {"reply": "direct"}),
    "local, 2 bits": (3, LOCAL, {"reply": 2, "chunks": 2}),
    "local, floors": (2, LOCAL, {"variance_floor": 0.3, "chunks": 3}),
    "local, hold": (2, LOCAL, {"zero_variance": "hold", "scale": "tensor", "norm": "l2"}),
    "local, no correction": (2, LOCAL, {"bias_correction": False, "weight_decay": 0.1}),
    "local, from the dense start on": (3, LOCAL, {"var_freeze_step": 2, "local_step_scaler": 1}),
    "local, left out by a rank": (2, LOCAL.but(bad=BAD, missing=()), {}),
    "local, left out, tensor scale": (2, LOCAL.but(bad=BAD, missing=()), {"scale": "tensor"}),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_step_is_the_oracles(name: str) -> None:
    """A rank leaves out what is not finite: in the first local step, a sync, and between. Another exchange comes where
    nobody planned it."""
    ranks, case, own = ROWS[name]
    case = options(case, **own)
    if not (case.groups != ({},) or case.each > 1 or case.bad):
        case = case.but(untouched=FEW)
    check(case, on_ranks(ranks, record_run, case, (15,) if "local" in name and case.untouched else ()))


@pytest.mark.parametrize(("dtype", "case"), [("bfloat16", CASE), ("float16", CASE), ("bfloat16", LOCAL)])
def test_master_weights(dtype: str, case: Case) -> None:
    """After an exchange local parameters are what they were from."""
    found = run_ranks(2, record_run, case.but(dtype=dtype))
    end = np.concatenate([x.ravel() for x in found[0].x[-1]])
    assert np.mean(end != end.astype(np.float16)) > 0.9, "the master copies hold no more than 16 bits"
    for i in range(case.steps):
        alone = found[0].alone.get(i)
        assert (found[0].bits[i] == found[1].bits[i]) == (alone is None or alone.taken == 0)
        assert all(math.isfinite(float(x.sum())) for x in found[0].x[i])
        if alone is not None and alone.taken == 0:
            assert all((a == b).all() for a, b in zip(alone.anchor, found[0].x[i], strict=True))


# Another number of ranks


def saved(rank: int, size: int, case: Case, last: int) -> dict[str, Any]:
    params, optimizer = started(case, last, rank, size)
    return {"state": snapshot(optimizer.state_dict()), "x": [p.detach().clone() for p in params]}


def loaded(rank: int, size: int, case: Case, states: list[Any]) -> tuple[int, list[list[torch.Tensor]], bytes]:
    """What is left out and what this rank would send of zero gradients, by parameter, and where it ends."""
    params, optimizer = started(case, 0, rank, size)
    for p, x in zip(params, states[0]["x"], strict=True):
        p.data.copy_(x)
    optimizer.load_state_dict(onebit.merge_states([s["state"] for s in states]))
    schedule, [part] = optimizer.schedule, optimizer.current.parts
    exchange, state = part.reducer.exchange, part.state
    gathered = exchange.gathered_server_residual()
    left_out = exchange.residual.left_out() + (0 if gathered is None else gathered)
    kept = [state.cut(left_out, i).clone() for i in range(len(params))]
    if "local_step_scaler" in case.options:
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        found = [kept, [optimizer.state[p]["own_momentum"].clone() for p in params]]
    else:
        found = [[e + 0.9 * m for e, m in zip(kept, part.reducer.momentum(), strict=True)]]
    run(case.but(missing=()), rank, optimizer, params, schedule.step + len(found) - 1, 26)
    if len(found) > 1:
        optimizer.synchronize()
    return schedule.step, found, bits(params)


@pytest.mark.parametrize(
    ("case", "last", "more"),
    [
        (CASE, 4, 1e-3), (CASE, 5, 1e-3),
        *((LOCAL, last, 1e-5) for last in (8, 10, 12)), (options(LOCAL, reply="direct"), 12, 1e-5),
    ],
    ids=["1 bit", "full", "before local steps", "a sync", "later", "direct"],
)  # fmt: skip
def test_another_number_of_ranks_goes_on_with_all_that_was_left_out(case: Case, last: int, more: float) -> None:
    """With the mean of residuals, and the same momentum."""
    states, found = run_ranks(2, saved, case, last), []
    for ranks in (2, 1, 3):
        other = options(case, reply=1) if ranks == 1 else case
        own = on_ranks(ranks, loaded, other, states)
        assert all(one[0] == last + 1 and one[2] == own[0][2] for one in own)
        kinds = zip(*(one[1] for one in own), strict=True)
        found.append([[torch.stack(of).mean(0) for of in zip(*each, strict=True)] for each in kinds])
    assert min(max(float(e.abs().max()) for e in each if e.numel()) for each in found[0]) > more
    tolerance = {"rtol": 1e-5, "atol": 1e-6 if case is CASE else 1e-7}
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, **tolerance)


# Warnings


def warnings_by_step(broken: tuple[int, ...] = (), **options: Any) -> dict[int, str]:
    """The first parameter has gradients of its own, the second in its first half alone, the third none before the tenth
    step."""
    params = [nn.Parameter(torch.ones(6)) for _ in range(3)]
    optimizer = onebit.ZeroOneAdam(params, var_update_scaler=2, **options)
    found = {}
    for step in range(1, 13):
        params[0].grad, params[1].grad = torch.randn(6), torch.tensor([1.0, 1, 1, 0, 0, 0])
        params[2].grad = torch.randn(6) if step >= 10 else None
        if step in broken:
            params[0].grad[0] = torch.nan
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        if texts := [str(one.message) for one in caught if "variance" in str(one.message)]:
            (found[step],) = texts
    return found


@pytest.mark.parametrize(
    ("last", "broken", "warned"), [(2, (), [3]), (6, (), [5]), (5, (), [5]), (None, (), []), (6, (5,), [6])]
)
def test_what_will_never_have_a_variance_is_said_once(last: int | None, broken: Any, warned: list[int]) -> None:
    """A last full step that is left out is not the last."""
    found = warnings_by_step(broken, var_freeze_step=last)
    assert list(found) == warned
    for text in found.values():
        assert ("at the freeze" if last == 2 else "after step 5, the last one that updates it") in text
        assert "1 of group 0 (shape (6,)) (3 of 6), 2 of group 0 (shape (6,)) (6 of 6)" in text
        assert "where there are none (2 of group 0 (shape (6,))), they will not move" in text


def test_what_is_held_by_a_mask_is_no_surprise() -> None:
    p, mask = nn.Parameter(torch.ones(6)), torch.tensor([True] * 3 + [False] * 3)
    optimizer = onebit.ZeroOneAdam([{"params": [p], "mask": mask}], var_update_scaler=2, var_freeze_step=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            p.grad = torch.randn(6)
            optimizer.step()


# Errors


def test_arguments_that_cannot_be() -> None:
    """There is no freeze, and local steps need a variance that stays."""
    names = ("var_update_scaler", "var_freeze_step", "local_step_scaler", "local_step_clipper")
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, name, {"var_freeze_step": 3, name: value}) for name in names for value in (0, -1, 1.5, "4", True)
    ]
    wrong.append((ValueError, "var_freeze_step=N", {"local_step_scaler": 3}))
    for name in ("freeze_step", "freeze_threshold", "freeze_window"):
        wrong.append((TypeError, f"unexpected keyword argument '{name}', which is of other", {name: 4}))
    for error, text, own in wrong:
        with pytest.raises(error, match=text):
            onebit.ZeroOneAdam([nn.Parameter(torch.ones(2))], **own)


def differing(rank: int, size: int) -> str:
    param = nn.Parameter(torch.ones(9))
    optimizer = onebit.ZeroOneAdam([param], var_update_scaler=2 + rank, process_group=group())
    param.grad = torch.ones(9)
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    return str(caught.value)


def test_ranks_with_other_schedules() -> None:
    assert all("var_update_scaler 3" in text for text in run_ranks(2, differing))


OTHERS = [
    (10, {"var_update_scaler": 3}, "var_update_scaler=2, here it is 3"),
    (4, {"var_update_scaler": 3}, "var_update_scaler=2, here it is 3"),
    (2, {"var_update_scaler": 3}, None),
    (10, {"var_freeze_step": 8}, "var_freeze_step=5, here it is 8"),
    (10, {"var_freeze_step": None, "local_step_scaler": None}, "var_freeze_step=5, here it is none"),
    (4, {"var_freeze_step": 8}, None),
    (5, {"var_freeze_step": None, "local_step_scaler": None}, None),
    (10, {"local_step_clipper": 2}, "local_step_clipper=4, here it is 2"),
    (8, {"local_step_scaler": None}, "local_step_scaler=3, here it is none"),
    (5, {"local_step_scaler": 7}, None),
]


def test_a_state_of_another_schedule() -> None:
    """What it has done already has to be the same, what comes may be another."""
    case = LOCAL.but(missing=())
    for last, own, problem in OTHERS:
        params, optimizer = started(case, last)
        other = options(case, **own).build(params)
        if problem is None:
            other.load_state_dict(optimizer.state_dict())
        else:
            with pytest.raises(ValueError, match=problem):
                other.load_state_dict(optimizer.state_dict())
    _, optimizer = started(case.but(options={"var_update_scaler": 2, "var_freeze_step": 5}), 12)
    with pytest.raises(ValueError, match="local_step_scaler=none, here it is 3"):
        case.build(case.parameters()).load_state_dict(optimizer.state_dict())

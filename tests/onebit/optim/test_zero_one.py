"""0/1 Adam: every kind of step against the float64 oracle, and all that holds for the library's optimizers."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.optim.schedule import VarianceSchedule
from tests.limits import HUNG
from tests.onebit.optim.simulation import GROUPS, group_or_none, on_ranks
from tests.onebit.optim.zero_one_simulation import check, record_run
from tests.onebit.parallel import test_fsdp as fsdp
from tests.onebit.runs import Case, bits, nodes_of, run, snapshot, take, unchanged
from tests.oracle import zero_one
from tests.ranks import group, run_ranks, run_ranks_once

SHAPES = ((7, 9), (33,), (0,), (2,), (130,), (1,))
MISSING = ((1, 0, 1), (3, 0, 4), (6, 0, 0), (9, 0, 1), (11, 0, 4))
CASE = Case("ZeroOneAdam", SHAPES, steps=24, options={"var_update_scaler": 2}, missing=MISSING)


@pytest.mark.parametrize("kappa", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("last", [None, 1, 3, 9, 40])
def test_the_schedule(kappa: int, last: int | None) -> None:
    schedule = VarianceSchedule(kappa, last)
    full = zero_one.full_steps(4000, kappa, last)
    assert [t for t in range(1, 2001) if schedule.is_full(t)] == [t for t in full if t <= 2000]
    assert schedule.dense_start == zero_one.dense_start(kappa, last)
    for t in (1, 2, 5, 17, 300, 2000):
        assert schedule.next_full(t) == next((f for f in full if f > t), None)
        for beta2 in (0.999, 0.95, 0.5):
            found = schedule.decay(t, beta2), schedule.weight(t, beta2)
            assert found == pytest.approx(zero_one.weight_at(t, beta2, kappa, last), rel=1e-12)


def test_few_steps_are_in_full_precision() -> None:
    assert len(zero_one.full_steps(1200, 4)) == 33
    assert sum(VarianceSchedule(4).is_full(t) for t in range(1, 1201)) == 33


# Numbers

VARIANTS = {
    "block scales": {},
    "tensor scale": {"scale": "tensor"},
    "direct": {"reply": "direct"},
    "mean sizes": {"norm": "l1", "chunks": 2},
    "mean sizes, direct": {"norm": "l1", "reply": "direct"},
    "2 bits": {"reply": 2, "chunks": 2},
    "floors": {"variance_floor": 0.3, "chunks": 3},
    "hold": {"zero_variance": "hold", "scale": "tensor", "norm": "l2"},
    "frozen": {"var_freeze_step": 7, "bias_correction": False},
    "frozen in the dense start": {"var_freeze_step": 2},
}


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_step_is_the_oracles(ranks: int, options: dict[str, Any]) -> None:
    if ranks == 1 and options.get("reply") == "direct":
        pytest.skip("one rank has nobody to reply")
    untouched = ((0, 3, 30), (4, 40, 6), (1, 33, 6))  # one for good, others until a full step gives them a variance
    case = CASE.but(options={**CASE.options, **options}, untouched=untouched)
    check(case, on_ranks(ranks, record_run, case))


def test_groups_have_their_own_numbers() -> None:
    case = CASE.but(groups=GROUPS)
    check(case, run_ranks(2, record_run, case))


def test_two_levels() -> None:
    case = CASE.but(each=2, options={**CASE.options, "chunks": 2})
    check(case, run_ranks(4, record_run, case))


@pytest.mark.slow
def test_a_hundred_steps() -> None:
    case = CASE.but(steps=110)
    check(case, run_ranks(3, record_run, case))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_weights(dtype: str) -> None:
    case = CASE.but(dtype=dtype)
    found = run_ranks(2, record_run, case)
    assert found[0].bits == found[1].bits
    assert all(math.isfinite(float(x.sum())) for x in found[0].x[-1])


# Contract


def skipping(rank: int, size: int, case: Case, steps: tuple[int, ...]) -> list[Any]:
    """What a bad gradient of rank 1 changes in the step after each of `steps`, and where the ranks end."""
    params, found = case.parameters(), []
    optimizer = case.build(params, group())
    step = 0
    for last in steps:
        run(case, rank, optimizer, params, step + 1, last)
        before, schedule = snapshot(optimizer.state_dict()), optimizer.schedule
        take(case.but(bad=((last + 1, 1, math.nan),)), rank, optimizer, params, last + 1)
        found.append((unchanged(before, snapshot(optimizer.state_dict())), schedule == optimizer.schedule))
        step = last + 1
    run(case, rank, optimizer, params, step + 1, step + 6)
    return [found, optimizer.skipped_steps, bits(params)]


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"reply": "direct"}, {"scale": "tensor"}], ids=str)
def test_a_skipped_step_changes_nothing_and_is_taken_again(options: dict[str, Any]) -> None:
    """In the dense start, a full step, the one after it, and a compressed one after a compressed one."""
    case = CASE.but(options={**CASE.options, "chunks": 2, **options}, missing=())
    found = run_ranks(2, skipping, case, (1, 5, 7, 11))
    assert found[0] == found[1]
    assert found[0][0] == [(True, True)] * 4 and found[0][1] == 4


def resumed(rank: int, size: int, case: Case, last: int) -> list[bool]:
    """From a state after `last` steps: the same bits as without."""
    ends = []
    for stop in (False, True):
        params = case.parameters()
        optimizer = case.build(params, group())
        run(case, rank, optimizer, params, 1, last)
        if stop:
            other = case.build(params, group())
            other.load_state_dict(snapshot(optimizer.state_dict()))
            assert other.schedule == optimizer.schedule
            optimizer = other
        run(case, rank, optimizer, params, last + 1, last + 8)
        ends.append([bits(params), bits([optimizer.state[p]["exp_avg_sq"] for p in params])])
    return ends[0] == ends[1]


@pytest.mark.parametrize("options", [{}, {"scale": "tensor"}, {"reply": "direct"}, {"reply": 2}], ids=str)
@pytest.mark.parametrize("last", [2, 3, 4, 5, 6, 7])
def test_a_resumed_run_is_the_same(last: int, options: dict[str, Any]) -> None:
    """In the dense start, at its end, after a compressed step, a full one, and so on."""
    case = CASE.but(options={**CASE.options, **options})
    assert all(run_ranks(2, resumed, case, last))


def saved(rank: int, size: int, case: Case, last: int) -> dict[str, Any]:
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, last)
    return {"state": snapshot(optimizer.state_dict()), "x": [p.detach().clone() for p in params]}


def loaded(rank: int, size: int, case: Case, states: list[Any]) -> tuple[Any, list[torch.Tensor], bytes]:
    """Where the schedule is, what this rank would send of zero gradients, by parameter, and where it ends."""
    params = case.parameters()
    for p, x in zip(params, states[0]["x"], strict=True):
        p.data.copy_(x)
    optimizer = case.build(params, group_or_none(size))
    optimizer.load_state_dict(onebit.merge_states([s["state"] for s in states]))
    schedule, [part] = optimizer.schedule, optimizer.current.parts
    exchange, state = part.reducer.exchange, part.state
    left_out = exchange.residual.left_out() + exchange.gathered_server_residual()
    kept = zip(range(len(params)), part.reducer.momentum(), strict=True)
    own = [state.cut(left_out, i) + 0.9 * m for i, m in kept]
    run(case.but(missing=()), rank, optimizer, params, 20, 26)
    return schedule, own, bits(params)


@pytest.mark.parametrize("last", [4, 5])
def test_another_number_of_ranks_goes_on_with_all_that_was_left_out(last: int) -> None:
    """After a compressed step, and after a full one."""
    states, found = run_ranks(2, saved, CASE, last), []
    for ranks in (2, 1, 3):
        own = on_ranks(ranks, loaded, CASE, states)
        assert all(one[0].step == last + 1 and one[2] == own[0][2] for one in own)
        found.append([torch.stack(of).mean(0) for of in zip(*(one[1] for one in own), strict=True)])
    assert max(float(e.abs().max()) for e in found[0] if e.numel()) > 1e-3
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def with_and_without_overlap(rank: int, size: int, case: Case) -> tuple[list[bytes], list[int]]:
    """Where runs end, and the steps after which overlap was on."""
    ends, on = [], []
    for overlap in (False, True):
        own = case.but(options={**case.options, "overlap": overlap})
        params = own.parameters()
        optimizer = own.build(params, group())
        for step in range(1, own.steps + 1):
            optimizer.zero_grad()
            grads = own.gradients(rank, step)
            loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True) if g is not None and p.numel())
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
            on += [step] * optimizer.overlap.on
        ends.append(bits(params))
    return ends, on


@pytest.mark.parametrize("each", [1, 2])
def test_overlap_changes_no_bit(each: int) -> None:
    case = CASE.but(
        options={**CASE.options, "chunks": 2}, missing=(), each=each, bad=((9, 1, math.inf), (12, 0, math.nan))
    )
    found = run_ranks(2 * each, with_and_without_overlap, case)
    assert all(ends == found[0][0] and ends[0] == ends[1] and on[-1] == case.steps for ends, on in found)


# Errors


@pytest.mark.parametrize("name", ["freeze_step", "freeze_threshold", "freeze_window"])
def test_there_is_no_freeze(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}', which is of other"):
        onebit.ZeroOneAdam([torch.nn.Parameter(torch.ones(2))], **{name: 4})


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True])
@pytest.mark.parametrize("name", ["var_update_scaler", "var_freeze_step"])
def test_numbers_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        onebit.ZeroOneAdam([torch.nn.Parameter(torch.ones(2))], **{name: value})


def differing(rank: int, size: int) -> str:
    param = torch.nn.Parameter(torch.ones(9))
    optimizer = onebit.ZeroOneAdam([param], var_update_scaler=2 + rank, process_group=group())
    param.grad = torch.ones(9)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_schedules() -> None:
    assert all("var_update_scaler 3" in text for text in run_ranks(2, differing))


# With DDP, FSDP2, clipping and scaled gradients


def trained(rank: int, size: int, ddp: bool, options: dict[str, Any]) -> dict[str, Any]:
    """12 steps of two accumulated backward passes: where they end, and what was averaged in them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    wrapped: nn.Module = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.003) if ddp else net
    clip, ranks = options.get("clip"), options.get("each", 1)
    own = {name: value for name, value in options.items() if name not in ("clip", "each")}
    optimizer = onebit.ZeroOneAdam(
        net.parameters(), lr=1e-2, var_update_scaler=2, block_size=32, chunks=2,
        process_group=nodes_of(group(), ranks) if ranks > 1 else group(), **own,
    )  # fmt: skip
    if ddp:
        onebit.attach(wrapped, optimizer)
    source, norms, kinds = torch.Generator().manual_seed(rank), [], []
    for _ in range(12):
        kinds.append(optimizer.schedule.kind)
        optimizer.zero_grad()
        for last in (False, True):
            held = nullcontext() if last else wrapped.no_sync() if ddp else optimizer.no_sync()  # type: ignore[operator]
            with held:
                wrapped(torch.randn(8, 20, generator=source)).square().mean().backward()
        if clip is not None:
            norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
    return {"end": bits(net.parameters()), "norms": norms, "kinds": kinds, "skipped": optimizer.skipped_steps}


@pytest.mark.parametrize(
    "options",
    [
        {}, {"overlap": True}, {"clip": 0.05}, {"gradient_dtype": torch.bfloat16}, {"each": 2},
        {"each": 2, "overlap": True},
    ],
    ids=str,
)  # fmt: skip
def test_ddp_averages_in_full_steps_and_leaves_the_others_alone(options: dict[str, Any]) -> None:
    size = 4 if "each" in options else 2
    ends = []
    for ddp in (False, True):
        found = run_ranks(size, trained, ddp, options)
        assert all(one == found[0] for one in found) and found[0]["skipped"] == 0
        assert found[0]["kinds"] == ["full"] * 3 + ["1 bit", "full"] * 2 + ["1 bit"] * 3 + ["full", "1 bit"]
        ends.append(torch.frombuffer(bytearray(found[0]["end"]), dtype=torch.float32))
        if "clip" in options:
            assert len(found[0]["norms"]) == 12 and min(found[0]["norms"]) > 0.05
    assert (ends[0] - ends[1]).abs().max() < (5e-3 if "gradient_dtype" in options else 1e-5)


def test_overlap_with_ddp_changes_no_bit() -> None:
    ends = [run_ranks(2, trained, True, {"overlap": overlap})[0]["end"] for overlap in (False, True)]
    assert ends[0] == ends[1]


def with_fsdp_both_ways(rank: int, size: int) -> tuple[bytes, bytes, list[float]]:
    mesh = fsdp.mesh_of(2, 2)
    options = {"var_update_scaler": 3, "freeze_step": None, "reply": "direct"}
    ends = []
    for attached in (True, False):
        net, optimizer, _ = fsdp.with_fsdp(rank, "ZeroOneAdam", 30, mesh, attached, **options)
        ends.append(bits(fsdp.whole(net)))
    return ends[0], ends[1], optimizer.current.parts[0].state["least_root"].tolist()


def test_fsdps_hook_averages_in_full_steps() -> None:
    found = run_ranks_once(4, with_fsdp_both_ways, timeout=HUNG)
    assert all(one == found[0] and one[0] == one[1] for one in found)
    assert min(found[0][2]) > 0


def scaled(rank: int, size: int, case: Case) -> list[Any]:
    """As GradScaler does it, with a power of 2, and not; an infinite one skips a step."""
    ends = []
    for scale in (None, 2.0**10):
        params = case.parameters()
        optimizer = case.build(params, group())
        for step in range(1, 13):
            for p, g in zip(params, case.gradients(rank, step), strict=True):
                p.grad = g if scale is None or g is None else g * scale
            optimizer.grad_scale = None if scale is None else torch.tensor(scale)
            optimizer.found_inf = torch.tensor(float(step in (5, 8)))
            optimizer.step()
        ends.append((bits(params), optimizer.skipped_steps))
    return ends


def with_a_scaler(rank: int, size: int, apart: bool) -> tuple[list[bytes], list[float]]:
    """With DDP: rank 1 overflows in a compressed step. Apart: it then has a scale of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    ddp = DistributedDataParallel(net, process_group=group())
    optimizer = onebit.ZeroOneAdam(net.parameters(), lr=1e-2, var_update_scaler=2, process_group=group())
    onebit.attach(ddp, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    source, ends, scales = torch.Generator().manual_seed(rank), [], []
    for step in range(1, 10):
        optimizer.zero_grad()
        scaler.scale(ddp(torch.randn(8, 20, generator=source)).square().mean()).backward()
        if (step, rank) == (4, 1):
            net[0].weight.grad[0, 0] = math.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update(2.0**8 if apart and (step, rank) == (4, 1) else None)
        ends.append(bits(net.parameters()))
        scales.append(scaler.get_scale())
    return ends, scales


@pytest.mark.parametrize("apart", [False, True])
def test_scales_with_ddp(apart: bool) -> None:
    """An overflow on one rank halves the scales of all. Where a user sets others, full steps divide what DDP has
    averaged by the same number on all ranks."""
    one, other = run_ranks(2, with_a_scaler, apart)
    assert one[0] == other[0] and len(set(one[0])) == 8
    assert one[1] == [2.0**10] * 3 + [2.0**9] * 6
    assert other[1] == [2.0**10] * 3 + [2.0**8 if apart else 2.0**9] * 6


def test_scaled_gradients() -> None:
    for one in run_ranks(2, scaled, CASE.but(missing=())):
        assert one[0] == one[1] and one[0][1] == 2


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


@pytest.mark.parametrize(("last", "warned"), [(2, 3), (6, 5), (5, 5), (None, None)])
def test_what_will_never_have_a_variance_is_said_once(last: int | None, warned: int | None) -> None:
    found = warnings_by_step(var_freeze_step=last)
    assert list(found) == ([] if warned is None else [warned])
    for text in found.values():
        assert ("at the freeze" if last == 2 else "after step 5, the last one that updates it") in text
        assert "1 of group 0 (shape (6,)) (3 of 6), 2 of group 0 (shape (6,)) (6 of 6)" in text
        assert "where there are none (2 of group 0 (shape (6,))), they will not move" in text


def test_what_is_held_by_a_mask_is_no_surprise() -> None:
    mask = torch.tensor([True] * 3 + [False] * 3)
    p = nn.Parameter(torch.ones(6))
    optimizer = onebit.ZeroOneAdam([{"params": [p], "mask": mask}], var_update_scaler=2, var_freeze_step=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            p.grad = torch.randn(6)
            optimizer.step()


def test_a_last_full_step_that_is_left_out_is_not_the_last() -> None:
    found = warnings_by_step(broken=(5,), var_freeze_step=6)
    assert list(found) == [6] and "after step 5, the last one" in found[6]

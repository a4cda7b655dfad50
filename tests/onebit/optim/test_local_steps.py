"""Local steps of 0/1 Adam: every one against the float64 oracle, what they are not to break, and errors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.optim.schedule import SyncSchedule
from tests.limits import HUNG
from tests.onebit.optim.simulation import GROUPS, group_or_none, on_ranks
from tests.onebit.optim.test_zero_one import saved, with_and_without_overlap
from tests.onebit.optim.zero_one_simulation import check, record_run
from tests.onebit.parallel import test_fsdp as fsdp
from tests.onebit.runs import Case, bits, nodes_of, run, snapshot, take
from tests.oracle import zero_one
from tests.ranks import group, run_ranks, run_ranks_once

SHAPES = ((7, 9), (33,), (0,), (2,), (130,), (1,))
OPTIONS = {"var_update_scaler": 2, "var_freeze_step": 5, "local_step_scaler": 3, "local_step_clipper": 4}
MISSING = ((1, 0, 1), (6, 0, 0), (9, 0, 1), (11, 0, 4), (14, 1, 0))
# Steps 1 to 5 are full but the fourth, 6 to 8 have 1 bit. Syncs: 10, 12, 16, 20, 24.
CASE = Case("ZeroOneAdam", SHAPES, steps=26, options=OPTIONS, missing=MISSING)


@pytest.mark.parametrize("scaler", [1, 2, 3, 8])
@pytest.mark.parametrize("clipper", [1, 2, 3, 16])
def test_the_schedule(scaler: int, clipper: int) -> None:
    schedule, first = SyncSchedule(7, scaler, clipper), 8 + scaler
    syncs = zero_one.sync_steps(3000, 7, scaler, clipper)
    assert [t for t in range(8, 2001) if schedule.is_sync(t)] == [t for t in syncs if t <= 2000]
    assert schedule.first_local == (None if clipper == 1 else first)
    for t in range(1, 60):
        assert schedule.is_alone(t) == (clipper > 1 and t >= first)
        after = max(t, first - 1)
        assert schedule.next_sync(t) == (None if clipper == 1 else next(s for s in syncs if s > after))


def test_the_kinds_of_steps() -> None:
    [kinds] = on_ranks(1, kinds_of, CASE)
    start = ["full"] * 3 + ["1 bit", "full"] + ["1 bit"] * 3
    assert kinds == start + ["local", "sync"] * 2 + (["local"] * 3 + ["sync"]) * 3 + ["local"] * 2


def kinds_of(rank: int, size: int, case: Case) -> list[str]:
    params, kinds = case.parameters(), []
    optimizer = case.build(params, group_or_none(size))
    for step in range(1, case.steps + 1):
        schedule = optimizer.schedule
        kinds.append(schedule.kind)
        take(case, rank, optimizer, params, step)
        assert optimizer.synchronized == (schedule.kind != "local")
        assert (schedule.next_sync == step) == (schedule.kind == "sync")
    return kinds


# Numbers

VARIANTS = {
    "block scales": {},
    "tensor scale": {"scale": "tensor"},
    "direct": {"reply": "direct"},
    "2 bits": {"reply": 2, "chunks": 2},
    "floors": {"variance_floor": 0.3, "chunks": 3},
    "hold": {"zero_variance": "hold", "scale": "tensor", "norm": "l2"},
    "no correction": {"bias_correction": False, "weight_decay": 0.1},
    "from the dense start on": {"var_freeze_step": 2, "local_step_scaler": 1},
}


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_step_is_the_oracles(ranks: int, options: dict[str, Any]) -> None:
    if ranks == 1 and options.get("reply") == "direct":
        pytest.skip("one rank has nobody to reply")
    untouched = ((0, 3, 30), (4, 40, 6), (1, 33, 6))
    case = CASE.but(options={**CASE.options, **options}, untouched=untouched)
    check(case, on_ranks(ranks, record_run, case, (15,)))


def test_groups_have_their_own_numbers() -> None:
    check(CASE.but(groups=GROUPS), run_ranks(2, record_run, CASE.but(groups=GROUPS)))


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_a_rank_leaves_out_what_is_not_finite(scale: str) -> None:
    """In the first local step, a sync, and between."""
    bad = ((9, 1, math.nan), (10, 0, math.inf), (14, 0, math.nan), (15, 1, math.nan), (17, 0, math.inf))
    case = CASE.but(bad=bad, missing=(), options={**CASE.options, "scale": scale})
    check(case, run_ranks(2, record_run, case))


def test_two_levels() -> None:
    case = CASE.but(each=2, options={**CASE.options, "chunks": 2})
    check(case, run_ranks(4, record_run, case))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("master", [True, False])
def test_16_bit_parameters(dtype: str, master: bool) -> None:
    case = CASE.but(dtype=dtype, options={**CASE.options, "master_weights": master})
    found = run_ranks(2, record_run, case)
    for i in range(case.steps):
        alike = found[0].bits[i] == found[1].bits[i]
        assert alike == (i not in found[0].alone or found[0].alone[i].taken == 0)
    anchors = [alone.anchor for i, alone in found[0].alone.items() if alone.taken == 0]
    xs = [found[0].x[i] for i, alone in found[0].alone.items() if alone.taken == 0]
    for anchor, x in zip(anchors, xs, strict=True):
        assert all((a == b).all() for a, b in zip(anchor, x, strict=True))


def a_rate_of_zero(rank: int, size: int, case: Case, first: int) -> tuple[list[bytes], bool]:
    params = case.parameters()
    optimizer = case.build(params, group())
    found = []
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
    params, largest = case.parameters(), 0.0
    optimizer = case.build(params, group())
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
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, 16)
    with torch.no_grad():
        for p in params:
            p.fill_(5.0)
    run(case, rank, optimizer, params, 17, 20)
    return bits(params), min(float(p.min()) for p in params if p.numel())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_user_writes_where_ranks_agree_stays(dtype: str) -> None:
    found = run_ranks(2, changed_by_hand, CASE.but(dtype=dtype))
    assert found[0] == found[1] and found[0][1] > 4


# Contract


def resumed(rank: int, size: int, case: Case, last: int) -> tuple[bool, bytes]:
    """From a state after `last` steps: the same bits as without."""
    ends = []
    for stop in (False, True):
        params = case.parameters()
        optimizer = case.build(params, group())
        run(case, rank, optimizer, params, 1, last)
        if stop:
            other = case.build(params, group())
            other.load_state_dict(snapshot(optimizer.state_dict()))
            assert other.schedule == optimizer.schedule and other.synchronized
            optimizer = other
        run(case, rank, optimizer, params, last + 1, 20)
        ends.append(bits(params))
    return ends[0] == ends[1], ends[0]


@pytest.mark.parametrize("last", [7, 8, 10, 12])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": "tensor"}, {"reply": "direct"}, {"reply": 2}, {"each": 2, "chunks": 2}],
    ids=str,
)
def test_a_resumed_run_is_the_same(last: int, options: dict[str, Any]) -> None:
    """After a 1-bit step, the last before local ones, and after syncs."""
    each = options.get("each", 1)
    own = {name: value for name, value in options.items() if name != "each"}
    case = CASE.but(options={**CASE.options, **own}, each=each)
    found = run_ranks(2 * each, resumed, case, last)
    assert all(same and end == found[0][1] for same, end in found)


def between_syncs(rank: int, size: int, case: Case) -> list[Any]:
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, 14)
    found: list[Any] = []
    for what in (optimizer.state_dict, lambda: onebit.save("nowhere", nn.Linear(1, 1), optimizer)):
        try:
            what()
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
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
    params = case.parameters()
    optimizer = case.build(params, group())
    found = []
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


def loaded(rank: int, size: int, case: Case, states: list[Any]) -> tuple[Any, list[list[torch.Tensor]], bytes]:
    """What is left out, by parameter, m of the first local step with zero gradients, and where it ends."""
    params = case.parameters()
    for p, x in zip(params, states[0]["x"], strict=True):
        p.data.copy_(x)
    optimizer = case.build(params, group_or_none(size))
    optimizer.load_state_dict(onebit.merge_states([s["state"] for s in states]))
    schedule, [part] = optimizer.schedule, optimizer.current.parts
    exchange, state = part.reducer.exchange, part.state
    gathered = exchange.gathered_server_residual()
    left_out = exchange.residual.left_out() + (0 if gathered is None else gathered)
    kept = [state.cut(left_out, i).clone() for i in range(len(params))]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    m = [optimizer.state[p]["own_momentum"].clone() for p in params]
    run(case.but(missing=()), rank, optimizer, params, schedule.step + 1, 26)
    optimizer.synchronize()
    return schedule, [kept, m], bits(params)


@pytest.mark.parametrize("reply", [1, "direct"])
@pytest.mark.parametrize("last", [8, 10, 12])
def test_another_number_of_ranks_goes_on_with_all_that_was_left_out(last: int, reply: Any) -> None:
    """After the last 1-bit step, and after syncs: with the mean of residuals, and the same momentum."""
    case, found = CASE.but(options={**CASE.options, "reply": reply}), []
    states = run_ranks(2, saved, case, last)
    for ranks in (2, 1, 3):
        own = on_ranks(ranks, loaded, case if ranks > 1 else CASE, states)
        assert all(one[0].step == last + 1 and one[2] == own[0][2] for one in own)
        kinds = zip(*(one[1] for one in own), strict=True)
        found.append([[torch.stack(of).mean(0) for of in zip(*each, strict=True)] for each in kinds])
    assert min(max(float(e.abs().max()) for e in each if e.numel()) for each in found[0]) > 1e-5
    for other in found[1:]:
        for which in (0, 1):
            for a, b in zip(found[0][which], other[which], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def watched(rank: int, size: int, case: Case, damaged: int) -> int:
    """The step at which a rank's damaged parameter is found."""
    params = case.parameters()
    optimizer = case.build(params, group())
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
    case = CASE.but(options={**CASE.options, "check_every": 5})
    assert run_ranks(2, watched, case, 0) == [0, 0]
    assert run_ranks(2, watched, case, 12) == [16, 16]  # due with step 15


@pytest.mark.parametrize("each", [1, 2])
def test_overlap_changes_no_bit(each: int) -> None:
    case = CASE.but(options={**CASE.options, "chunks": 2}, missing=(), each=each, steps=24)
    found = run_ranks(2 * each, with_and_without_overlap, case)
    assert all(ends == found[0][0] and ends[0] == ends[1] and on == [4, 5, 6, 7, 8] for ends, on in found)


def trained(rank: int, size: int, ddp: bool, options: dict[str, Any]) -> dict[str, Any]:
    """16 steps of two accumulated backward passes: where they end, after a sync, and what was sent."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    wrapped: nn.Module = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.003) if ddp else net
    clip, ranks = options.get("clip"), options.get("each", 1)
    own = {name: value for name, value in options.items() if name not in ("clip", "each")}
    optimizer = onebit.ZeroOneAdam(
        net.parameters(), lr=1e-2, block_size=32, chunks=2, **OPTIONS, **own,
        process_group=nodes_of(group(), ranks) if ranks > 1 else group(),
    )  # fmt: skip
    if ddp:
        onebit.attach(wrapped, optimizer)
    source, norms, sent = torch.Generator().manual_seed(rank), [], []
    for _ in range(16):
        before = optimizer.wire_bytes
        optimizer.zero_grad()
        for last in (False, True):
            held = wrapped.no_sync() if ddp else optimizer.no_sync()  # type: ignore[operator]
            if last:
                wrapped(torch.randn(8, 20, generator=source)).square().mean().backward()
            else:
                with held:
                    wrapped(torch.randn(8, 20, generator=source)).square().mean().backward()
        if clip is not None:
            norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
        sent.append(optimizer.wire_bytes > before)
    return {"end": bits(net.parameters()), "norms": norms, "sent": sent, "skipped": optimizer.skipped_steps}


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"clip": 0.05}, {"each": 2}, {"each": 2, "overlap": True}],
    ids=str,
)
def test_ddp_leaves_local_steps_alone(options: dict[str, Any]) -> None:
    """But for the ranks of a node, which move alike."""
    size, ends = 4 if "each" in options else 2, []
    for ddp in (False, True):
        found = run_ranks(size, trained, ddp, options)
        assert all(one["end"] == found[0]["end"] and one["skipped"] == 0 for one in found)
        kinds = [False] * 3 + [True, False] + [True] * 3 + [False, True] * 2 + [False] * 3 + [True]
        assert all(one["sent"] == kinds for one in found)
        if "clip" in options:  # local steps by each rank's own norm
            same = [a == b for a, b in zip(found[0]["norms"], found[1]["norms"], strict=True)]
            assert same == [True] * 8 + [False] * 8
        ends.append(torch.frombuffer(bytearray(found[0]["end"]), dtype=torch.float32))
    assert (ends[0] - ends[1]).abs().max() < 1e-5


def scaled(rank: int, size: int, case: Case) -> list[Any]:
    """As GradScaler does it, with a power of 2, and not; one finds an infinite number in a local step of rank 0."""
    ends = []
    for scale in (None, 2.0**10):
        params = case.parameters()
        optimizer = case.build(params, group())
        for step in range(1, 17):
            for p, g in zip(params, case.gradients(rank, step), strict=True):
                p.grad = g if scale is None or g is None else g * scale
            optimizer.grad_scale = None if scale is None else torch.tensor(scale)
            optimizer.found_inf = torch.tensor(float(step == 14 and rank == 0))
            optimizer.step()
        ends.append((bits(params), optimizer.skipped_steps))
    return ends


def test_scaled_gradients() -> None:
    found = run_ranks(2, scaled, CASE.but(missing=()))
    assert all(one[0] == one[1] for one in found)
    assert [one[0][1] for one in found] == [1, 0] and found[0][0][0] == found[1][0][0]


def with_a_scaler(rank: int, size: int, case: Case) -> tuple[list[float], bytes]:
    """An infinite number in a local step of rank 0."""
    params = case.parameters()
    optimizer, scaler = case.build(params, group()), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))
    scales = []
    for step in range(1, 17):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = None if g is None else g * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, bits(params)


def test_the_scale_of_a_rank_that_left_a_local_step_out() -> None:
    """No other rank has left it out, nor has its scaler."""
    one, other = run_ranks(2, with_a_scaler, CASE.but(missing=(), bad=((14, 0, math.inf),)))
    assert one[0] == [2.0**10] * 13 + [2.0**9] * 3 and other[0] == [2.0**10] * 16
    assert one[1] == other[1]


def with_fsdp(rank: int, size: int) -> tuple[list[torch.Tensor], bool]:
    mesh = fsdp.mesh_of(2, 2)
    options = {**OPTIONS, "freeze_step": None, "reply": "direct"}
    net, optimizer, _ = fsdp.with_fsdp(rank, "ZeroOneAdam", 20, mesh, True, **options)
    return fsdp.whole(net), optimizer.synchronized


def with_nodes(rank: int, size: int) -> tuple[list[torch.Tensor], bool]:
    optimizer, _ = fsdp.with_ddp(rank, "ZeroOneAdam", 20, **OPTIONS, freeze_step=None, reply="direct")
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]], optimizer.synchronized


def test_sharded_parameters() -> None:
    """The shards of a copy move alike, as the ranks of a node do."""
    found = run_ranks_once(4, with_fsdp, timeout=HUNG)
    nodes = run_ranks_once(4, with_nodes, timeout=HUNG)
    assert all(one[1] and bits(one[0]) == bits(found[0][0]) for one in found)
    assert all(one[1] and bits(one[0]) == bits(nodes[0][0]) for one in nodes)
    for a, b in zip(found[0][0], nodes[0][0], strict=True):
        assert (a - b).norm() < 1e-6 * b.norm()


# Errors


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True])
@pytest.mark.parametrize("name", ["local_step_scaler", "local_step_clipper"])
def test_numbers_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        onebit.ZeroOneAdam([nn.Parameter(torch.ones(2))], var_freeze_step=3, **{name: value})


def test_they_need_a_variance_that_stays() -> None:
    with pytest.raises(ValueError, match="var_freeze_step=N"):
        onebit.ZeroOneAdam([nn.Parameter(torch.ones(2))], local_step_scaler=3)


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


def test_a_state_of_before_there_were_local_steps() -> None:
    case = CASE.but(missing=(), options={"var_update_scaler": 2, "var_freeze_step": 5})
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 12)
    state = optimizer.state_dict()
    del state["param_groups"][0]["onebit"]["settings"]
    case.build(params).load_state_dict(snapshot(state))
    with pytest.raises(ValueError, match="local_step_scaler=none, here it is 3"):
        CASE.build(params).load_state_dict(state)


@pytest.mark.parametrize(("last", "options", "problem"), OTHERS)
def test_a_state_of_another_schedule(last: int, options: dict[str, Any], problem: str | None) -> None:
    """What it has done already has to be the same, what comes may be another."""
    case = CASE.but(missing=())
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, last)
    other = case.but(options={**case.options, **options}).build(params)
    if problem is None:
        other.load_state_dict(optimizer.state_dict())
    else:
        with pytest.raises(ValueError, match=problem):
            other.load_state_dict(optimizer.state_dict())

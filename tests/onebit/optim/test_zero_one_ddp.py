"""0/1 Adam within DDP and FSDP2, with gradients that a GradScaler scales, with local steps and without."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.limits import HUNG
from tests.onebit.optim.contract import started
from tests.onebit.optim.test_zero_one import CASE, LOCAL
from tests.onebit.parallel import test_fsdp as fsdp
from tests.onebit.runs import Case, bits, nodes_of, on_ranks
from tests.ranks import group, run_ranks, run_ranks_once

KINDS = ["full"] * 3 + ["1 bit", "full"] * 2 + ["1 bit"] * 3 + ["full", "1 bit"]
LOCAL_KINDS = ["full"] * 3 + ["1 bit", "full"] + ["1 bit"] * 3 + ["local", "sync"] * 2 + ["local"] * 3 + ["sync"]


def attached(ddp: bool, **options: Any) -> tuple[Any, Any, Any]:
    """A net, the same within DDP or not, and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    wrapped: nn.Module = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.003) if ddp else net
    optimizer = onebit.ZeroOneAdam(net.parameters(), lr=1e-2, **options)
    if ddp:
        onebit.attach(wrapped, optimizer)
    return net, wrapped, optimizer


def trained(rank: int, size: int, ddp: bool, schedule: Any, own: Any, clip: float | None, each: int) -> dict[str, Any]:
    """12 or 16 steps of two accumulated backward passes: where they end, what they were, and what was sent."""
    ranks = nodes_of(group(), each) if each > 1 else group()
    net, wrapped, optimizer = attached(ddp, block_size=32, chunks=2, process_group=ranks, **schedule, **own)
    source, norms, kinds = torch.Generator().manual_seed(rank), [], []
    for _ in range(16 if "local_step_scaler" in schedule else 12):
        kind, before = optimizer.schedule.kind, optimizer.wire_bytes
        optimizer.zero_grad()
        for last in (False, True):
            with nullcontext() if last else (wrapped if ddp else optimizer).no_sync():
                wrapped(torch.randn(8, 20, generator=source)).square().mean().backward()
        if clip is not None:
            norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
        assert (optimizer.wire_bytes > before) == (kind in ("1 bit", "sync"))
        kinds.append(kind)
    assert optimizer.skipped_steps == 0
    return {"end": bits(net.parameters()), "norms": norms, "kinds": kinds}


TRAINED: list[Any] = [
    (CASE.options, {}, 0.05, 1),
    (CASE.options, {"overlap": True}, None, 1),
    (CASE.options, {"gradient_dtype": torch.bfloat16}, None, 1),
    (CASE.options, {"overlap": True}, None, 2),
    (LOCAL.options, {}, 0.05, 1),
    (LOCAL.options, {"overlap": True}, None, 1),
    (LOCAL.options, {"overlap": True}, None, 2),
]


@pytest.mark.parametrize(("schedule", "own", "clip", "each"), TRAINED, ids=lambda value: str(value)[:30])
def test_ddp_averages_in_full_steps_and_leaves_the_others_alone(schedule, own, clip, each):
    """But for the ranks of a node, which move alike in local steps."""
    ends, local = [], schedule is LOCAL.options
    for ddp in (False, True):
        found = run_ranks(2 * each, trained, ddp, schedule, own, clip, each)
        assert all(one["end"] == found[0]["end"] for one in found)
        assert all(one["kinds"] == (LOCAL_KINDS if local else KINDS) for one in found)
        ends.append(torch.frombuffer(bytearray(found[0]["end"]), dtype=torch.float32))
        if clip is not None:  # local steps by each rank's own norm
            alike = [a == b for a, b in zip(found[0]["norms"], found[1]["norms"], strict=True)]
            assert alike == [True] * 8 + [not local] * (len(alike) - 8) and min(found[0]["norms"]) > 0.05
    assert (ends[0] - ends[1]).abs().max() < (5e-3 if "gradient_dtype" in own else 1e-5)
    if own == {"overlap": True}:
        plain = run_ranks(2 * each, trained, True, schedule, {}, None, each)[0]["end"]
        assert plain == found[0]["end"], "overlap has changed bits"


# Scaled gradients


@pytest.mark.parametrize("apart", [False, True])
@on_ranks(2)
def test_scales_with_ddp(rank: int, apart: bool) -> list[bytes]:
    """An overflow of rank 1 in a compressed step halves the scales of all. Where a user sets others, full steps divide
    what DDP has averaged by the same number on all ranks."""
    net, ddp, optimizer = attached(True, var_update_scaler=2, process_group=group())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    source, ends, scales = torch.Generator().manual_seed(rank), [], []
    for step in range(1, 10):
        optimizer.zero_grad()
        scaler.scale(ddp(torch.randn(8, 20, generator=source)).square().mean()).backward()
        if (step, rank) == (4, 1):
            net[0].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update(2.0**8 if apart and (step, rank) == (4, 1) else None)
        ends.append(bits(net.parameters()))
        scales.append(scaler.get_scale())
    assert len(set(ends)) == 8
    assert scales == [2.0**10] * 3 + [2.0**8 if apart and rank == 1 else 2.0**9] * 6
    return ends


@pytest.mark.parametrize(("case", "infinite"), [(CASE, ((5, -1), (8, -1))), (LOCAL, ((14, 0),))], ids=["", "local"])
@on_ranks(2)
def test_scaled_gradients(rank: int, size: int, case: Case, infinite: tuple[tuple[int, int], ...]) -> bytes:
    """As GradScaler does it, with a power of 2, and not; in some steps a rank, or both (-1), finds infinite numbers."""
    ends, left_out = [], [step for step, who in infinite if who in (rank, -1)]
    for scale in (None, 2.0**10):
        params, optimizer = started(case, 0, rank, size)
        for step in range(1, 17):
            for p, g in zip(params, case.but(missing=()).gradients(rank, step), strict=True):
                p.grad = g if scale is None else g * scale
            optimizer.grad_scale = None if scale is None else torch.tensor(scale)
            optimizer.found_inf = torch.tensor(float(step in left_out))
            optimizer.step()
        assert optimizer.skipped_steps == len(left_out)
        ends.append(bits(params))
    assert ends[0] == ends[1]
    return ends[0]


@on_ranks(2)
def test_the_scale_of_a_rank_that_left_a_local_step_out(rank: int, size: int) -> bytes:
    """No other rank has left it out, nor has its scaler."""
    case, scales = LOCAL.but(missing=(), bad=((14, 0, math.inf),)), []
    params, optimizer = started(case, 0, rank, size)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))
    for step in range(1, 17):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = g * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0**10] * 13 + [2.0**10 if rank else 2.0**9] * 3
    return bits(params)


# FSDP2

COMMON = {"freeze_step": None, "reply": "direct"}


def with_fsdp(rank: int, size: int) -> list[list[torch.Tensor]]:
    """Attached or not; and local steps, in one start of four processes."""
    spaced, ends = {"var_update_scaler": 3}, []
    for own, attached in ((LOCAL.options, True), (spaced, True), (spaced, False)):
        net, optimizer, _ = fsdp.with_fsdp(rank, "ZeroOneAdam", 20, fsdp.mesh_of(2, 2), attached, **own, **COMMON)
        assert optimizer.synchronized and min(optimizer.current.parts[0].state["least_root"].tolist()) > 0
        ends.append(fsdp.whole(net))
    return ends


def with_nodes(rank: int, size: int) -> list[torch.Tensor]:
    optimizer, _ = fsdp.with_ddp(rank, "ZeroOneAdam", 20, **LOCAL.options, **COMMON)
    assert optimizer.synchronized
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]]


def test_sharded_parameters() -> None:
    """FSDP's hook averages in full steps. The shards of a copy move alike, as the ranks of a node do."""
    found, nodes = (run_ranks_once(4, work, timeout=HUNG) for work in (with_fsdp, with_nodes))
    assert len({bits(local) for local, _, _ in found}) == len({bits(own) for own in nodes}) == 1
    assert len({bits(own) for _, *both in found for own in both}) == 1
    for a, b in zip(found[0][0], nodes[0], strict=True):
        assert (a - b).norm() < 1e-6 * b.norm()

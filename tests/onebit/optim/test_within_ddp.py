"""A net within DDP, whose hook averages, ends where it ends without: with gradients that are accumulated, clipped,
rounded to 16 bits for the network, or scaled by a GradScaler."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.optim import gradients
from tests import internals
from tests.onebit.optim.test_zero_one import CASE, LOCAL
from tests.onebit.runs import OPTIMIZERS, bits, build, nodes_of, on_ranks, on_warnings
from tests.ranks import group, run_ranks

HALF, BF16 = torch.float16, torch.bfloat16
LATE, PLAIN = {"overlap": False}, {"overlap": False, "gradient_dtype": None}


@dataclass(frozen=True)
class Net:
    """A net that trains on data which follow from rank and step alone, with two backward passes a step."""

    kind: str = "ZeroOneAdam"
    options: dict[str, Any] = field(default_factory=lambda: {"freeze_step": 4})
    clip: float | None = None
    each: int = 1  # ranks a node
    apart: bool = False  # whether the last layer is not compressed
    dtype: torch.dtype = torch.float32
    factor: float = 1.0  # of losses
    steps: int = 16
    too_large: int = 0  # the step in which rank 1's gradients are beyond the range of fp16, or NaN without rounding

    def built(self, ddp: bool, **more: Any) -> tuple[Any, Any, Any]:
        """The net, the same within DDP or not, and its optimizer."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)).to(self.dtype)
        layers = [{"params": net[:-1].parameters()}, {"params": net[-1].parameters(), "compress": not self.apart}]
        own = {"lr": 1e-2, "block_size": 32, "chunks": 2, **self.options, **more}
        ranks = nodes_of(group(), self.each) if self.each > 1 else group()
        optimizer = build(self.kind, layers, process_group=ranks, **own)
        if not ddp:
            return net, net, optimizer
        wrapped = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.003, gradient_as_bucket_view=True)
        onebit.attach(wrapped, optimizer)
        return net, wrapped, optimizer


@dataclass(frozen=True)
class Trained:
    end: torch.Tensor
    warm: torch.Tensor  # after the third step, which is a full one
    means: torch.Tensor  # its gradients
    norms: tuple[float, ...]  # before each clip


def trained(rank: int, size: int, net: Net, ddp: bool, more: dict[str, Any]) -> Trained:
    model, wrapped, optimizer = net.built(ddp, **more)
    source, norms = torch.Generator().manual_seed(rank), []
    rounds = internals.options(optimizer).gradient_dtype is not None
    for step in range(1, net.steps + 1):
        before, factor = bits(model.parameters()), net.factor
        if (step, rank) == (net.too_large, 1):
            factor = 1e8 if rounds else math.nan
        optimizer.zero_grad()
        for last in (False, True):
            with nullcontext() if last else (wrapped if ddp else optimizer).no_sync():
                x = torch.randn(8, 20, generator=source).to(net.dtype)
                wrapped(x).square().mean().mul(factor).backward()
        if net.clip is not None:
            norms.append(float(optimizer.clip_grad_norm_(net.clip)))
        optimizer.step()
        assert (bits(model.parameters()) == before) == (step == net.too_large)
        if step == 3:
            warm, means = flat(model.parameters()), flat(p.grad for p in model.parameters())
    assert optimizer.compressing and optimizer.skipped_steps == (net.too_large > 0)
    optimizer.synchronize()
    return Trained(flat(model.parameters()), warm, means, tuple(norms))


def watched(rank: int, size: int, net: Net, ddp: bool, more: dict[str, Any]) -> Trained:
    """Nothing is warned of, and over a node DDP averages, or a step does."""
    counted = patch.object(gradients, "average_slices", wraps=gradients.average_slices)
    with on_warnings() as said, counted as average:
        found = trained(rank, size, net, ddp, more)
    assert not [text for text in said if "onebit" in text]
    assert net.each == 1 or {**net.options, **more}.get("overlap") or bool(average.call_count) == (not ddp)
    return found


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().float().view(-1) for t in tensors])


EARLY, L1 = {"overlap": True}, {"norm": "l1"}  # scales of which a sign that rounding turns moves least
FREEZE, SPACED, LOCAL_STEPS = {"freeze_step": 4}, CASE.options, LOCAL.options
IN_FP16, IN_BF16 = ({"gradient_dtype": dtype, "eps": 1e-4} for dtype in (HALF, BF16))
NODES_IN_BF16 = Net("OneBitAdam", FREEZE | EARLY | L1 | {"gradient_dtype": BF16}, each=2, steps=8)
ROWS = {  # ranks, whether within DDP, the net
    "Adam, early": (2, True, Net("OneBitAdam", FREEZE | EARLY)),
    "LAMB, clipped": (2, True, Net("OneBitLamb", clip=0.01)),
    "Adam, a layer apart, early": (2, True, Net("OneBitAdam", FREEZE | EARLY, apart=True)),
    "LAMB, a layer apart": (2, True, Net("OneBitLamb", apart=True)),
    "0/1 Adam, a layer apart, early": (2, True, Net(options=SPACED | EARLY, apart=True)),
    "0/1 Adam, clipped": (2, True, Net(options=SPACED, clip=0.01)),
    "0/1 Adam of nodes, early": (4, True, Net(options=SPACED | EARLY, each=2)),
    "local steps, clipped": (2, True, Net(options=LOCAL_STEPS, clip=0.01)),
    "local steps, early": (2, True, Net(options=LOCAL_STEPS | EARLY)),
    "local steps of nodes, early": (4, True, Net(options=LOCAL_STEPS | EARLY, each=2)),
    **{
        f"{kind} of nodes, early, within DDP: {ddp}": (4, ddp, Net(kind, FREEZE | EARLY | L1, each=2))
        for kind in OPTIMIZERS
        for ddp in (False, True)
    },
    "Adam of nodes in bf16, early": (4, True, NODES_IN_BF16),
    "Adam of nodes in bf16, early, without DDP": (4, False, NODES_IN_BF16),
    "Adam in fp16, one too large": (2, False, Net("OneBitAdam", FREEZE | IN_FP16, too_large=2)),
    "LAMB in bf16": (2, False, Net("OneBitLamb", FREEZE | IN_BF16)),
    "LAMB in fp16, one too large": (2, True, Net("OneBitLamb", FREEZE | IN_FP16, too_large=2)),
    "0/1 Adam in bf16": (2, True, Net(options=SPACED | IN_BF16)),
    "bf16 parameters keep their range": (2, False, Net(options=FREEZE | IN_FP16, dtype=BF16, factor=1e8)),
    "so they do within DDP": (2, True, Net("OneBitAdam", FREEZE | IN_FP16, dtype=BF16, factor=1e8)),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_net_ends_where_it_ends_without(name: str) -> None:
    """It does to the last bit if two ranks average in fp32: their mean is the same, whoever adds. Rounded means change
    little."""
    size, ddp, net = ROWS[name]
    ways = (ddp, {}), (False, PLAIN if net.each == 1 else LATE), (ddp, LATE)
    found, plain, late = (run_ranks(size, watched, net, *way) for way in ways)
    wire = net.options.get("gradient_dtype") if net.dtype == torch.float32 else None
    for own, other in zip(found, plain, strict=True):
        assert torch.equal(own.end, found[0].end)
        assert (own.end - late[0].end).abs().max() <= (5e-3 if wire and ddp else 0)  # a sign or two turns
        assert own.norms == other.norms and min(own.norms, default=1) > (net.clip or 0)
        if wire is None:
            assert (own.end - other.end).abs().max() <= (0 if size == 2 else 1e-6)
        else:
            assert (own.warm - other.warm).abs().max() <= 2e-3
            assert [torch.equal(g, g.to(wire).float()) for g in (own.means, other.means)] == [True, net.each > 1]
            assert net.each == 1 or (own.end - other.end).abs().max() < 5e-3
    if net.clip is not None:  # local steps by each rank's own norm
        alike = [a == b for a, b in zip(found[0].norms, found[1].norms, strict=True)]
        assert alike == [True] * 8 + [net.options is not LOCAL_STEPS] * 8


@pytest.mark.parametrize("apart", [False, True])
@on_ranks(2)
def test_scales_with_ddp(rank: int, apart: bool) -> list[bytes]:
    """An overflow of rank 1 in a compressed step halves the scales of all. Where a user sets others, full steps divide
    what DDP has averaged by the same number on all ranks."""
    net, ddp, optimizer = Net(options={"var_update_scaler": 2}).built(True)
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


@on_ranks(2)
def test_a_clip_of_gradients_that_the_model_drops_is_not_that_of_the_next_pass(rank: int) -> bytes:
    """DDP's next gradients are the same tensors, views of its buckets."""
    ends: list[bytes] = []
    dropped = 2, 7, 8
    for drops in (True, False):
        model, wrapped, optimizer = Net("OneBitAdam").built(ddp=True)
        source = torch.Generator().manual_seed(rank)
        for step in range(1, 11):
            model.zero_grad()
            x = torch.randn(8, 20, generator=source)
            if step not in dropped or drops:
                wrapped(x).square().mean().backward()
            if step not in dropped:
                optimizer.step()
            elif drops:
                optimizer.clip_grad_norm_(1e-3)
        assert optimizer.steps == 10 - len(dropped)
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]
    return ends[0]

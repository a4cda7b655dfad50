"""What torch puts around an optimizer, each in turn around each of ours: schedules that move betas, averaged models,
parametrizations, checkpointed and compiled models, closures. A net learns with it as it does with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import onebit
from tests.onebit.optim.test_within_ddp import flat
from tests.onebit.runs import OPTIMIZERS, bits, build, on_ranks, on_warnings
from tests.ranks import group

STEPS, FREEZE, RATE, BATCH = 60, 15, 1e-2, 16
TIMES = {"OneBitLamb": 5.0}  # LAMB's rate in AdamW's: its coefficients are 0.3 at most
WORSE = 1.5  # times AdamW's last loss


def net(norm: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(norm(nn.Linear(10, 32)), nn.Tanh(), norm(nn.Linear(32, 32)), nn.Tanh(), nn.Linear(32, 1))


class Checkpointed(nn.Module):
    """Computes its first layers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[3:](checkpoint(self.layers[:3], x, use_reentrant=False))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=2 * optimizer.param_groups[0]["lr"], total_steps=STEPS)


def cyclic(optimizer: Any) -> Any:
    rate = optimizer.param_groups[0]["lr"]
    return lr_scheduler.CyclicLR(optimizer, base_lr=rate / 4, max_lr=rate, step_size_up=10, cycle_momentum=True)


def swa(optimizer: Any) -> Any:
    return swa_utils.SWALR(optimizer, swa_lr=optimizer.param_groups[0]["lr"] / 4, anneal_epochs=STEPS // 2)


@dataclass(frozen=True)
class Row:
    model: Callable[[], nn.Module] = net
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model  # around what DDP has wrapped
    schedule: Callable[[Any], Any] | None = None
    average: Callable[..., Any] | None = None  # AveragedModel's rule
    closure: bool = False


ROWS = {
    "OneCycleLR": Row(schedule=one_cycle),
    "CyclicLR": Row(schedule=cyclic),
    "SWA": Row(schedule=swa, average=swa_utils.get_swa_multi_avg_fn()),
    "EMA": Row(average=swa_utils.get_ema_multi_avg_fn(0.9)),
    "weight_norm": Row(lambda: net(parametrizations.weight_norm)),
    "spectral_norm": Row(lambda: net(parametrizations.spectral_norm)),
    "checkpoint": Row(Checkpointed),
    "compile": Row(lambda: compiled(net())),
    "compile around DDP": Row(wrap=compiled),
    "closure": Row(closure=True),
}


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    early: Tensor  # parameters after five steps: 0/1 Adam's stage 1
    end: bytes
    betas: set[float]
    averaged: Tensor | None
    expected: Tensor | None  # the average by hand


def trained(row: Row, rank: int, size: int, make: Callable[[list[nn.Parameter]], Any]) -> Trained:
    """Train one process without DDP, or ranks with it."""
    torch._dynamo.reset()
    model = row.model()
    optimizer = make(list(model.parameters()))
    ours = isinstance(optimizer, onebit.OneBitOptimizer)
    ddp = DistributedDataParallel(model, process_group=group()) if size > 1 else model
    if ours and size > 1:
        onebit.attach(ddp, optimizer)
    called, schedule = row.wrap(ddp), row.schedule and row.schedule(optimizer)
    averaged = row.average and swa_utils.AveragedModel(model, multi_avg_fn=row.average)
    source, losses, betas, history = torch.Generator().manual_seed(rank), [], set(), []
    for step in range(STEPS):
        x = torch.randn(BATCH, 10, generator=source)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (called(x) - x[:, :3].prod(1, keepdim=True).tanh() - x[:, 3:4].sin()).square().mean()
            loss.backward()
            return loss

        if row.closure:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.clip_grad_norm_(1e3) if ours else None
            optimizer.step()
        betas.add(optimizer.param_groups[0]["betas"][0])
        losses.append(float(loss.detach()))
        if step == 4:
            early = flat(model.parameters()).clone()
        if schedule:
            schedule.step()
        if averaged:
            averaged.update_parameters(model)
            history.append(flat(model.parameters()).clone())
    if ours:
        assert optimizer.compressing
        optimizer.synchronize()
    expected = by_hand(row, history) if averaged else None
    mine = flat(averaged.module.parameters()) if averaged else None
    return Trained(losses, early, bits(model.parameters()), betas, mine, expected)


def by_hand(row: Row, history: list[Tensor]) -> Tensor:
    """Average the parameters after each step as AveragedModel's rule says."""
    if row.average and "ema" in row.average.__qualname__:
        mean = history[0]
        for each in history[1:]:
            mean = 0.9 * mean + 0.1 * each
        return mean
    return torch.stack(history).mean(0)


def check(ours: Trained, theirs: Trained, kind: str) -> None:
    """Losses are AdamW's to rounding in stage 1, of what is AdamW there; at the end both have learned alike."""
    assert ours.betas == theirs.betas
    if kind != "OneBitLamb":
        assert ours.losses[:5] == pytest.approx(theirs.losses[:5], rel=1e-4)
        assert (ours.early - theirs.early).abs().max() < 1e-4
    start, end, expected = (sum(losses) / 10 for losses in (ours.losses[:10], ours.losses[-10:], theirs.losses[-10:]))
    assert end < WORSE * expected and end < start
    if ours.averaged is not None:
        assert (ours.averaged - ours.expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_a_net_learns_as_with_adamw(rank: int, size: int, name: str) -> list[bytes]:
    """size: 1 is without DDP."""
    row, ends = ROWS[name], []
    theirs = trained(row, rank, size, lambda params: torch.optim.AdamW(params, lr=RATE, weight_decay=0.0))
    for kind in OPTIMIZERS:
        options: dict[str, Any] = {"lr": RATE * TIMES.get(kind, 1.0), "process_group": group(), "block_size": 256}
        if kind != "ZeroOneAdam":
            options["freeze_step"] = FREEZE
        with on_warnings() as said:
            ours = trained(row, rank, size, partial(build, kind, **options))
        assert not [text for text in said if "onebit" in text]
        check(ours, theirs, kind)
        ends.append(ours.end)
    return ends

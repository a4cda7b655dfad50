"""DDP around a model whose ranks change: wrapped anew over the new group."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.runs import bits
from tests.ranks import group, run_ranks

STEPS, FREEZE = 3, 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))


def backward(net: nn.Module, rank: int, step: int) -> None:
    source = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(16, 12, generator=source), torch.randn(16, 3, generator=source)
    net.zero_grad()
    (net(x) - y).square().mean().backward()


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize(("there", "here"), [(3, 2), (2, 3)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 5])
def test_ddp_over_the_new_group_averages_in_stage_1_and_leaves_gradients_local_after(
    there: int, here: int, overlap: bool, at: int
) -> None:
    found = run_ranks(max(there, here), train, there, here, overlap, at)[:here]
    assert len({each["x"] for each in found}) == 1
    assert len({each["full"] for each in found}) == (1 if at < FREEZE else here)
    assert len({each["compressed"] for each in found}) == here


def train(rank: int, size: int, there: int, here: int, overlap: bool, at: int) -> Any:
    """After the reform: gradients of the first step and of the last one, and parameters."""
    warnings.simplefilter("ignore", UserWarning)
    plain, now = model(), there if rank < there else here
    optimizer: Any = onebit.OneBitAdam(
        plain.parameters(), lr=1e-2, freeze_step=FREEZE, overlap=overlap, chunks=2, process_group=group(now)
    )
    if rank < there:
        wrapped = DistributedDataParallel(plain, process_group=group(there))
        onebit.attach(wrapped, optimizer)
        for step in range(at):
            backward(wrapped, rank, step)
            optimizer.step()
        del wrapped
        gc.collect()
    if rank >= here:
        return {}
    onebit.reform(optimizer, group(here))
    wrapped, seen = DistributedDataParallel(plain, process_group=group(here)), []
    onebit.attach(wrapped, optimizer)
    for step in range(at, at + STEPS):
        backward(wrapped, rank, step)
        seen.append(bits(gradients(plain)))
        optimizer.step()
    assert not optimizer.after_step and optimizer.overlap.on == overlap
    return {"full": seen[0], "compressed": seen[-1], "x": bits(plain.parameters())}

"""DDP around a model whose ranks change: wrapped anew over the new group."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.parallel import test_attach as ddp
from tests.onebit.runs import bits
from tests.ranks import group, run_ranks

STEPS, FREEZE = 3, 2


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
    """Train. Returns gradients of the first step after the reform and of the last one, and parameters."""
    warnings.simplefilter("ignore", UserWarning)
    plain, now = ddp.net(), there if rank < there else here
    optimizer: Any = onebit.OneBitAdam(
        plain.parameters(), lr=1e-2, freeze_step=FREEZE, overlap=overlap, chunks=2, process_group=group(now)
    )
    if rank < there:
        wrapped = DistributedDataParallel(plain, process_group=group(there))
        onebit.attach(wrapped, optimizer)
        ddp.train(wrapped, optimizer, rank, 0, at)
        del wrapped
        gc.collect()
    if rank >= here:
        return {}
    onebit.reform(optimizer, group(here))
    wrapped, seen = DistributedDataParallel(plain, process_group=group(here)), []
    onebit.attach(wrapped, optimizer)
    for step in range(at, at + STEPS):
        optimizer.zero_grad()
        ddp.loss_of(wrapped, rank, step).backward()
        seen.append(bits(p.grad for p in plain.parameters()))
        optimizer.step()
    assert not optimizer.after_step and optimizer.overlap.on == overlap
    return {"full": seen[0], "compressed": seen[-1], "x": bits(plain.parameters())}

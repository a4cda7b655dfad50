"""Ranks on a GPU over NCCL, in every way that people start them; the same on CPUs over Gloo, where there is no GPU.

Several ranks share the one GPU: see tests/collectives/test_gpu.py. What is held: ranks are equal bit for bit, overlap
changes nothing, DDP comes to what a plain loop comes to, and no step makes the host wait for the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.limits import HUNG
from tests.onebit.parallel.one_gpu import FREEZE, STEPS, join, needs_gpu, no_waits
from tests.onebit.runs import bits
from tests.ranks import run_ranks_once


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 300), nn.ReLU(), nn.Linear(300, 77), nn.ReLU(), nn.Linear(77, 1)).to(device)


def loss_of(net: nn.Module, step: int, rank: int, device: str) -> Tensor:
    data = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 33, generator=data).to(device)
    return ((net(x) - x.sum(1, keepdim=True).tanh()) ** 2).mean()


def way(
    rank: int, device: str, kind: str, group: Any, how: str = "", views: bool = False, clip: float | None = None,
    scaler: Any = None, **options: Any,
) -> bytes:  # fmt: skip
    """Bits of the parameters at the end. how: "ddp", or "hook" under torch's SGD, in place of the optimizer."""
    net: Any = model(device)
    if how:
        options_of_ddp = {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": views}
        wrapped = DistributedDataParallel(net, process_group=group, **options_of_ddp)
    if how == "hook":
        onebit.compress_gradients(wrapped, bits=4)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    else:
        own = {"var_update_scaler": 2} if kind == "ZeroOneAdam" else {"freeze_step": FREEZE}
        options |= {"lr": 1e-2, "block_size": 256, "process_group": group, **own}
        optimizer = getattr(onebit, kind)(net.parameters(), **options)
    if how == "ddp":
        onebit.attach(wrapped, optimizer)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = loss_of(wrapped if how else net, step, rank, device)
        (loss if scaler is None else scaler.scale(loss)).backward()
        with no_waits(step, device):
            if clip is not None:
                optimizer.clip_grad_norm_(clip)
            if scaler is None:
                optimizer.step()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
    return bits([p.detach().cpu() for p in net.parameters()])


EXCHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "ddp": {"how": "ddp"},
    "ddp, views": {"how": "ddp", "views": True},
    "ddp, overlap": {"how": "ddp", "overlap": True},
    "clipped": {"clip": 0.5},
    "scaled": {},
    "hooked": {"how": "hook"},
}


def all_ways(rank: int, size: int, device: str, kind: str, start: str, path: str) -> dict[str, bytes] | None:
    """Return each way's bits of the parameters, over a group made as `start` says; None on a rank that is not in it."""
    join(rank, size, device, start, path)
    members, group = [*range(size)], None
    if start == "some of the ranks":
        group = dist.new_group(members := [0, size - 1])
    if rank not in members:
        return None
    scalers = {"scaled": torch.amp.GradScaler(device, init_scale=256.0)}
    given = {name: {**own, "scaler": scalers.get(name)} for name, own in EXCHANGES.items()}
    return {name: way(members.index(rank), device, kind, group, **own) for name, own in given.items()}


def check_ranks(size: int, device: str, kind: str, start: str, folder: Path) -> None:
    answers = run_ranks_once(size, all_ways, (device, kind, start, str(folder / "store")), timeout=HUNG)
    found = [each for each in answers if each is not None]
    for way in EXCHANGES:
        assert len({each[way] for each in found}) == 1, f"{way}: the ranks differ"
    ways = found[0]
    assert ways["overlap"] == ways["plain"]
    assert ways["ddp, overlap"] == ways["ddp"] == ways["ddp, views"]
    if len(found) == 2:  # a sum of two has one order
        assert ways["ddp"] == ways["plain"]
        assert ways["scaled"] == ways["plain"]  # by a power of two
    assert len(set(ways.values())) >= 3  # clipping and the hook go elsewhere


CASES = [(2, "OneBitAdam", "default"), (2, "OneBitLamb", "no backend named"), (3, "ZeroOneAdam", "some of the ranks")]
ON_A_GPU = [*CASES, (4, "OneBitAdam", "default"), (2, "OneBitAdam", "cpu:gloo")]  # of the last, tensors pass by Gloo


@pytest.mark.parametrize(("size", "kind", "start"), CASES)
def test_every_way_of_starting_comes_to_the_same(size: int, kind: str, start: str, tmp_path: Path) -> None:
    check_ranks(size, "cpu", kind, start, tmp_path)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("size", "kind", "start"), ON_A_GPU)
def test_every_way_of_starting_comes_to_the_same_on_a_gpu(size: int, kind: str, start: str, tmp_path: Path) -> None:
    check_ranks(size, "cuda", kind, start, tmp_path)

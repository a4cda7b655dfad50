"""Two nodes of two ranks, and HSDP 2 x 2, on a GPU over NCCL; the same on CPUs over Gloo, where there is no GPU.

The four ranks share the one GPU: see tests/collectives/test_gpu.py. What is held: ranks are equal bit for bit; how
nodes are found, DDP, overlap and FSDP2's hook change nothing; HSDP comes to what two levels come to, and both to what
two ranks come to that have the mean of a node's gradients. No step makes the host wait for the device.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests import internals
from tests.limits import HUNG
from tests.onebit.parallel.one_gpu import FREEZE, STEPS, join, needs_gpu, no_waits
from tests.onebit.parallel.test_fsdp import loss_of, sharded, whole
from tests.onebit.runs import bits, build
from tests.ranks import run_ranks_once

OPTIONS = {"lr": 5e-3, "freeze_step": FREEZE, "block_size": 32, "chunks": 2, "variance_floor": 0.01}
CLIP = 0.05
FINE = 2.0**18  # gradients are multiples of 1 / FINE: a sum over ranks is exact, whatever its order


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, rounded(self.weight), rounded(self.bias))


def rounded(parameter: Tensor) -> Tensor:
    """The parameter; its gradient is rounded."""
    same = parameter.view_as(parameter)
    same.register_hook(lambda gradient: (gradient * FINE).round() / FINE)
    return same


def model(device: str) -> nn.Sequential:
    """Every part of a parameter is whole blocks, with shards and without."""
    torch.manual_seed(0)
    return nn.Sequential(Linear(16, 64), nn.Tanh(), Linear(64, 64), nn.Tanh(), Linear(64, 64)).to(device)


def way(
    rank: int, device: str, kind: str, mesh: Any, how: str = "", of_means: bool = False, attach: bool = True,
    clip: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The parameters at the end. how: "ddp" or "fsdp". of_means: the rank has the mean of its node's gradients."""
    net: Any = model(device)
    if how == "ddp":
        net = DistributedDataParallel(net, bucket_cap_mb=0.02)
    elif how == "fsdp":
        net = sharded(net, mesh)
    optimizer = build(kind, net.parameters(), **OPTIONS, **options)
    if how and attach:
        onebit.attach(net, optimizer)
    ranks = [rank - rank % 2, rank - rank % 2 + 1] if of_means else [rank]
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for each in ranks:
            loss_of(net, each, step).backward()
        for p in net.parameters() if of_means else ():
            p.grad /= 2
        with no_waits(step, device):
            if clip is not None:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
    topology = internals.topology(optimizer)
    assert optimizer.compressing and (topology.slices == 2) == ("node_group" in options and not of_means)
    return torch.cat([each.view(-1).cpu() for each in whole(net)])


def all_ways(rank: int, size: int, device: str, kind: str, start: str, path: str) -> dict[str, Tensor]:
    """Return each way's parameters. The ranks 0, 1 and 2, 3 are nodes."""
    join(rank, size, device, start, path)
    os.environ.pop("GROUP_RANK", None)
    mesh: Any = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    nodes, column = {"node_group": mesh.get_group("shard")}, {"process_group": mesh.get_group("replicate")}
    hybrid = {"how": "fsdp", **column}
    ways: dict[str, dict[str, Any]] = {
        "one level": {},
        "of means": {"of_means": True, "node_group": None, **column},
        "nodes": nodes,
        "nodes, overlap": {"overlap": True, **nodes},
        "nodes, ddp": {"how": "ddp", **nodes},
        "nodes, ddp, overlap": {"how": "ddp", "overlap": True, **nodes},
        "nodes, clipped": {"clip": CLIP, **nodes},
        "hsdp": hybrid,
        "hsdp, averaged in step": {"attach": False, **hybrid},
        "hsdp, clipped": {"clip": CLIP, **hybrid},
    }
    ends = {name: way(rank, device, kind, mesh, **own) for name, own in ways.items()}
    with patch.dict(os.environ, {"GROUP_RANK": str(rank // 2)}):  # as torchrun sets it on two hosts
        ends["nodes that are found"] = way(rank, device, kind, mesh, node_group="auto")
    return ends


SAME = {
    "nodes": ["nodes that are found", "nodes, overlap", "nodes, ddp", "nodes, ddp, overlap"],
    "hsdp": ["hsdp, averaged in step"],
}
NEAR = [("nodes", "of means"), ("nodes", "hsdp"), ("nodes, clipped", "hsdp, clipped")]
FAR = [("nodes", "one level"), ("nodes", "nodes, clipped")]


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def check_ranks(device: str, kind: str, start: str, folder: Path) -> None:
    answers = run_ranks_once(4, all_ways, (device, kind, start, str(folder / "store")), timeout=HUNG)
    ends = answers[0]
    for name in ends:
        assert len({bits([each[name]]) for each in answers}) == 1, f"{name}: the ranks differ"
    for one, others in SAME.items():
        assert [other for other in others if bits([ends[other]]) != bits([ends[one]])] == [], f"not the same as {one}"
    distances = {pair: apart(*(ends[name] for name in pair)) for pair in [*NEAR, *FAR]}
    assert {pair: d for pair, d in distances.items() if d > 1e-4} == {pair: distances[pair] for pair in FAR}
    assert min(distances[pair] for pair in FAR) > 1e-3


CASES = [("OneBitAdam", "default"), ("OneBitLamb", "no backend named"), ("ZeroOneAdam", "default")]
ON_A_GPU = [*CASES, ("OneBitAdam", "bound to its device")]


@pytest.mark.parametrize(("kind", "start"), CASES)
def test_two_nodes_and_hsdp_come_to_what_two_ranks_come_to(kind: str, start: str, tmp_path: Path) -> None:
    check_ranks("cpu", kind, start, tmp_path)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kind", "start"), ON_A_GPU)
def test_two_nodes_and_hsdp_come_to_what_two_ranks_come_to_on_a_gpu(kind: str, start: str, tmp_path: Path) -> None:
    check_ranks("cuda", kind, start, tmp_path)

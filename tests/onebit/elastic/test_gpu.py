"""Ranks with CUDA tensors that leave and join, over Gloo and over NCCL: the CPU's results, and the same bits on all.

Several ranks share the one GPU: see tests/collectives/test_gpu.py.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import onebit
from tests.limits import HUNG
from tests.onebit.checkpoint.states import other_parameters
from tests.onebit.runs import Case, arrays, bits
from tests.ranks import run_ranks_once

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NCCL = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
CASES = [
    Case(kind, ((64, 300), (33,), (4096,)), options={"block_size": 256, **own})
    for kind, own in {
        "OneBitAdam": {"freeze_step": 3},
        "OneBitLamb": {"freeze_step": 3},
        "ZeroOneAdam": {"var_update_scaler": 2},
    }.items()
]


def three_two_three(rank: int, size: int, device: str, backend: str) -> list[tuple[bytes, list[np.ndarray]]]:
    """Return each case's parameters at the end; the last rank is lost after step 6, a fresh one comes after step 9."""
    if device == "cuda":
        os.environ |= {"NCCL_HOSTID": f"r{rank}", **NCCL}
        torch.cuda.set_device(0)
    return [_run(case, rank, device, backend) for case in CASES]


def _run(case: Case, rank: int, device: str, backend: str) -> tuple[bytes, list[np.ndarray]]:
    three, two, again = (dist.new_group(ranks, backend=backend) for ranks in ([0, 1, 2], [0, 1], [0, 1, 2]))
    params = [nn.Parameter(p.detach().to(device)) for p in case.parameters()]
    optimizer = case.build(params, three)
    _train(case, rank, optimizer, params, range(1, 7))
    if rank < 2:
        onebit.reform(optimizer, two)
        _train(case, rank, optimizer, params, range(7, 10))
    else:
        params = other_parameters(case)
        optimizer = case.build(params, again)
        for p in params:  # a model that moves after its optimizer was built
            p.data = p.data.to(device)
    onebit.reform(optimizer, again)
    _train(case, rank, optimizer, params, range(10, 13))
    assert optimizer.compressing and optimizer.report().left + optimizer.report().came >= 1
    there = [nn.Parameter(p.detach().cpu()) for p in params]
    return bits(there), arrays(there)


def _train(case: Case, rank: int, optimizer: onebit.OneBitOptimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = g.to(p.device)
        optimizer.step()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_leave_and_join_as_on_a_cpu(backend: str) -> None:
    there = run_ranks_once(3, three_two_three, ("cuda", backend), timeout=HUNG)
    here = run_ranks_once(3, three_two_three, ("cpu", "gloo"), timeout=HUNG)
    for case, *ranks in zip(CASES, *there, strict=True):
        assert len({own for own, _ in ranks}) == 1, case.kind
    for (_, on_gpu), (_, on_cpu) in zip(there[0], here[0], strict=True):
        for a, b in zip(on_gpu, on_cpu, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

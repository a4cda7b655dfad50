"""The same numeric test with CUDA tensors: several NCCL ranks on one GPU, and Gloo through pinned memory.

NCCL refuses two ranks on one GPU of one host; a host id of its own for each rank makes them strangers that talk through
sockets on loopback. That is right for correctness and says nothing of speed.
"""

import os

import pytest
import torch
import torch.distributed as dist

from tests.collectives import steps
from tests.collectives.steps import Case
from tests.limits import HUNG
from tests.ranks import run_ranks_once

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CASES = [
    Case((10_000, 63, 2049), 2048, chunks=1, steps=20),
    Case((10_000, 63, 2049), 256, chunks=3, steps=20),
    Case((10_000, 63, 2049), 256, chunks=2, scale="tensor", norm="l2", steps=20),
    Case((4096, 7), 2048, dtype="bfloat16", steps=10),
]


def on_one_gpu(rank, size, cases, backend):
    os.environ |= {"NCCL_HOSTID": f"r{rank}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)
    made = dist.new_group(range(size), backend=backend)
    recorded = [steps.record(case, rank, made, device="cuda") for case in cases]
    dist.barrier()
    return recorded


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_cuda_tensors_follow_the_simulation(size, backend):
    ranks = run_ranks_once(size, on_one_gpu, (CASES, backend), timeout=HUNG, group_timeout=120)
    for case, recorded in zip(CASES, zip(*ranks, strict=True), strict=True):
        steps.check(case, list(recorded))

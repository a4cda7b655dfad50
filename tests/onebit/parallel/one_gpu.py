"""Several ranks on the one GPU over NCCL, each as if alone on its host; on a CPU the same over Gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

STEPS, FREEZE = 9, 3
QUIET = (7, 8, 9)  # steps in which nothing is tuned or frozen any more
ALONE = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def join(rank: int, size: int, device: str, start: str, path: str) -> None:
    """Make the ranks' default group anew, as `start` says."""
    if device == "cuda":
        os.environ |= {"NCCL_HOSTID": f"r{rank}", **ALONE}
        torch.cuda.set_device(0)
    dist.destroy_process_group()
    backend = {"no backend named": None, "cpu:gloo": "gloo"}.get(start, "nccl" if device == "cuda" else "gloo")
    own = torch.device(device, 0) if start == "bound to its device" else None
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size, device_id=own)


@contextmanager
def no_waits(step: int, device: str) -> Iterator[None]:
    """Make a wait for a GPU in here an error."""
    if device == "cuda" and step in QUIET and dist.get_backend() == "nccl":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")

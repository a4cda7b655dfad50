"""The cases that the tests of the passes run on, and the backends."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

GPU = "cuda" if torch.cuda.is_available() else "cpu"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HALF_PLACE = {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}  # what rounding to a 16-bit dtype may change, relatively
ELEMENTWISE = 2e-6  # a dozen fp32 roundings, and hyper-parameters in fp32
GUARD, SENTINEL = 8, -77.0  # elements beside a tensor, 16 bytes of the narrowest dtype, and their values


def backend(name: str) -> ModuleType:
    """ptx: the GPU's passes, compiled, on the CPU's tensors (see tests.ptx)."""
    return importlib.import_module("onebit.kernels." + {"triton": "gpu", "ptx": "gpu"}.get(name, name))


def device_of(name: str) -> str:
    return GPU if name == "triton" else "cpu"


@dataclass(frozen=True)
class Case:
    """One point of the grid. `senders`: the messages that replies and packed momentum have of a block. `grain`: blocks
    that a Triton program takes, or at least a CPU thread."""

    numels: tuple[int, ...]
    block_size: int = 32
    ranks: int = 1
    chunks: int = 1
    scale: str = "block"
    norm: str = "l1"
    param: torch.dtype = F32
    grad: torch.dtype = F32
    master: bool = False
    momentum: str = "dense"  # or "packed" or "none"
    senders: int = 1
    missing: tuple[int, ...] = ()
    unaligned: bool = False
    groups: int = 1
    grain: int = 1


# Every scale, norm, dtype, form of momentum and kind of reply, with tails, several messages, chunks and groups.
CASES = {
    "three-groups-tensor": Case((63, 7, 1), ranks=2, scale="tensor", momentum="packed", senders=3, groups=3),
    "fp16-master-2049": Case(
        (2049,), 2048, 2, scale="tensor", norm="l2", param=F16, grad=F16, master=True, momentum="packed"
    ),
    "unaligned-bf16-96": Case((192, 100), 96, norm="l2", param=BF16, grad=BF16, momentum="packed", unaligned=True),
    "chunks": Case((500, 63, 1, 129), 32, 2, 3, momentum="packed", missing=(3,), groups=2, grain=2),
    "senders-96": Case((500, 63, 1, 192), 96, 2, norm="unbiased", momentum="packed", senders=2, groups=2, grain=2),
    "empty-parameters": Case((0, 40, 0, 5, 0), ranks=2, scale="tensor", param=F16, momentum="none"),
    "unbiased-bf16-chunks": Case(
        (2049, 40), 2048, 2, 2, norm="unbiased", param=BF16, grad=BF16, master=True, senders=2, missing=(1,)
    ),
}
GRID = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys(), indirect=True)  # conftest sets the grain
ON_BACKENDS = pytest.mark.parametrize("name", ["cpu", "triton"])
SCALES = pytest.mark.parametrize("scale", ["block", "tensor"])
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked and scaled"])

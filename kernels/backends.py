"""Which backend runs a pass: Numba's for CPU tensors, in place, or Triton's for CUDA and ROCm tensors."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import profiler

from onebit.kernels.data.kept import Kept
from onebit.kernels.passes import Pass

BackendName = Literal["cpu", "gpu"]


class Backend(Protocol):
    """What onebit.kernels.cpu and .gpu have."""

    PASSES: dict[Any, Any]
    """What runs each pass."""

    def run(self, work: Pass) -> None:
        """Run a pass."""

    def restore(self, kept: Kept, flags: Tensor) -> None:
        """Every tensor as its copy is, bit for bit, where flags[0] is not 0.

        Bytes: none; where the flag is set all copies are read, and all tensors written.
        """


class Profiled:
    """A backend whose passes show up in profiles as `onebit.<name>`: in torch.profiler's, and as NVTX ranges by
    torch.autograd.profiler.emit_nvtx.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.PASSES = backend.PASSES

    def run(self, work: Pass) -> None:
        if profiler._is_profiler_enabled:
            with labelled(work.name):
                self.PASSES[type(work)](work)
        else:
            self.PASSES[type(work)](work)

    def restore(self, kept: Kept, flags: Tensor) -> None:
        with labelled("restore"):
            self._backend.restore(kept, flags)


def labelled(name: str) -> AbstractContextManager[None]:
    """A context that profiles of torch.profiler and emit_nvtx show as `onebit.<name>`; a label costs 20 us, so others
    get none."""
    return profiler.record_function(f"onebit.{name}") if profiler._is_profiler_enabled else nullcontext()


@functools.cache
def load(name: BackendName) -> Backend:
    """A backend by name, imported on first use: the GPU's needs Triton, and the tuner, which launching a kernel needs,
    measures kernels itself.
    """
    return Profiled(cast(Backend, import_module(f"onebit.kernels.{name}")))


@functools.cache
def backend(device: torch.device) -> Backend:
    """The passes for tensors on a device: Triton's for CUDA and ROCm, those of `cpu` for CPU tensors."""
    names: dict[str, BackendName] = {"cuda": "gpu", "cpu": "cpu"}
    if device.type not in names:
        raise ValueError(
            f"no kernels for tensors on {device}: onebit runs on CUDA, ROCm and CPU tensors. Move the parameters with "
            f".to('cuda') or .to('cpu')"
        )
    try:
        return load(names[device.type])
    except ImportError as error:
        if device.type == "cpu" and not (error.name or "").startswith("onebit"):
            raise ModuleNotFoundError(
                f"tensors on {device} need Numba, which cannot be imported ({error}): pip install numba", name="numba"
            ) from error
        if error.name != "triton":
            raise
        raise ModuleNotFoundError(
            f"tensors on {device} need Triton, which is not installed: pip install triton", name="triton"
        ) from error

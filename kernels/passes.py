"""Which backend a device gets: one host function a pass, three implementations with the same signature."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.autograd.profiler import record_function

logger = logging.getLogger("onebit")


class Passes:
    """A module's passes, each a range in profiles under its name: torch.profiler's, and NVTX by emit_nvtx."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.__name__ = module, module.__name__

    def __getattr__(self, name: str) -> Callable[..., Any]:
        run = getattr(self.module, name)

        @functools.wraps(run)
        def ranged(*args: Any, **options: Any) -> Any:
            with record_function(f"onebit.{name}"):
                return run(*args, **options)

        setattr(self, name, ranged)  # asked for once
        return ranged


@functools.cache
def backend(device: torch.device) -> Passes:
    """The passes for a device: Triton's for CUDA and ROCm tensors, compiled loops for CPU tensors. Where Numba, which
    compiles them, cannot be imported, the reference does the work.
    """
    names = {"cuda": "onebit.kernels.gpu", "cpu": "onebit.kernels.cpu"}
    if device.type not in names:
        raise ValueError(
            f"no kernels for tensors on {device}: onebit runs on CUDA, ROCm and CPU tensors. Move the parameters with "
            f".to('cuda') or .to('cpu')"
        )
    try:
        return Passes(import_module(names[device.type]))
    except ImportError as error:
        if device.type == "cpu" and not (error.name or "").startswith("onebit"):
            logger.warning(
                "Numba cannot be imported (%s): the slow reference does the passes on CPU tensors. "
                "For compiled ones: pip install numba",
                error,
            )
            return Passes(import_module("onebit.kernels.reference"))
        if error.name != "triton":
            raise
        raise ModuleNotFoundError(
            f"tensors on {device} need Triton, which is not installed: pip install triton", name="triton"
        ) from error

"""What one device does to one buffer: the fused passes, the layout they run over and the bytes they exchange."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch


def backend(device: torch.device) -> ModuleType:
    """The passes for a device: Triton's for CUDA and ROCm tensors, the tiled ones for CPU tensors."""
    names = {"cuda": "onebit.kernels.gpu", "cpu": "onebit.kernels.cpu"}
    if device.type not in names:
        raise ValueError(
            f"no kernels for tensors on {device}: onebit runs on CUDA, ROCm and CPU tensors. Move the parameters with "
            f".to('cuda') or .to('cpu')"
        )
    try:
        return import_module(names[device.type])
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ModuleNotFoundError(
            f"tensors on {device} need Triton, which is not installed: pip install triton", name="triton"
        ) from error

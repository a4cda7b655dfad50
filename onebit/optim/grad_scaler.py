"""GradScaler, whose scale is to stay the same on all ranks.

A scaler looks at its own rank's gradients and halves its scale where they are not finite. Where all ranks leave a step
out since those of one are not, all scalers have to know. A scaler takes nothing back: `found_inf` and `grad_scale` are
new tensors, and the argument `grad_scaler` brings a FutureWarning with every step. So this writes where
`GradScaler.update` reads: the scaler is found by its `step`, which is running.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.amp import GradScaler


def report_to_scaler(optimizer: torch.optim.Optimizer, flags: Tensor) -> None:
    """Tell the scaler within `GradScaler.step(optimizer)` that it has found what is not finite if `flags`, int32 [1],
    is set."""
    scaler = _scaler_of(optimizer) if hasattr(optimizer, "found_inf") else None
    if scaler is not None:
        found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:  # a rank without any gradient
            found[flags.device] = torch.zeros((), dtype=torch.float32, device=flags.device)
        for values in found.values():
            values += flags.view_as(values).to(values.device)


def _scaler_of(optimizer: torch.optim.Optimizer) -> GradScaler | None:
    """The scaler whose `step` has called the optimizer's."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__ and frame.f_locals["optimizer"] is optimizer:
            scaler: GradScaler = frame.f_locals["self"]
            return scaler
        frame = frame.f_back
    return None

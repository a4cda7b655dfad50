"""HuggingFace's Accelerate: `attach` after `accelerator.prepare`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from onebit.integrations.attaching import attach_if_distributed
from onebit.parallel.unwrap import own_optimizer


def attach(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Attach what `accelerator.prepare(model, optimizer)` has returned, once, before the first backward pass.

    From then on `accelerator.save_state` synchronizes the optimizer before it writes anything, so that as many
    processes go on bit for bit after `load_state`. As ever with them, every rank calls both. With Accelerate's own
    FSDP plugin states are written before that: call `optimizer.optimizer.synchronize()` yourself, then `save_state`.

    Args:
        accelerator: the one that has prepared both.
        model: the prepared model.
        optimizer: the prepared optimizer.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            f"attach needs the optimizer that accelerator.prepare(model, optimizer) returns, this is a "
            f"{type(optimizer).__name__}: prepare both first, then attach what comes back"
        )
    inner = own_optimizer(optimizer, "attach")
    attach_if_distributed(model, inner)

    def synchronize(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        inner.synchronize()

    accelerator.register_save_state_pre_hook(synchronize)

"""HuggingFace's Accelerate: `attach` after `accelerator.prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from onebit.integrations.whole_state import FOLDER, WholeState, attach_if_distributed
from onebit.parallel.unwrap import own_optimizer


def attach(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Attach what `accelerator.prepare(model, optimizer)` has returned, once, before the first backward pass.

    From then on `accelerator.save_state` also writes the state of every rank, into the folder `onebit` of what it
    saves, and `load_state` restores it: as many processes go on bit for bit. As ever with them, every rank calls both.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            f"attach needs the optimizer that accelerator.prepare(model, optimizer) returns, this is a "
            f"{type(optimizer).__name__}: prepare both first, then attach what comes back"
        )
    inner = own_optimizer(optimizer, "attach")
    attach_if_distributed(model, inner)
    whole = WholeState(accelerator.unwrap_model(model, keep_torch_compile=False), inner)

    def folder(checkpoint: str, models: list[nn.Module]) -> Path | None:
        """Numbered as Accelerate numbers its models; None of one that `free_memory` has made it forget."""
        plain = [accelerator.unwrap_model(each, keep_torch_compile=False) for each in models]
        place = next((i for i, each in enumerate(plain) if each is whole.model), None)
        return None if place is None else Path(checkpoint) / (f"{FOLDER}_{place}" if place else FOLDER)

    def save(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        if (to := folder(output_dir, models)) is not None:
            whole.save(to)

    def load(models: list[nn.Module], input_dir: str) -> None:
        if (source := folder(input_dir, models)) is not None:
            whole.expect(source)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)

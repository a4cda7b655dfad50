"""What other libraries wrap models and optimizers in, and what is inside.

torch.compile      _orig_mod            around DDP or within it
DDP                module
replicate()        none: the module stays what it is, and its state has a DDP of all parameters
Lightning Fabric   _forward_module      around DDP;  optimizer: of its optimizers
Accelerate         optimizer            of its optimizers; its models are DDP
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onebit.optimizers.optimizer import OneBitOptimizer


def own_optimizer(optimizer: torch.optim.Optimizer, what: str) -> OneBitOptimizer:
    """The optimizer of onebit that it is, or that is in it; `what` needs one, or it is a TypeError."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, OneBitOptimizer):
        raise TypeError(
            f"{what} needs an optimizer of onebit, such as OneBitAdam; this is a {type(optimizer).__name__}"
        )
    return optimizer


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """A model, what is in it, what is in that, and so on."""
    yield model
    for name in ("_forward_module", "_orig_mod", "module"):
        if isinstance(inner := getattr(model, name, None), nn.Module):
            yield from layers_of(inner)
            return


def ddp_of(model: nn.Module) -> tuple[DistributedDataParallel, nn.Module] | None:
    """The DDP that averages a model's gradients, and the module that it is of."""
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")  # where someone has imported it
    for layer in layers_of(model):
        if isinstance(layer, DistributedDataParallel):
            return layer, own_module(layer, "DDP")
        state = None if composable is None else composable.replicate.state(layer)
        if state is not None:
            if not state.has_initialized:  # which the first forward pass would do
                state.lazy_init()
            return state._ddp, layer
    return None


def own_module(model: nn.Module, what: str) -> nn.Module:
    """The user's module, whose names a checkpoint has: they are the same with DDP and without, compiled or not."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what} needs a model, a torch.nn.Module; this is a {type(model).__name__}")
    known = ("_forward_module", "_orig_mod", *(["module"] if isinstance(model, DistributedDataParallel) else []))
    inner = next((each for name in known if isinstance(each := getattr(model, name, None), nn.Module)), None)
    return model if inner is None else own_module(inner, what)

"""DDP's communication hook, of which a model has one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from onebit.kernels import streams

Bucket = torch.futures.Future[Tensor]


def register(ddp: DistributedDataParallel, state: Any, hook: Callable[[Any, GradBucket], Bucket]) -> None:
    """Register a hook with a model that has none, or it is a ValueError."""
    before = list(ddp._comm_hooks)
    try:
        ddp.register_comm_hook(state, hook)
    except RuntimeError as refused:
        ddp._comm_hooks[:] = before
        if ddp.mixed_precision is not None:
            why = "mixed_precision has one. Wrap the model anew without it; take torch.autocast, or gradient_dtype"
        else:
            others = ", ".join(getattr(hook, "__name__", repr(hook)) for hook, _ in before) or "a built-in one"
            why = f"register_comm_hook was called with another one ({others}). Wrap the model anew without that call"
        raise ValueError(
            f"the model has a communication hook already, which says how its gradients are averaged, and DDP takes one "
            f"alone: {why}"
        ) from refused


def leave_as_is(bucket: GradBucket) -> Bucket:
    """Return a bucket as it is, with nothing more to wait for."""
    flat = bucket.buffer()
    future = streams.future(flat.device)
    future.set_result(flat)
    return future

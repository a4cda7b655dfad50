"""DDP's buckets, which compressed steps have no use for.

DDP copies every gradient into a bucket, and back when the bucket was averaged: 16 B an element. Where the coming step
sends momentum, backward runs as within DDP's no_sync, and gradients stay where they are. What else no_sync does, to
leave out the broadcast of buffers, is not wanted.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class _Local:
    """Stands for False where DDP has whether backward averages gradients. A user's no_sync puts False there, and puts
    back what it found. A copied or saved model has no optimizer attached: there it is True."""

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        return bool, (True,)


LOCAL: Any = _Local()


def within_no_sync(model: DistributedDataParallel) -> bool:
    """Return whether the user accumulates gradients."""
    return model.require_backward_grad_sync is False


def leave_out_buckets(model: DistributedDataParallel, buckets: bool) -> None:
    """Leave the buckets out of the coming backward pass, or don't. A user's no_sync stays as it is."""
    if not within_no_sync(model):
        model.require_backward_grad_sync = LOCAL if buckets else True


def forget_used(model: DistributedDataParallel) -> None:
    """Every optimizer has taken its step. With find_unused_parameters DDP marks what backward has used, until buckets
    are averaged: marks of passes without buckets would be those of the next one with them."""
    if model.find_unused_parameters and not model.static_graph:
        model.reducer._reset_state()


def keep_buffers_the_same(model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Have rank 0's buffers broadcast before the next forward pass, as they are without us. Called after each."""
    if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync is LOCAL:
        model.require_forward_param_sync = True

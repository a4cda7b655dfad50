"""Checks of a saved residual, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onebit.kernels.data.checks import is_whole
from onebit.kernels.data.hyper import LARGEST

ON_HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # a residual, while it is no exchange's


def check_names(state: Any, names: Sequence[str], of: str) -> None:
    """A state has these names, and no others."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a dict, as state_dict() returns it, not a {type(state).__name__}")
    if set(state) != set(names):
        raise ValueError(f"not a state of {of}: it has {list(state)!r:.200}, not {list(names)}")


def checked_residual(value: Any, shape: Sequence[int], name: str) -> Tensor:
    """A copy of the residual of `name` in fp32, on the host. What does not fit is an error."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"the residual of {name} is a tensor of floating-point numbers, not {kind}: it was damaged")
    if value.is_meta or value.is_nested or value.layout != torch.strided:
        raise ValueError(f"the residual of {name} is sparse, nested or on device meta: load one with all values")
    if list(value.shape) != list(shape):
        raise ValueError(
            f"the residual of {name} has shape {list(value.shape)} in the state, here it is {list(shape)}: the state "
            f"is another model's"
        )
    copy = value.detach().to(**ON_HOST, copy=True)
    if not bool((copy.abs() <= LARGEST).all()):
        raise ValueError(f"the residual of {name} has values that no run leaves, not finite or beyond 2^40: damaged")
    return copy


def checked_count(value: Any, name: str) -> int:
    """A count, such as that of the bytes that a rank had sent."""
    if not is_whole(value, least=0):
        raise ValueError(f"{name!r} is a whole number in a state, not {value!r:.80}: it was damaged")
    return int(value)

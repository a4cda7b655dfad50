"""What torch.compile is to leave alone: passes write to memory by its address, which a compiled graph does not see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """`function` without autograd, which runs as it is also where it is called by compiled code. What it makes under
    inference_mode could not be written to outside."""
    disabled: Callable[..., Any] | None = None  # made with the first call, since it imports the compiler

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(torch.inference_mode(False)(torch.no_grad()(function)))
        return disabled(*args, **kwargs)

    return call  # type: ignore[return-value]

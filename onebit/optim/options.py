"""What a user may choose, checked once: a ValueError says what is wrong, why, and what to pass instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from onebit.kernels.data.layout import MOST_CHUNKS, check_block_size
from onebit.kernels.data.wire import Format, Norm, Scale, is_one_of
from onebit.warning import warn

Dead = Literal["floor", "freeze"]
OnDivergence = Literal["raise", "broadcast"]

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Options:
    """The choices that hold for a whole optimizer; those of a param group stay in the group."""

    freeze_step: int | Literal["auto"]
    freeze_threshold: float
    freeze_window: int | None
    bias_correction: bool
    dead: Dead
    variance_floor: float
    scale: Scale
    norm: Norm
    block_size: int
    chunks: int | Literal["auto"]
    master_weights: bool
    overlap: bool
    check_every: int
    on_divergence: OnDivergence
    gradient_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        if not is_one_of(self.freeze_step, ("auto",)) and not _whole(self.freeze_step, least=0):
            raise ValueError(
                f"freeze_step={self.freeze_step!r}: the last step of stage 1 must be a whole number, 0 or more, or "
                f'"auto". Papers use 15 to 25 % of all steps'
            )
        if not is_number(self.freeze_threshold) or not 0 < self.freeze_threshold < 1:
            raise ValueError(
                f"freeze_threshold={self.freeze_threshold!r}: it bounds the ratio of two variances from below and "
                f"must lie between 0 and 1; the papers use 0.96"
            )
        if self.freeze_window is not None and not _whole(self.freeze_window, least=1):
            raise ValueError(
                f"freeze_window={self.freeze_window!r}: it is the number of steps between the two variances that "
                f"are compared, 1 or more; None takes 1 / (1 - beta2)"
            )
        if not is_one_of(self.dead, get_args(Dead)):
            raise ValueError(f"dead={self.dead!r}: it must be one of {get_args(Dead)}")
        if not is_number(self.variance_floor) or not 0 <= self.variance_floor <= 1:
            raise ValueError(
                f"variance_floor={self.variance_floor!r}: it is the least variance of a coordinate at the freeze, as a "
                f"part of the mean of its parameter's, and must lie between 0 (as the papers have it) and 1"
            )
        if not is_one_of(self.chunks, ("auto",)) and not _whole(self.chunks, least=1, most=MOST_CHUNKS):
            raise ValueError(f'chunks={self.chunks!r}: it must be a positive number up to {MOST_CHUNKS}, or "auto"')
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap={self.overlap!r}: it must be True or False")
        if not _whole(self.check_every, least=0):
            raise ValueError(
                f"check_every={self.check_every!r}: it is the number of steps between two checks that all ranks hold "
                f"the same bits, and must be a whole number; 0 never checks"
            )
        if not is_one_of(self.on_divergence, get_args(OnDivergence)):
            raise ValueError(f"on_divergence={self.on_divergence!r}: it must be one of {get_args(OnDivergence)}")
        if self.gradient_dtype is not None and not _is_16_bits(self.gradient_dtype):
            raise ValueError(
                f"gradient_dtype={self.gradient_dtype!r}: it is what gradients are rounded to on the wire in stage 1, "
                f"and must be torch.bfloat16, torch.float16, or None, which sends them as they are"
            )
        check_block_size(self.block_size)
        Format(self.block_size, 1, self.scale, self.norm)


def check_group(group: Mapping[str, Any]) -> None:
    """The numbers of one param group."""
    lr, betas, eps, decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} elements: a learning rate is one number")
        if lr.is_meta or lr.is_complex() or lr.is_quantized or lr.layout is not torch.strided:
            raise ValueError(f"lr is a tensor of {lr.dtype} without a value: a learning rate is one number")
        lr = float(lr)
    if not is_number(lr) or lr < 0:
        raise ValueError(f"lr={lr!r}: a learning rate is a finite number, 0 or more")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
        raise ValueError(f"betas={betas!r}: two decay rates are needed, each at least 0 and below 1, as (0.9, 0.999)")
    if not is_number(eps) or eps < 0:
        raise ValueError(f"eps={eps!r}: it is added to a denominator and must be a finite number, 0 or more")
    if not is_number(decay) or decay < 0:
        raise ValueError(f"weight_decay={decay!r}: it must be a finite number, 0 or more")


def warn_if_early(options: Options, beta2: float) -> None:
    """Without bias correction the variance needs 1 / (1 - beta2) steps to grow to its size."""
    steps = round(1 / (1 - beta2))
    if not options.bias_correction and options.freeze_step != "auto" and 0 < options.freeze_step < steps:
        warn(
            f"freeze_step={options.freeze_step} without bias correction freezes a variance that is still growing from "
            f"zero: with beta2={beta2:g} it takes about {steps} steps to reach its size, and stage 2 would take too "
            f"large steps for good. Freeze later, or pass bias_correction=True"
        )


def _is_16_bits(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in (torch.bfloat16, torch.float16)


def _whole(value: object, least: int, most: int = 2**31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    """As kernels hold it: a finite fp32."""
    return isinstance(value, Real) and bool(-_LARGEST <= value <= _LARGEST)  # type: ignore[operator]

"""scan in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from onebit.kernels.data.hyper import LARGEST
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.reference.blocks import gather, hyper_columns


def scan(span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
    """flags[0] = 1 if any |g'| is NaN, inf or beyond LARGEST;  squares[b] = sum of g'^2 over block b."""
    g = gather(span, grads) * hyper_columns(span, hyper).grad_scale
    flags.masked_fill_(~(g.abs() <= LARGEST).all(), 1)
    if squares is not None:
        squares.copy_((g * g).sum(1))

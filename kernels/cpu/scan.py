"""scan: one read of the gradients before anything depends on them.

    flags[0] = 1 where |g'| is NaN, inf or beyond LARGEST, else as it was;   squares[b] = sum of g'^2 over block b

Bytes an element, fp32: reads g 4.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from onebit.kernels.cpu.blocks import ALL, at, hyper_of, locate, over, staged, table, up
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, magnitude, splat, total
from onebit.kernels.cpu.memory import load, long_at, set_float, set_int
from onebit.kernels.cpu.threads import over_blocks
from onebit.kernels.data import hyper as limits
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers

LARGEST = np.float32(limits.LARGEST)
SAFE = np.float32(limits.LARGEST**2)  # a sum of squares up to here holds none of an element that is too large


@tile
def _sum_of_squares(values, count, scale):
    found = splat(np.float32(0))
    for i in range(0, count, WIDTH):
        g = load(values + 4 * i) * scale
        found = found + g * g
    return total(found)


@tile
def _finite(values, count, scale):
    found = ALL
    for i in range(0, count, WIDTH):
        found &= magnitude(load(values + 4 * i) * scale) <= LARGEST  # false for NaN
    return found == ALL


@Loop
def _scan(
    first: int, stop: int, scratch: int, owner: int, rows: int, first_block: int, size: int,
    grads: int, grad: int, hyper: int, flags: int, squares: int,
) -> None:  # fmt: skip
    for block in range(first, stop):
        p, group, offset, valid = locate(first_block + block, owner, rows, size)
        values = staged(long_at(grads + 8 * p), grad, offset, valid, scratch)
        scale = hyper_of(hyper, group).grad_scale
        square = _sum_of_squares(values, up(valid), scale)
        if squares != 0:
            set_float(squares + 4 * block, square)
        if not square <= SAFE and not _finite(values, up(valid), scale):
            set_int(flags, 1)


def scan(span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
    """`onebit.kernels.reference.scan` in one loop."""
    arguments = (*over(span), *table(grads), at(hyper), at(flags), at(squares))
    over_blocks(_scan, span.count, span.layout.block_size, arguments, scratch_blocks=1)

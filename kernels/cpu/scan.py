"""scan: one read of the gradients before anything depends on them.

    flags[0] = 1 where |g'| is NaN, inf or beyond LARGEST, else as it was;   squares[b] = sum of g'^2 over block b

Bytes an element, fp32: reads g 4.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from onebit.kernels.cpu.blocks import (
    ALL,
    FP32,
    at,
    hyper_of,
    locate,
    numel_of,
    over,
    staged,
    table,
    up,
)
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, ZERO, magnitude, splat, total
from onebit.kernels.cpu.memory import load, long_at, set_float, set_int
from onebit.kernels.cpu.threads import over_blocks
from onebit.kernels.data import hyper as limits
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers

LARGEST = np.float32(limits.LARGEST)
SAFE = np.float32(limits.LARGEST**2)  # a sum of squares up to here holds none of an element that is too large


@tile
def _squares(values, i, scale):
    g = load(values + 4 * i) * scale
    return g * g


@tile
def _sum_of_squares(values, count, scale):
    found = splat(ZERO)
    for i in range(0, count, WIDTH):
        found = found + _squares(values, i, scale)
    return total(found)


@tile
def _four_sums(values, size, scale):
    """The same of four blocks side by side: four streams come from memory much faster than one."""
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    for i in range(0, size, WIDTH):
        a = a + _squares(values, i, scale)
        b = b + _squares(values, size + i, scale)
        c = c + _squares(values, 2 * size + i, scale)
        d = d + _squares(values, 3 * size + i, scale)
    return total(a), total(b), total(c), total(d)


@tile
def _finite(values, count, scale):
    found = ALL
    for i in range(0, count, WIDTH):
        found &= magnitude(load(values + 4 * i) * scale) <= LARGEST  # false for NaN
    return found == ALL


@tile
def _leave(square, values, count, scale, block, flags, squares):
    """What a block leaves: its sum, and the flag if one of its elements is not finite."""
    if squares != 0:
        set_float(squares + 4 * block, square)
    if not square <= SAFE and not _finite(values, count, scale):
        set_int(flags, 1)


@Loop
def _scan(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    grads: int, grad: int, hyper: int, flags: int, squares: int,
) -> None:  # fmt: skip
    end = stop  # backwards: what is read first afterwards is then in the cache
    while end > first:
        block = end - 4
        if block >= first and grad == FP32:
            its = locate(blocks, parameters, block)
            address, scale = long_at(grads + 8 * its.parameter), hyper_of(hyper, its.group).grad_scale
            if address != 0 and its.offset + 4 * size <= numel_of(parameters, its.parameter):
                values = address + 4 * its.offset
                a, b, c, d = _four_sums(values, size, scale)
                _leave(a, values, size, scale, block, flags, squares)
                _leave(b, values + 4 * size, size, scale, block + 1, flags, squares)
                _leave(c, values + 8 * size, size, scale, block + 2, flags, squares)
                _leave(d, values + 12 * size, size, scale, block + 3, flags, squares)
                end = block
                continue
        end -= 1
        its = locate(blocks, parameters, end)
        n, scale = up(its.valid), hyper_of(hyper, its.group).grad_scale
        values = staged(long_at(grads + 8 * its.parameter), grad, its.offset, its.valid, scratch)
        _leave(_sum_of_squares(values, n, scale), values, n, scale, end, flags, squares)


def scan(span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
    """`onebit.kernels.passes.Backend.scan` in one loop."""
    arguments = (*over(span), *table(grads), at(hyper), at(flags), at(squares))
    over_blocks(_scan, span, arguments, scratch_blocks=1)

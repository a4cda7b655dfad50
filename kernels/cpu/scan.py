"""scan: one read of the gradients before anything depends on them. `onebit.kernels.passes` has the equations and the
bytes.
"""

from __future__ import annotations

import numpy as np

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, ZERO, magnitude, splat, total
from onebit.kernels.cpu.memory import load, long_at, set_float, set_int
from onebit.kernels.cpu.threads import one_loop
from onebit.kernels.cpu.tiles import Gradients, Run
from onebit.kernels.data import hyper as limits

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
    found = tiles.ALL
    for i in range(0, count, WIDTH):
        found &= magnitude(load(values + 4 * i) * scale) <= LARGEST  # false for NaN
    return found == tiles.ALL


@tile
def _leave(square, values, count, scale, block, flags, squares):
    """What a block leaves: its sum, and the flag if one of its elements is not finite."""
    if squares != 0:
        set_float(squares + 4 * block, square)
    if not square <= SAFE and not _finite(values, count, scale):
        set_int(flags, 1)


@Loop
def _scan(run: Run, g: Gradients, squares):
    size, end = run.block_size, run.stop  # backwards: what is read first afterwards is then in the cache
    while end > run.first:
        block = end - 4
        if block >= run.first and g.grad_dtype == tiles.FP32:
            its = tiles.locate(run, block)
            address, scale = long_at(g.grad + 8 * its.parameter), tiles.hyper_of(g.hyper, its).grad_scale
            if address != 0 and its.offset + 4 * size <= tiles.numel_of(run, its.parameter):
                values = address + 4 * its.offset
                a, b, c, d = _four_sums(values, size, scale)
                _leave(a, values, size, scale, block, g.flags, squares)
                _leave(b, values + 4 * size, size, scale, block + 1, g.flags, squares)
                _leave(c, values + 8 * size, size, scale, block + 2, g.flags, squares)
                _leave(d, values + 12 * size, size, scale, block + 3, g.flags, squares)
                end = block
                continue
        end -= 1
        its = tiles.locate(run, end)
        n, scale = tiles.up(its.valid), tiles.hyper_of(g.hyper, its).grad_scale
        values = tiles.gradient_at(g, its, tiles.room(run, 0))
        _leave(_sum_of_squares(values, n, scale), values, n, scale, end, g.flags, squares)


PASSES = {passes.Scan: one_loop(_scan, scratch_blocks=1)}

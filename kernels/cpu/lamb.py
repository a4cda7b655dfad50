"""LAMB's warmup: a loop over blocks for the norms, one over parameters for the coefficients, one that moves x.

    u = mhat / (sqrt(vhat) + eps) + wd x;   c = clip(||x|| / ||u||);   x = x - lr c u;   c_avg = b3 c_avg + (1 - b3) c

Bytes an element, fp32: reads g 4, m 4, v 4, x 4, writes m 4, v 4, then reads m 4, v 4, x 4, writes x 4: 40.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from onebit.kernels.cpu.adam import direction
from onebit.kernels.cpu.blocks import (
    ALL,
    at,
    blocks_of,
    first_bits,
    hyper_of,
    locate,
    moments,
    over,
    put,
    staged,
    table,
)
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, splat, total, where
from onebit.kernels.cpu.memory import float_at, int_at, load, long_at, set_float, store
from onebit.kernels.cpu.threads import over_blocks
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers


@tile
def _moments_lanes(i, counts, g_at, m_at, v_at, x_at, h):
    """Sixteen elements; those that do not count stay as they are. Returns the squares of x and u, 0 there."""
    g, old_m, old_v, x = load(g_at + 4 * i), load(m_at + 4 * i), load(v_at + 4 * i), load(x_at + 4 * i)
    m, v = moments(g * h.grad_scale, old_m, old_v, h)
    store(m_at + 4 * i, where(counts, m, old_m))
    store(v_at + 4 * i, where(counts, v, old_v))
    u = direction(m, v, x, h)
    return where(counts, x * x, ZERO), where(counts, u * u, ZERO)


@tile
def _moments_block(valid, g_at, m_at, v_at, x_at, h):
    """Returns the sums of the squares of x and u."""
    of_x, of_u, full = splat(ZERO), splat(ZERO), valid // WIDTH * WIDTH
    for i in range(0, full, WIDTH):
        xx, uu = _moments_lanes(i, ALL, g_at, m_at, v_at, x_at, h)
        of_x, of_u = of_x + xx, of_u + uu
    if full < valid:
        xx, uu = _moments_lanes(full, first_bits(valid - full), g_at, m_at, v_at, x_at, h)
        of_x, of_u = of_x + xx, of_u + uu
    return total(of_x), total(of_u)


@Loop
def _moments(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    params: int, param: int, grads: int, grad: int, hyper: int, flags: int,
    exp_avg: int, exp_avg_sq: int, master: int, of_x: int, of_u: int,
) -> None:  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        p, start = its.parameter, 4 * its.start
        address = long_at(params + 8 * p)
        g_at = staged(long_at(grads + 8 * p), grad, its.offset, its.valid, scratch)
        x_at = staged(address, param, its.offset, its.valid, scratch + 4 * size) if master == 0 else master + start
        h = hyper_of(hyper, its.group)
        xx, uu = _moments_block(its.valid, g_at, exp_avg + start, exp_avg_sq + start, x_at, h)
        set_float(of_x + 4 * block, xx)
        set_float(of_u + 4 * block, uu)


@tile
def _norm(partial, first, stop):
    summed = 0.0
    for block in range(first, stop):
        summed += float_at(partial + 4 * block)
    return np.float32(np.sqrt(summed))


@Loop
def _coefficients(
    count: int, parameters: int, size: int, flags: int, of_x: int, of_u: int, coefficient: int, average: int,
    coeff_beta: float, one_minus_coeff_beta: float, min_coeff: float, max_coeff: float,
) -> None:  # fmt: skip
    if int_at(flags) != 0:
        return
    stop = 0
    for p in range(count):
        first, stop = stop, stop + blocks_of(parameters, p, size)
        x_norm, u_norm = _norm(of_x, first, stop), _norm(of_u, first, stop)
        c = ONE
        if x_norm > ZERO and u_norm > ZERO:
            c = min(max(x_norm / u_norm, np.float32(min_coeff)), np.float32(max_coeff))
        last = float_at(average + 4 * p)
        set_float(coefficient + 4 * p, c)
        set_float(average + 4 * p, np.float32(coeff_beta) * last + np.float32(one_minus_coeff_beta) * c)


@tile
def _apply_lanes(i, counts, m_at, v_at, x_at, lr, h):
    x = load(x_at + 4 * i)
    moved = x - lr * direction(load(m_at + 4 * i), load(v_at + 4 * i), x, h)
    store(x_at + 4 * i, where(counts, moved, x))


@tile
def _apply_block(valid, m_at, v_at, x_at, lr, h):
    full = valid // WIDTH * WIDTH
    for i in range(0, full, WIDTH):
        _apply_lanes(i, ALL, m_at, v_at, x_at, lr, h)
    if full < valid:
        _apply_lanes(full, first_bits(valid - full), m_at, v_at, x_at, lr, h)


@Loop
def _apply(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    params: int, param: int, hyper: int, flags: int, exp_avg: int, exp_avg_sq: int, master: int, coefficient: int,
) -> None:  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        p, start, h = its.parameter, 4 * its.start, hyper_of(hyper, its.group)
        address = long_at(params + 8 * p)
        lr = h.lr * float_at(coefficient + 4 * p)
        x_at = staged(address, param, its.offset, its.valid, scratch) if master == 0 else master + start
        _apply_block(its.valid, exp_avg + start, exp_avg_sq + start, x_at, lr, h)
        put(x_at, address, param, its.offset, its.valid, scratch + 4 * size)


def lamb_warmup(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    state: LambState,
    *,
    coeff_beta: float,
    min_coeff: float,
    max_coeff: float,
    between: Callable[[], None] | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.lamb_warmup` in two loops: the norms are needed whole before x moves."""
    of_x, of_u = state.partial
    blocks, parameters, size = over(span)
    norms = (
        blocks, parameters, size, *table(params), *table(grads), at(hyper), at(flags),
        at(exp_avg), at(exp_avg_sq), at(master), at(of_x), at(of_u),
    )  # fmt: skip
    over_blocks(_moments, span, norms, scratch_blocks=2)
    _coefficients(
        span.layout.parameters, parameters, size, at(flags), at(of_x), at(of_u), at(state.coefficient),
        at(state.average), coeff_beta, 1 - coeff_beta, min_coeff, max_coeff,
    )  # fmt: skip
    if between is not None:
        between()
    applied = (
        blocks, parameters, size, *table(params), at(hyper), at(flags),
        at(exp_avg), at(exp_avg_sq), at(master), at(state.coefficient),
    )  # fmt: skip
    over_blocks(_apply, span, applied, scratch_blocks=1)

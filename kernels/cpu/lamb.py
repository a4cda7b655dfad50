"""LAMB's warmup: a loop over blocks for the norms, one over parameters for the coefficients, one that moves x.
`onebit.kernels.passes` has the equations and the bytes.
"""

from __future__ import annotations

import numpy as np

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.adam import direction
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, splat, total, where
from onebit.kernels.cpu.memory import float_at, int_at, load, set_float, store
from onebit.kernels.cpu.threads import numbers, over_blocks


@tile
def _moments_lanes(i, counts, g_at, m_at, v_at, x_at, h):
    """Sixteen elements; those that do not count stay as they are. Returns the squares of x and u, 0 there."""
    x = load(x_at + 4 * i)
    m, v = tiles.new_moments(i, counts, g_at, m_at, v_at, h)
    u = direction(m, v, x, h)
    return where(counts, x * x, ZERO), where(counts, u * u, ZERO)


@tile
def _moments_block(valid, g_at, m_at, v_at, x_at, h):
    """Returns the sums of the squares of x and u."""
    of_x, of_u, full = splat(ZERO), splat(ZERO), valid // WIDTH * WIDTH
    for i in range(0, full, WIDTH):
        xx, uu = _moments_lanes(i, tiles.ALL, g_at, m_at, v_at, x_at, h)
        of_x, of_u = of_x + xx, of_u + uu
    if full < valid:
        xx, uu = _moments_lanes(full, tiles.first_bits(valid - full), g_at, m_at, v_at, x_at, h)
        of_x, of_u = of_x + xx, of_u + uu
    return total(of_x), total(of_u)


@Loop
def _moments(
    first, stop, scratch, block_table, parameter_table, first_block, block_size, blocks,
    param, param_dtype, master, grad, grad_dtype, hyper, flags, exp_avg, exp_avg_sq, state_partial,
):  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        start = 4 * its.start
        g_at = tiles.gradient_at(grad, grad_dtype, its, scratch)
        x_at = tiles.parameter_at(param, param_dtype, master, its, scratch + 4 * block_size)
        h = tiles.hyper_of(hyper, its.group)
        xx, uu = _moments_block(its.valid, g_at, exp_avg + start, exp_avg_sq + start, x_at, h)
        set_float(state_partial + 4 * block, xx)
        set_float(state_partial + 4 * (blocks + block), uu)


@tile
def _norm(partial, first, stop):
    summed = 0.0
    for block in range(first, stop):
        summed += float_at(partial + 4 * block)
    return np.float32(np.sqrt(summed))


@Loop
def _coefficients(
    parameters, parameter_table, block_size, blocks, flags, state_partial, state_coefficient, state_average,
    coeff_beta: float, one_minus_coeff_beta: float, min_coeff: float, max_coeff: float,
):  # fmt: skip
    if int_at(flags) != 0:
        return
    of_u, stop = state_partial + 4 * blocks, 0
    for p in range(parameters):
        first, stop = stop, stop + tiles.blocks_of(parameter_table, p, block_size)
        x_norm, u_norm = _norm(state_partial, first, stop), _norm(of_u, first, stop)
        c = ONE
        if x_norm > ZERO and u_norm > ZERO:
            c = min(max(x_norm / u_norm, np.float32(min_coeff)), np.float32(max_coeff))
        last = float_at(state_average + 4 * p)
        set_float(state_coefficient + 4 * p, c)
        set_float(state_average + 4 * p, np.float32(coeff_beta) * last + np.float32(one_minus_coeff_beta) * c)


@tile
def _apply_lanes(i, counts, m_at, v_at, x_at, lr, h):
    x = load(x_at + 4 * i)
    moved = x - lr * direction(load(m_at + 4 * i), load(v_at + 4 * i), x, h)
    store(x_at + 4 * i, where(counts, moved, x))


@tile
def _apply_block(valid, m_at, v_at, x_at, lr, h):
    full = valid // WIDTH * WIDTH
    for i in range(0, full, WIDTH):
        _apply_lanes(i, tiles.ALL, m_at, v_at, x_at, lr, h)
    if full < valid:
        _apply_lanes(full, tiles.first_bits(valid - full), m_at, v_at, x_at, lr, h)


@Loop
def _apply(
    first, stop, scratch, block_table, parameter_table, first_block, block_size,
    param, param_dtype, master, hyper, flags, exp_avg, exp_avg_sq, state_coefficient,
):  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        start, h = 4 * its.start, tiles.hyper_of(hyper, its.group)
        lr = h.lr * float_at(state_coefficient + 4 * its.parameter)
        x_at = tiles.parameter_at(param, param_dtype, master, its, scratch)
        _apply_block(its.valid, exp_avg + start, exp_avg_sq + start, x_at, lr, h)
        tiles.put_parameter(x_at, param, param_dtype, its, scratch + 4 * block_size)


def lamb_warmup(work: passes.LambWarmup) -> None:
    """Three loops: the norms are needed whole before x moves."""
    found = work.arguments()
    over_blocks(_moments, work.span, found, scratch_blocks=2)
    _coefficients(*numbers(_coefficients, found))
    if work.between is not None:
        work.between()
    over_blocks(_apply, work.span, found, scratch_blocks=1)


PASSES = {passes.LambWarmup: lamb_warmup}

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
from onebit.kernels.cpu.tiles import Gradients, Parameters, Run


@tile
def _moments_lanes(i, counts, g_at, m_at, v_at, x_at, h):
    """Sixteen elements; those that do not count stay as they are. Returns the squares of x and u, 0 there."""
    x = load(x_at + 4 * i)
    m, v = tiles.new_moments(i, counts, g_at, m_at, v_at, h)
    u = direction(m, v, x, h)
    return where(counts, x * x, ZERO), where(counts, u * u, ZERO)


@Loop
def _moments(run: Run, x: Parameters, g: Gradients, exp_avg, exp_avg_sq, state_partial):
    if int_at(g.flags) != 0:
        return
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        h, m_at, v_at = tiles.hyper_of(g.hyper, its), exp_avg + 4 * its.start, exp_avg_sq + 4 * its.start
        g_at = tiles.gradient_at(g, its, tiles.room(run, 0))
        x_at = tiles.parameter_at(x, its, tiles.room(run, 1))
        of_x, of_u, full = splat(ZERO), splat(ZERO), its.valid // WIDTH * WIDTH
        for i in range(0, full, WIDTH):
            xx, uu = _moments_lanes(i, tiles.ALL, g_at, m_at, v_at, x_at, h)
            of_x, of_u = of_x + xx, of_u + uu
        if full < its.valid:
            xx, uu = _moments_lanes(full, tiles.first_bits(its.valid - full), g_at, m_at, v_at, x_at, h)
            of_x, of_u = of_x + xx, of_u + uu
        set_float(state_partial + 4 * block, total(of_x))
        set_float(state_partial + 4 * (run.blocks + block), total(of_u))


@tile
def _norm(partial, first, stop):
    summed = 0.0
    for block in range(first, stop):
        summed += float_at(partial + 4 * block)
    return np.float32(np.sqrt(summed))


@Loop
def _coefficients(
    run: Run, g: Gradients, state_partial, state_coefficient, state_average,
    coeff_beta: float, one_minus_coeff_beta: float, min_coeff: float, max_coeff: float,
):  # fmt: skip
    if int_at(g.flags) != 0:
        return
    for p in range(run.parameters):
        first, stop = tiles.blocks_of(run, p)
        x_norm, u_norm = _norm(state_partial, first, stop), _norm(state_partial + 4 * run.blocks, first, stop)
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


@Loop
def _apply(run: Run, x: Parameters, g: Gradients, exp_avg, exp_avg_sq, state_coefficient):
    if int_at(g.flags) != 0:
        return
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        h, m_at, v_at = tiles.hyper_of(g.hyper, its), exp_avg + 4 * its.start, exp_avg_sq + 4 * its.start
        lr = h.lr * float_at(state_coefficient + 4 * its.parameter)
        x_at, full = tiles.parameter_at(x, its, tiles.room(run, 0)), its.valid // WIDTH * WIDTH
        for i in range(0, full, WIDTH):
            _apply_lanes(i, tiles.ALL, m_at, v_at, x_at, lr, h)
        if full < its.valid:
            _apply_lanes(full, tiles.first_bits(its.valid - full), m_at, v_at, x_at, lr, h)
        tiles.put_parameter(x_at, x, its, tiles.room(run, 1))


def lamb_warmup(work: passes.LambWarmup) -> None:
    """Three loops: the norms are needed whole before x moves."""
    found = work.arguments()
    over_blocks(_moments, work.span, found, scratch_blocks=2)
    _coefficients(*numbers(_coefficients, found))
    if work.between is not None:
        work.between()
    over_blocks(_apply, work.span, found, scratch_blocks=1)


PASSES = {passes.LambWarmup: lamb_warmup}

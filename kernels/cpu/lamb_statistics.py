"""1-bit LAMB's statistics: a loop over blocks that leaves one number a block, then one over parameters.
`onebit.kernels.passes` has the equations and the bytes.
"""

from __future__ import annotations

import numpy as np

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, largest, root, splat, where
from onebit.kernels.cpu.memory import bits_at, float_at, load, set_float, store
from onebit.kernels.cpu.threads import numbers, over_blocks
from onebit.kernels.cpu.tiles import Messages, Run


@tile
def _square(m, m_prev, h, gamma):
    """(1 - beta2) ghat^2"""
    g = (m - h.beta1 * m_prev) / h.one_minus_beta1 / gamma
    return h.one_minus_beta2 * (g * g)


@tile
def _ratio_lanes(i, counts, square, d_at, v_at, h, gamma, denominator):
    """v of sixteen elements, and v_T / v, 0 where that does not count."""
    old, d = load(v_at + 4 * i), load(d_at + 4 * i)
    v = h.beta2 * old + square
    store(v_at + 4 * i, where(counts, v, old))
    frozen = ONE / (d * gamma)  # sqrt(v_T) + eps
    if denominator != 0:
        ratio = frozen / (root(v) + h.eps)
    else:
        above = frozen - h.eps
        above = where(above > ZERO, above, ZERO)
        ratio = above * above / v
    return where(counts & (v > ZERO) & (d > ZERO), ratio, ZERO)


@tile
def _larger(a, b):
    return where(a > b, a, b)


@tile
def _statistics_block(
    n, valid, kept, m, bits, m_at, m_flat, m_prev, bits_prev, d_at, v_at, h, gamma, denominator
):  # fmt: skip
    """The largest ratio. Where both momenta are packed, ghat^2 has two values: where the sign stayed, and changed.
    Else m lies at `m_at`, or is what the bits stand for, and the momentum before it at `m_flat`."""
    found = splat(ZERO)
    stayed, changed = _square(splat(m), splat(m_prev), h, gamma), _square(splat(m), splat(-m_prev), h, gamma)
    for i in range(0, n, WIDTH):
        if m_at != 0:
            square = _square(load(m_at + 4 * i), load(m_flat + 4 * i), h, gamma)
        elif bits_prev != 0:
            square = where(bits_at(bits + i // 8) ^ bits_at(bits_prev + i // 8), changed, stayed)
        else:
            square = _square(tiles.signed(bits_at(bits + i // 8), m), load(m_flat + 4 * i), h, gamma)
        counts = tiles.counting(i, valid)
        ratio = _ratio_lanes(i, counts, square, d_at, v_at, h, gamma, denominator)
        if kept != 0:
            ratio = where(bits_at(kept + i // 8), ratio, ZERO)
        found = _larger(ratio, found)
    return largest(found)


@Loop
def _statistics(
    run: Run, hyper, replies: Messages, previous: Messages, d, exp_avg_sq, live, gamma, state_partial, denominator
):
    if tiles.any_flag(replies.address, replies.rows, replies.bytes) != 0:
        return
    packed = previous.copies == 1
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        start, n, h = 4 * its.start, tiles.up(its.valid), tiles.hyper_of(hyper, its)
        kept = 0 if live == 0 else tiles.kept_bits(live + its.start // 8, its, tiles.room(run, 2))
        m, m_prev, m_at, m_flat = tiles.find(replies, its), tiles.find(previous, its), 0, previous.address + start
        if replies.copies > 1:
            m_at = tiles.room(run, 0)
            tiles.unpack(m, replies, n, m_at, 0)
        if previous.copies > 1:
            m_flat = tiles.room(run, 1)
            tiles.unpack(m_prev, previous, n, m_flat, 0)
        ratio = _statistics_block(
            n, its.valid, kept, float_at(m.scale), m.bits, m_at, m_flat,
            float_at(m_prev.scale) if packed else ZERO, m_prev.bits if packed else 0, d + start,
            exp_avg_sq + start, h, tiles.value_of(gamma, its.parameter, ONE), denominator,
        )  # fmt: skip
        set_float(state_partial + 4 * block, ratio)


@Loop
def _ratios(
    run: Run, replies: Messages, state_partial, state_coefficient, state_average, state_ratio,
    factor_min: float, factor_max: float, factor_low: float, factor_high: float,
):  # fmt: skip
    if tiles.any_flag(replies.address, replies.rows, replies.bytes) != 0:
        return
    low, high = np.float32(factor_low), np.float32(factor_high)
    for p in range(run.parameters):
        first, stop = tiles.blocks_of(run, p)
        found = ZERO
        for block in range(first, stop):
            found = max(found, float_at(state_partial + 4 * block))
        r, last = found if found > ZERO else ONE, float_at(state_ratio + 4 * p)
        r = min(max(r, low * last), high * last)
        r = min(max(r, np.float32(factor_min)), np.float32(factor_max))
        set_float(state_ratio + 4 * p, r)
        set_float(state_coefficient + 4 * p, r * float_at(state_average + 4 * p))


def lamb_statistics(work: passes.LambStatistics) -> None:
    found = work.arguments()
    over_blocks(_statistics, work.span, found, scratch_blocks=2)
    _ratios(*numbers(_ratios, found))


PASSES = {passes.LambStatistics: lamb_statistics}

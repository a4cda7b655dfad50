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


@Loop
def _statistics(
    run: Run, hyper, replies: Messages, previous: Messages, d, exp_avg_sq, live, gamma, state_partial, denominator
):
    """Leaves the largest ratio of every block. Where both momenta have 1 bit, ghat^2 has two values: where the sign
    stayed, and changed."""
    if tiles.any_flag(replies.address, replies.rows, replies.bytes) != 0:
        return
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        n, h, its_gamma = tiles.up(its.valid), tiles.hyper_of(hyper, its), tiles.value_of(gamma, its.parameter, ONE)
        kept = 0 if live == 0 else tiles.kept_bits(live + its.start // 8, its, tiles.room(run, 2))
        now, last, m_at, last_at = (
            tiles.find(replies, its),
            tiles.find(previous, its),
            0,
            previous.address + 4 * its.start,
        )
        if replies.senders > 1:
            m_at = tiles.room(run, 0)
            tiles.unpack(now, replies, n, m_at, 0)
        if previous.senders > 1:
            last_at = tiles.room(run, 1)
            tiles.unpack(last, previous, n, last_at, 0)
        m, m_prev = float_at(now.scale), float_at(last.scale) if previous.senders == 1 else ZERO
        stayed = _square(splat(m), splat(m_prev), h, its_gamma)
        changed = _square(splat(m), splat(-m_prev), h, its_gamma)
        found = splat(ZERO)
        for i in range(0, n, WIDTH):
            if m_at != 0:
                square = _square(load(m_at + 4 * i), load(last_at + 4 * i), h, its_gamma)
            elif previous.senders == 1:
                square = where(bits_at(now.bits + i // 8) ^ bits_at(last.bits + i // 8), changed, stayed)
            else:
                square = _square(tiles.signed(bits_at(now.bits + i // 8), m), load(last_at + 4 * i), h, its_gamma)
            counts = tiles.counting(i, its.valid)
            ratio = _ratio_lanes(
                i, counts, square, d + 4 * its.start, exp_avg_sq + 4 * its.start, h, its_gamma, denominator
            )
            ratio = tiles.keep(kept, i, ratio)
            found = where(ratio > found, ratio, found)
        set_float(state_partial + 4 * block, largest(found))


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

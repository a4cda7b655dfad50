"""Adam's warmup and update, each one pass over the model. `onebit.kernels.passes` has the equations and the bytes."""

from __future__ import annotations

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, not_zero, root, splat, total, where
from onebit.kernels.cpu.memory import bits_at, float_at, int_at, load, set_float, store
from onebit.kernels.cpu.threads import one_loop
from onebit.kernels.cpu.tiles import Gradients, Messages, Parameters, Run


@tile
def direction(m, v, x, h):
    """mhat / (sqrt(vhat) + eps) + wd x"""
    denominator = root(v) * h.bias2 + h.eps
    return m * h.bias1 / denominator + h.weight_decay * x


@tile
def _warmup_lanes(i, counts, g_at, m_at, v_at, x_at, h):
    """Sixteen elements; those that do not count stay as they are. Returns v, 0 there."""
    old_x = load(x_at + 4 * i)
    m, v = tiles.new_moments(i, counts, g_at, m_at, v_at, h)
    store(x_at + 4 * i, where(counts, old_x - h.lr * direction(m, v, old_x, h), old_x))
    return where(counts, v, ZERO)


@Loop
def _warmup(run: Run, x: Parameters, g: Gradients, exp_avg, exp_avg_sq, sums):
    if int_at(g.flags) != 0:
        return
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        h, m_at, v_at = tiles.hyper_of(g.hyper, its), exp_avg + 4 * its.start, exp_avg_sq + 4 * its.start
        g_at = tiles.gradient_at(g, its, tiles.room(run, 0))
        x_at = tiles.parameter_at(x, its, tiles.room(run, 1))
        summed, full = splat(ZERO), its.valid // WIDTH * WIDTH
        for i in range(0, full, WIDTH):
            summed = summed + _warmup_lanes(i, tiles.ALL, g_at, m_at, v_at, x_at, h)
        if full < its.valid:
            summed = summed + _warmup_lanes(full, tiles.first_bits(its.valid - full), g_at, m_at, v_at, x_at, h)
        tiles.put_parameter(x_at, x, its, tiles.room(run, 0))
        if sums != 0:
            set_float(sums + 4 * block, total(summed))


@tile
def _update_lanes(i, counts, m, d_at, x_at, lr, weight_decay, clip):
    x, d = load(x_at + 4 * i), load(d_at + 4 * i)
    moved = x - lr * (m * d * clip + weight_decay * x)
    store(x_at + 4 * i, where(counts & not_zero(d), moved, x))


@Loop
def _update(run: Run, x: Parameters, d, replies: Messages, hyper, coefficient, clip):
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        found = tiles.find(replies, its)
        if not tiles.flagged(found, replies):
            h, d_at, valid = tiles.hyper_of(hyper, its), d + 4 * its.start, its.valid
            lr, decay = h.lr * tiles.value_of(coefficient, its.parameter, ONE), h.weight_decay
            clipped = tiles.value_of(clip, its.parameter, ONE)
            x_at, full = tiles.parameter_at(x, its, tiles.room(run, 0)), valid // WIDTH * WIDTH
            scale, bits, m_at = float_at(found.scale), found.bits, 0
            if replies.senders > 1:
                m_at = tiles.room(run, 1)
                tiles.unpack(found, replies, tiles.up(valid), m_at, 0)
                for i in range(0, full, WIDTH):
                    _update_lanes(i, tiles.ALL, load(m_at + 4 * i), d_at, x_at, lr, decay, clipped)
            else:
                for i in range(0, full, WIDTH):
                    m = tiles.signed(bits_at(bits + i // 8), scale)
                    _update_lanes(i, tiles.ALL, m, d_at, x_at, lr, decay, clipped)
            if full < valid:
                m = load(m_at + 4 * full) if m_at != 0 else tiles.signed(bits_at(bits + full // 8), scale)
                _update_lanes(full, tiles.first_bits(valid - full), m, d_at, x_at, lr, decay, clipped)
            tiles.put_parameter(x_at, x, its, tiles.room(run, 2))


PASSES = {
    passes.AdamWarmup: one_loop(_warmup, scratch_blocks=2),
    passes.AdamUpdate: one_loop(_update, scratch_blocks=2),
}

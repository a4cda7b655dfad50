"""Adam's warmup and update, each one pass over the model. `onebit.kernels.passes` has the equations and the bytes."""

from __future__ import annotations

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, not_zero, root, splat, total, where
from onebit.kernels.cpu.memory import int_at, load, set_float, store
from onebit.kernels.cpu.threads import one_loop
from onebit.kernels.cpu.tiles import Gradients, Messages, Parameters, Run


@tile
def direction(m, v, x, h):
    """mhat / (sqrt(vhat) + eps) + wd x"""
    denominator = root(v) * h.bias2 + h.eps
    return m * h.bias1 / denominator + h.weight_decay * x


@Loop
def _warmup(run: Run, x: Parameters, g: Gradients, exp_avg, exp_avg_sq, sums):
    if int_at(g.flags) != 0:
        return
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        h, m_at, v_at = tiles.hyper_of(g.hyper, its), exp_avg + 4 * its.start, exp_avg_sq + 4 * its.start
        g_at = tiles.gradient_at(g, its, tiles.room(run, 0))
        x_at = tiles.parameter_at(x, its, tiles.room(run, 1))
        summed = splat(ZERO)
        for i in range(0, its.valid, WIDTH):
            counts, old_x = tiles.counting(i, its.valid), load(x_at + 4 * i)
            m, v = tiles.new_moments(i, counts, g_at, m_at, v_at, h)
            store(x_at + 4 * i, where(counts, old_x - h.lr * direction(m, v, old_x, h), old_x))
            summed = summed + where(counts, v, ZERO)
        tiles.put_parameter(x_at, x, its, tiles.room(run, 0))
        if sums != 0:
            set_float(sums + 4 * block, total(summed))


@Loop
def _update(run: Run, x: Parameters, d, replies: Messages, hyper, coefficient, clip):
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        found = tiles.find(replies, its)
        if not tiles.flagged(found, replies):
            h, d_at, m_at = tiles.hyper_of(hyper, its), d + 4 * its.start, tiles.room(run, 1)
            lr = h.lr * tiles.value_of(coefficient, its.parameter, ONE)
            clipped = tiles.value_of(clip, its.parameter, ONE)
            tiles.unpack(found, replies, tiles.up(its.valid), m_at, 0)
            x_at = tiles.parameter_at(x, its, tiles.room(run, 0))
            for i in range(0, its.valid, WIDTH):
                counts, old_x, d_i = tiles.counting(i, its.valid), load(x_at + 4 * i), load(d_at + 4 * i)
                new_x = old_x - lr * (load(m_at + 4 * i) * d_i * clipped + h.weight_decay * old_x)
                store(x_at + 4 * i, where(counts & not_zero(d_i), new_x, old_x))
            tiles.put_parameter(x_at, x, its, tiles.room(run, 2))


PASSES = {
    passes.AdamWarmup: one_loop(_warmup, scratch_blocks=2),
    passes.AdamUpdate: one_loop(_update, scratch_blocks=2),
}

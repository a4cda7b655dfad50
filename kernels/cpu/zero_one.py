"""0/1 Adam's full step and update, and what its variance makes of a momentum. `onebit.kernels.passes` has the equations
and the bytes.
"""

from __future__ import annotations

import numpy as np

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, not_zero, ones, root, splat, total, where
from onebit.kernels.cpu.memory import fill, float_at, int_at, load, set_bits, set_float, store
from onebit.kernels.cpu.threads import one_loop
from onebit.kernels.cpu.tiles import Floors, Gradients, Messages, Parameters, Residual, Run


@tile
def floors_of(floors, p):
    """Those of a parameter."""
    return Floors(float_at(floors.least_root + 4 * p), float_at(floors.root_at_zero + 4 * p))


@tile
def used_root(v, h, its_floors):
    """u"""
    u, least = root(v) * h.bias2, its_floors.least_root
    return where(not_zero(v), where(u > least, u, least), its_floors.root_at_zero)


@tile
def direction(m, u, h):
    """mhat / (u + eps)"""
    return m * h.bias1 / (u + h.eps)


@tile
def moved(x, by, u, h):
    """x after the update; a lane with u = 0 does not move."""
    return where(not_zero(u), x - h.lr * (by + h.weight_decay * x), x)


@Loop
def _full(
    run: Run, x: Parameters, g: Gradients, exp_avg_sq, momentum: Messages, residual: Residual, floors: Floors, live,
    sums, counts,
):  # fmt: skip
    if int_at(g.flags) != 0:
        return
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        h, its_floors = tiles.hyper_of(g.hyper, its), floors_of(floors, its.parameter)
        v_at, bits = exp_avg_sq + 4 * its.start, live + its.start // 8
        g_at, m_at = tiles.gradient_at(g, its, tiles.room(run, 0)), momentum.address + 4 * its.start
        x_at, e_at = tiles.parameter_at(x, its, tiles.room(run, 1)), tiles.part(residual.value, 4 * its.start)
        n, last = tiles.up(its.valid), tiles.value_of(residual.scale, its.shard, ZERO)
        if momentum.senders > 0:
            m_at = tiles.room(run, 2)
            tiles.unpack(tiles.find(momentum, its), momentum, n, m_at, 0)
        summed, count = splat(ZERO), 0
        for i in range(0, n, WIDTH):
            those, old_v, old_x = tiles.counting(i, its.valid), load(v_at + 4 * i), load(x_at + 4 * i)
            had = tiles.ALL if its_floors.root_at_zero > ZERO else not_zero(old_v)
            m, v = tiles.moments(load(g_at + 4 * i) * h.grad_scale, where(had, load(m_at + 4 * i), ZERO), old_v, h)
            u = used_root(v, h, its_floors)
            store(v_at + 4 * i, where(those, v, old_v))
            store(x_at + 4 * i, where(those, moved(old_x, direction(m, u, h), u, h), old_x))
            if e_at != 0:
                e = load(e_at + 4 * i)
                store(e_at + 4 * i, where(those, where(had, tiles.left_out(e, last), ZERO) + h.beta1 * m, e))
            v = where(those, v, ZERO)
            summed, count = summed + v, count + ones(not_zero(v))
            set_bits(bits + i // 8, not_zero(v))
        fill(bits + n // 8, 0, (its.length - n) // 8)
        tiles.put_parameter(x_at, x, its, tiles.room(run, 0))
        set_float(sums + 4 * block, total(summed))
        set_float(counts + 4 * block, np.float32(count))


@Loop
def _update(run: Run, x: Parameters, exp_avg_sq, replies: Messages, hyper, floors: Floors, clip):
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        found = tiles.find(replies, its)
        if not tiles.flagged(found, replies):
            h, its_floors = tiles.hyper_of(hyper, its), floors_of(floors, its.parameter)
            v_at, m_at, clipped = (
                exp_avg_sq + 4 * its.start,
                tiles.room(run, 1),
                tiles.value_of(clip, its.parameter, ONE),
            )
            tiles.unpack(found, replies, tiles.up(its.valid), m_at, 0)
            x_at = tiles.parameter_at(x, its, tiles.room(run, 0))
            for i in range(0, its.valid, WIDTH):
                old_x, u = load(x_at + 4 * i), used_root(load(v_at + 4 * i), h, its_floors)
                new_x = moved(old_x, direction(load(m_at + 4 * i), u, h) * clipped, u, h)
                store(x_at + 4 * i, where(tiles.counting(i, its.valid), new_x, old_x))
            tiles.put_parameter(x_at, x, its, tiles.room(run, 2))


@Loop
def _inverses(run: Run, exp_avg_sq, hyper, floors: Floors, sums):
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        h, its_floors = tiles.hyper_of(hyper, its), floors_of(floors, its.parameter)
        v_at, summed = exp_avg_sq + 4 * its.start, splat(ZERO)
        for i in range(0, its.valid, WIDTH):
            u = used_root(load(v_at + 4 * i), h, its_floors)
            inverse = ONE / (u + h.eps)
            summed = summed + where(tiles.counting(i, its.valid) & not_zero(u), inverse * inverse, ZERO)
        set_float(sums + 4 * block, total(summed))


PASSES = {
    passes.ZeroOneFull: one_loop(_full, scratch_blocks=3),
    passes.ZeroOneUpdate: one_loop(_update, scratch_blocks=2),
    passes.ZeroOneInverses: one_loop(_inverses),
}

"""0/1 Adam's steps between messages and with one. `onebit.kernels.passes` has the equations and the bytes."""

from __future__ import annotations

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, not_zero, splat, total, where
from onebit.kernels.cpu.memory import copy, float_at, int_at, load, set_float, store
from onebit.kernels.cpu.threads import one_loop
from onebit.kernels.cpu.tiles import Floors, Gradients, Messages, Parameters, Residual, Run
from onebit.kernels.cpu.zero_one import direction, floors_of, moved, used_root


@Loop
def _length(run: Run, g: Gradients, exp_avg, exp_avg_sq, floors: Floors, squares):
    if int_at(g.flags) != 0:
        return
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        h, its_floors = tiles.hyper_of(g.hyper, its), floors_of(floors, its.parameter)
        m_at, v_at = exp_avg + 4 * its.start, exp_avg_sq + 4 * its.start
        g_at, summed = tiles.gradient_at(g, its, tiles.room(run, 0)), splat(ZERO)
        for i in range(0, its.valid, WIDTH):
            u = used_root(load(v_at + 4 * i), h, its_floors)
            by = direction(tiles.first_moment(load(g_at + 4 * i) * h.grad_scale, load(m_at + 4 * i), h), u, h)
            summed = summed + where(tiles.counting(i, its.valid) & not_zero(u), by * by, ZERO)
        set_float(squares + 4 * block, total(summed))


@Loop
def _local(run: Run, x: Parameters, g: Gradients, exp_avg, exp_avg_sq, residual: Residual, floors: Floors, clip):
    if int_at(g.flags) != 0:
        return
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        h, its_floors = tiles.hyper_of(g.hyper, its), floors_of(floors, its.parameter)
        m_at, v_at = exp_avg + 4 * its.start, exp_avg_sq + 4 * its.start
        g_at, e_at = tiles.gradient_at(g, its, tiles.room(run, 0)), tiles.part(residual.value, 4 * its.start)
        x_at = tiles.parameter_at(x, its, tiles.room(run, 1))
        last, clipped = tiles.value_of(residual.scale, its.shard, ZERO), tiles.value_of(clip, its.parameter, ONE)
        for i in range(0, its.valid, WIDTH):
            counts, old_m, old_x = tiles.counting(i, its.valid), load(m_at + 4 * i), load(x_at + 4 * i)
            u = used_root(load(v_at + 4 * i), h, its_floors)
            m, moves = tiles.first_moment(load(g_at + 4 * i) * h.grad_scale, old_m, h), counts & not_zero(u)
            store(m_at + 4 * i, where(moves, m, old_m))
            store(x_at + 4 * i, where(counts, moved(old_x, direction(m, u, h) * clipped, u, h), old_x))
            if e_at != 0:
                e = load(e_at + 4 * i)
                held = e if residual.scale == 0 else where(counts, ZERO, e)
                store(e_at + 4 * i, where(moves, tiles.left_out(e, last) + h.lr * h.bias1 * m, held))
        tiles.put_parameter(x_at, x, its, tiles.room(run, 0))


@Loop
def _sync(
    run: Run, x: Parameters, exp_avg, exp_avg_sq, anchor, replies: Messages, hyper, floors: Floors, decay, factor, clip
):
    """The anchor is x in fp32. Elements that do not count stay as they are."""
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        found = tiles.find(replies, its)
        if not tiles.flagged(found, replies):
            p, h, its_floors = its.parameter, tiles.hyper_of(hyper, its), floors_of(floors, its.parameter)
            m_at, v_at = exp_avg + 4 * its.start, exp_avg_sq + 4 * its.start
            x_at, total_at, valid = anchor + 4 * its.start, tiles.room(run, 0), its.valid
            kept, times, clipped = float_at(decay + 4 * p), float_at(factor + 4 * p), tiles.value_of(clip, p, ONE)
            tiles.unpack(found, replies, tiles.up(valid), total_at, 0)
            for i in range(0, valid, WIDTH):
                counts, whole, old_x = tiles.counting(i, valid), load(total_at + 4 * i), load(x_at + 4 * i)
                u = used_root(load(v_at + 4 * i), h, its_floors)
                new_x = kept * old_x - whole / (u + h.eps) * clipped
                store(x_at + 4 * i, where(counts & not_zero(u), new_x, old_x))
                m = where(not_zero(u), times * whole, ZERO)
                store(m_at + 4 * i, where(counts, m, load(m_at + 4 * i)))
            tiles.put_parameter(x_at, x, its, total_at)
            if x.master != 0:
                copy(x.master + 4 * its.start, x_at, 4 * valid)
            elif x.param_dtype != tiles.FP32:  # as it was rounded
                copy(x_at, tiles.parameter_at(x, its, total_at), 4 * valid)


PASSES = {
    passes.ZeroOneLength: one_loop(_length, scratch_blocks=1),
    passes.ZeroOneLocal: one_loop(_local, scratch_blocks=2),
    passes.ZeroOneSync: one_loop(_sync, scratch_blocks=1),
}

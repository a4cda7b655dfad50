"""0/1 Adam's full step and update, and what its variance makes of a momentum. `onebit.kernels.passes` has the equations
and the bytes.
"""

from __future__ import annotations

import numpy as np

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, not_zero, ones, root, splat, total, where
from onebit.kernels.cpu.memory import bits_at, fill, float_at, int_at, load, set_bits, set_float, store
from onebit.kernels.cpu.threads import one_loop


@tile
def used_root(v, h, least, at_zero):
    """u"""
    u = root(v) * h.bias2
    return where(not_zero(v), where(u > least, u, least), at_zero)


@tile
def direction(m, u, h):
    """mhat / (u + eps)"""
    return m * h.bias1 / (u + h.eps)


@tile
def moved(x, by, u, h):
    """x after the update; a lane with u = 0 does not move."""
    return where(not_zero(u), x - h.lr * (by + h.weight_decay * x), x)


@tile
def _full_lanes(i, counts, g_at, m_at, v_at, e_at, x_at, h, least, at_zero, last):
    """Sixteen elements; those that do not count stay as they are. Returns v, 0 there, and where it is not 0."""
    old_v, old_x = load(v_at + 4 * i), load(x_at + 4 * i)
    had = tiles.ALL if at_zero > ZERO else not_zero(old_v)
    m, v = tiles.moments(load(g_at + 4 * i) * h.grad_scale, where(had, load(m_at + 4 * i), ZERO), old_v, h)
    u = used_root(v, h, least, at_zero)
    x = moved(old_x, direction(m, u, h), u, h)
    store(v_at + 4 * i, where(counts, v, old_v))
    store(x_at + 4 * i, where(counts, x, old_x))
    if e_at != 0:
        e = load(e_at + 4 * i)
        store(e_at + 4 * i, where(counts, where(had, tiles.left_out(e, last), ZERO) + h.beta1 * m, e))
    v = where(counts, v, ZERO)
    return v, not_zero(v)


@tile
def _full_block(valid, length, g_at, m_at, v_at, e_at, x_at, live, h, least, at_zero, last):
    """Returns the sum of v, and how many are not 0."""
    summed, count, n = splat(ZERO), 0, tiles.up(valid)
    for i in range(0, n, WIDTH):
        counts = tiles.ALL if i + WIDTH <= valid else tiles.first_bits(valid - i)
        v, nonzero = _full_lanes(i, counts, g_at, m_at, v_at, e_at, x_at, h, least, at_zero, last)
        summed, count = summed + v, count + ones(nonzero)
        set_bits(live + i // 8, nonzero)
    fill(live + n // 8, 0, (length - n) // 8)
    return total(summed), count


@Loop
def _full(
    first, stop, scratch, block_table, parameter_table, first_block, block_size,
    param, param_dtype, master, grad, grad_dtype, hyper, flags, exp_avg_sq,
    replies, replies_bytes, replies_tensor, replies_copies, residual_value, residual_scale, least_root, root_at_zero,
    live, sums, counts,
):  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        p, start, m_at = its.parameter, 4 * its.start, scratch + 8 * block_size
        g_at = tiles.gradient_at(grad, grad_dtype, its, scratch)
        x_at = tiles.parameter_at(param, param_dtype, master, its, scratch + 4 * block_size)
        scale, bits = tiles.of_message(
            tiles.message_of(replies, its, replies_bytes, replies_copies), its, replies_tensor
        )
        tiles.unpack(scale, bits, replies_bytes, replies_copies, tiles.up(its.valid), m_at, 0)
        summed, count = _full_block(
            its.valid, its.length, g_at, m_at, exp_avg_sq + start, tiles.part(residual_value, start),
            x_at, live + its.start // 8, tiles.hyper_of(hyper, its.group), float_at(least_root + 4 * p),
            float_at(root_at_zero + 4 * p), tiles.value_of(residual_scale, its.shard, ZERO),
        )  # fmt: skip
        tiles.put_parameter(x_at, param, param_dtype, its, scratch)
        set_float(sums + 4 * block, summed)
        set_float(counts + 4 * block, np.float32(count))


@tile
def _update_lanes(i, counts, m, v_at, x_at, h, least, at_zero, clip):
    x = load(x_at + 4 * i)
    u = used_root(load(v_at + 4 * i), h, least, at_zero)
    store(x_at + 4 * i, where(counts, moved(x, direction(m, u, h) * clip, u, h), x))


@tile
def _update_block(valid, bits, scale, m_at, v_at, x_at, h, least, at_zero, clip):
    """m is what the bits stand for, or lies at `m_at` already."""
    for i in range(0, tiles.up(valid), WIDTH):
        counts = tiles.ALL if i + WIDTH <= valid else tiles.first_bits(valid - i)
        m = load(m_at + 4 * i) if m_at != 0 else tiles.signed(bits_at(bits + i // 8), scale)
        _update_lanes(i, counts, m, v_at, x_at, h, least, at_zero, clip)


@Loop
def _update(
    first, stop, scratch, block_table, parameter_table, first_block, block_size,
    param, param_dtype, master, exp_avg_sq, replies, replies_bytes, replies_tensor, replies_copies, hyper,
    least_root, root_at_zero, clip,
):  # fmt: skip
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        message = tiles.message_of(replies, its, replies_bytes, replies_copies)
        if tiles.any_flag(message, replies_copies, replies_bytes) == 0:
            p = its.parameter
            scale, bits = tiles.of_message(message, its, replies_tensor)
            m_at = tiles.mean_at(
                scale, bits, replies_bytes, replies_copies, tiles.up(its.valid), scratch + 4 * block_size
            )
            x_at = tiles.parameter_at(param, param_dtype, master, its, scratch)
            _update_block(
                its.valid, bits, float_at(scale), m_at, exp_avg_sq + 4 * its.start, x_at,
                tiles.hyper_of(hyper, its.group), float_at(least_root + 4 * p), float_at(root_at_zero + 4 * p),
                tiles.clip_of(clip, p),
            )  # fmt: skip
            tiles.put_parameter(x_at, param, param_dtype, its, scratch + 8 * block_size)


@tile
def _inverse_lanes(i, counts, v_at, h, least, at_zero):
    u = used_root(load(v_at + 4 * i), h, least, at_zero)
    inverse = ONE / (u + h.eps)
    return where(counts & not_zero(u), inverse * inverse, ZERO)


@tile
def _inverse_block(valid, v_at, h, least, at_zero):
    summed = splat(ZERO)
    for i in range(0, tiles.up(valid), WIDTH):
        counts = tiles.ALL if i + WIDTH <= valid else tiles.first_bits(valid - i)
        summed = summed + _inverse_lanes(i, counts, v_at, h, least, at_zero)
    return total(summed)


@Loop
def _inverses(
    first, stop, scratch, block_table, parameter_table, first_block, exp_avg_sq, hyper, least_root, root_at_zero, sums
):
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        p, h = its.parameter, tiles.hyper_of(hyper, its.group)
        least, at_zero = float_at(least_root + 4 * p), float_at(root_at_zero + 4 * p)
        set_float(sums + 4 * block, _inverse_block(its.valid, exp_avg_sq + 4 * its.start, h, least, at_zero))


PASSES = {
    passes.ZeroOneFull: one_loop(_full, scratch_blocks=3),
    passes.ZeroOneUpdate: one_loop(_update, scratch_blocks=2),
    passes.ZeroOneInverses: one_loop(_inverses),
}

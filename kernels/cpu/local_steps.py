"""0/1 Adam's steps between messages and with one. `onebit.kernels.passes` has the equations and the bytes."""

from __future__ import annotations

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, ZERO, not_zero, splat, total, where
from onebit.kernels.cpu.memory import copy, float_at, int_at, load, set_float, store
from onebit.kernels.cpu.threads import one_loop
from onebit.kernels.cpu.zero_one import direction, moved, used_root


@tile
def _local_lanes(i, counts, g_at, m_at, v_at, e_at, x_at, h, least, at_zero, tensor, last, clip):
    """Sixteen elements; those that do not count stay as they are. Returns the squares of mhat / (u + eps)."""
    old_m, x, u = load(m_at + 4 * i), load(x_at + 4 * i), used_root(load(v_at + 4 * i), h, least, at_zero)
    m = tiles.first_moment(load(g_at + 4 * i) * h.grad_scale, old_m, h)
    store(m_at + 4 * i, where(counts & not_zero(u), m, old_m))
    by = direction(m, u, h)
    store(x_at + 4 * i, where(counts, moved(x, by * clip, u, h), x))
    if e_at != 0:
        value = load(e_at + 4 * i)
        held = value if tensor == 0 else where(counts, ZERO, value)
        store(e_at + 4 * i, where(counts & not_zero(u), tiles.left_out(value, last) + h.lr * h.bias1 * m, held))
    return where(counts & not_zero(u), by * by, ZERO)


@tile
def _local_block(valid, g_at, m_at, v_at, e_at, x_at, h, least, at_zero, tensor, last, clip):
    summed = splat(ZERO)
    for i in range(0, tiles.up(valid), WIDTH):
        counts = tiles.ALL if i + WIDTH <= valid else tiles.first_bits(valid - i)
        found = _local_lanes(i, counts, g_at, m_at, v_at, e_at, x_at, h, least, at_zero, tensor, last, clip)
        summed = summed + found
    return total(summed)


@Loop
def _local(
    first, stop, scratch, block_table, parameter_table, first_block, block_size,
    param, param_dtype, master, grad, grad_dtype, hyper, flags, exp_avg, exp_avg_sq,
    residual_value, residual_scale, least_root, root_at_zero, clip, squares,
):  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        p, start = its.parameter, 4 * its.start
        g_at = tiles.gradient_at(grad, grad_dtype, its, scratch)
        x_at = tiles.parameter_at(param, param_dtype, master, its, scratch + 4 * block_size)
        summed = _local_block(
            its.valid, g_at, exp_avg + start, exp_avg_sq + start, tiles.part(residual_value, start),
            x_at, tiles.hyper_of(hyper, its.group), float_at(least_root + 4 * p), float_at(root_at_zero + 4 * p),
            residual_scale, tiles.value_of(residual_scale, its.shard, ZERO), tiles.clip_of(clip, p),
        )  # fmt: skip
        if squares != 0:
            set_float(squares + 4 * block, summed)
        tiles.put_parameter(x_at, param, param_dtype, its, scratch)


@tile
def _sync_block(valid, total_at, m_at, v_at, anchor_at, h, least, at_zero, decay, factor, clip):
    """The anchor is x in fp32. Elements that do not count stay as they are."""
    for i in range(0, tiles.up(valid), WIDTH):
        counts = tiles.ALL if i + WIDTH <= valid else tiles.first_bits(valid - i)
        whole, x = load(total_at + 4 * i), load(anchor_at + 4 * i)
        u = used_root(load(v_at + 4 * i), h, least, at_zero)
        store(anchor_at + 4 * i, where(counts & not_zero(u), decay * x - whole / (u + h.eps) * clip, x))
        m = where(not_zero(u), factor * whole, ZERO)
        store(m_at + 4 * i, where(counts, m, load(m_at + 4 * i)))


@Loop
def _sync(
    first, stop, scratch, block_table, parameter_table, first_block,
    param, param_dtype, master, exp_avg, exp_avg_sq, anchor, replies, replies_bytes, replies_tensor, replies_copies,
    hyper, least_root, root_at_zero, decay, factor, clip,
):  # fmt: skip
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        message = tiles.message_of(replies, its, replies_bytes, replies_copies)
        if tiles.any_flag(message, replies_copies, replies_bytes) == 0:
            p, start, valid = its.parameter, 4 * its.start, its.valid
            scale, bits = tiles.of_message(message, its, replies_tensor)
            tiles.unpack(scale, bits, replies_bytes, replies_copies, tiles.up(valid), scratch, 0)
            x_at = anchor + start
            _sync_block(
                valid, scratch, exp_avg + start, exp_avg_sq + start, x_at, tiles.hyper_of(hyper, its.group),
                float_at(least_root + 4 * p), float_at(root_at_zero + 4 * p), float_at(decay + 4 * p),
                float_at(factor + 4 * p), tiles.clip_of(clip, p),
            )  # fmt: skip
            tiles.put_parameter(x_at, param, param_dtype, its, scratch)
            if master != 0:
                copy(master + start, x_at, 4 * valid)
            elif param_dtype != tiles.FP32:  # as it was rounded
                copy(x_at, tiles.parameter_at(param, param_dtype, 0, its, scratch), 4 * valid)


PASSES = {
    passes.ZeroOneLocal: one_loop(_local, scratch_blocks=2),
    passes.ZeroOneSync: one_loop(_sync, scratch_blocks=1),
}

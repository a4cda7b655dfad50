"""Adam's warmup and update, each one pass over the model. `onebit.kernels.passes` has the equations and the bytes."""

from __future__ import annotations

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, ZERO, not_zero, root, splat, total, where
from onebit.kernels.cpu.memory import bits_at, float_at, int_at, load, set_float, store
from onebit.kernels.cpu.threads import one_loop


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
    x = old_x - h.lr * direction(m, v, old_x, h)
    store(x_at + 4 * i, where(counts, x, old_x))
    return where(counts, v, ZERO)


@tile
def _warmup_block(valid, g_at, m_at, v_at, x_at, h):
    """Returns the sum of v."""
    summed, full = splat(ZERO), valid // WIDTH * WIDTH
    for i in range(0, full, WIDTH):
        summed = summed + _warmup_lanes(i, tiles.ALL, g_at, m_at, v_at, x_at, h)
    if full < valid:
        summed = summed + _warmup_lanes(full, tiles.first_bits(valid - full), g_at, m_at, v_at, x_at, h)
    return total(summed)


@Loop
def _warmup(
    first, stop, scratch, block_table, parameter_table, first_block, block_size,
    param, param_dtype, master, grad, grad_dtype, hyper, flags, exp_avg, exp_avg_sq, sums,
):  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        start = 4 * its.start
        g_at = tiles.gradient_at(grad, grad_dtype, its, scratch)
        x_at = tiles.parameter_at(param, param_dtype, master, its, scratch + 4 * block_size)
        h = tiles.hyper_of(hyper, its.group)
        summed = _warmup_block(its.valid, g_at, exp_avg + start, exp_avg_sq + start, x_at, h)
        tiles.put_parameter(x_at, param, param_dtype, its, scratch)
        if sums != 0:
            set_float(sums + 4 * block, summed)


@tile
def _update_lanes(i, counts, m, d_at, x_at, lr, weight_decay, clip):
    x, d = load(x_at + 4 * i), load(d_at + 4 * i)
    moved = x - lr * (m * d * clip + weight_decay * x)
    store(x_at + 4 * i, where(counts & not_zero(d), moved, x))


@tile
def _update_block(valid, bits, scale, m_at, d_at, x_at, lr, weight_decay, clip):
    """m is what the bits stand for, or lies at `m_at` already."""
    full = valid // WIDTH * WIDTH
    if m_at != 0:
        for i in range(0, full, WIDTH):
            _update_lanes(i, tiles.ALL, load(m_at + 4 * i), d_at, x_at, lr, weight_decay, clip)
    else:
        for i in range(0, full, WIDTH):
            _update_lanes(i, tiles.ALL, tiles.signed(bits_at(bits + i // 8), scale), d_at, x_at, lr, weight_decay, clip)
    if full < valid:
        m = load(m_at + 4 * full) if m_at != 0 else tiles.signed(bits_at(bits + full // 8), scale)
        _update_lanes(full, tiles.first_bits(valid - full), m, d_at, x_at, lr, weight_decay, clip)


@Loop
def _update(
    first, stop, scratch, block_table, parameter_table, first_block, block_size,
    param, param_dtype, master, d, replies, replies_bytes, replies_tensor, replies_copies, hyper, coefficient, clip,
):  # fmt: skip
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        message = tiles.message_of(replies, its, replies_bytes, replies_copies)
        if tiles.any_flag(message, replies_copies, replies_bytes) == 0:
            p, h = its.parameter, tiles.hyper_of(hyper, its.group)
            lr = h.lr if coefficient == 0 else h.lr * float_at(coefficient + 4 * p)
            scale, bits = tiles.of_message(message, its, replies_tensor)
            m_at = tiles.mean_at(
                scale, bits, replies_bytes, replies_copies, tiles.up(its.valid), scratch + 4 * block_size
            )
            x_at = tiles.parameter_at(param, param_dtype, master, its, scratch)
            d_at, clipped = d + 4 * its.start, tiles.clip_of(clip, p)
            _update_block(its.valid, bits, float_at(scale), m_at, d_at, x_at, lr, h.weight_decay, clipped)
            tiles.put_parameter(x_at, param, param_dtype, its, scratch + 8 * block_size)


PASSES = {
    passes.AdamWarmup: one_loop(_warmup, scratch_blocks=2),
    passes.AdamUpdate: one_loop(_update, scratch_blocks=2),
}

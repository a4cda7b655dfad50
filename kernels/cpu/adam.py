"""Adam's two updates, each one pass over the model.

    warmup   m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2;  x = x - lr (mhat / (sqrt(vhat) + eps) + wd x)
    update   x = x - lr c_p (clip_p m d + wd x),   m = decode(reply)

c_p is 1 for Adam and LAMB's coefficient for LAMB; clip_p bounds how far a step moves.

Bytes an element, fp32: warmup reads g 4, m 4, v 4, x 4, writes m 4, v 4, x 4: 28; update reads x 4, d 4, bits 1/8,
writes x 4: 12.1. A 16-bit parameter with a master copy adds 2 (written only).
"""

from __future__ import annotations

from torch import Tensor

from onebit.kernels.cpu.blocks import (
    ALL,
    any_flag,
    at,
    clip_of,
    first_bits,
    hyper_of,
    locate,
    message_of,
    messages_at,
    moments,
    of_message,
    over,
    put,
    signed,
    staged,
    table,
    unpack,
    up,
)
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, ZERO, not_zero, root, splat, total, where
from onebit.kernels.cpu.memory import bits_at, float_at, int_at, load, long_at, set_float, store
from onebit.kernels.cpu.threads import over_blocks
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages


@tile
def direction(m, v, x, h):
    """mhat / (sqrt(vhat) + eps) + wd x"""
    denominator = root(v) * h.bias2 + h.eps
    return m * h.bias1 / denominator + h.weight_decay * x


@tile
def _warmup_lanes(i, counts, g_at, m_at, v_at, x_at, h):
    """Sixteen elements; those that do not count stay as they are. Returns v, 0 there."""
    g, old_m, old_v, old_x = load(g_at + 4 * i), load(m_at + 4 * i), load(v_at + 4 * i), load(x_at + 4 * i)
    m, v = moments(g * h.grad_scale, old_m, old_v, h)
    x = old_x - h.lr * direction(m, v, old_x, h)
    store(m_at + 4 * i, where(counts, m, old_m))
    store(v_at + 4 * i, where(counts, v, old_v))
    store(x_at + 4 * i, where(counts, x, old_x))
    return where(counts, v, ZERO)


@tile
def _warmup_block(valid, g_at, m_at, v_at, x_at, h):
    """Returns the sum of v."""
    summed, full = splat(ZERO), valid // WIDTH * WIDTH
    for i in range(0, full, WIDTH):
        summed = summed + _warmup_lanes(i, ALL, g_at, m_at, v_at, x_at, h)
    if full < valid:
        summed = summed + _warmup_lanes(full, first_bits(valid - full), g_at, m_at, v_at, x_at, h)
    return total(summed)


@Loop
def _warmup(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    params: int, param: int, grads: int, grad: int, hyper: int, flags: int,
    exp_avg: int, exp_avg_sq: int, master: int, sums: int,
) -> None:  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        p, start = its.parameter, 4 * its.start
        address = long_at(params + 8 * p)
        g_at = staged(long_at(grads + 8 * p), grad, its.offset, its.valid, scratch)
        x_at = staged(address, param, its.offset, its.valid, scratch + 4 * size) if master == 0 else master + start
        summed = _warmup_block(its.valid, g_at, exp_avg + start, exp_avg_sq + start, x_at, hyper_of(hyper, its.group))
        put(x_at, address, param, its.offset, its.valid, scratch)
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
            _update_lanes(i, ALL, load(m_at + 4 * i), d_at, x_at, lr, weight_decay, clip)
    else:
        for i in range(0, full, WIDTH):
            _update_lanes(i, ALL, signed(bits_at(bits + i // 8), scale), d_at, x_at, lr, weight_decay, clip)
    if full < valid:
        m = load(m_at + 4 * full) if m_at != 0 else signed(bits_at(bits + full // 8), scale)
        _update_lanes(full, first_bits(valid - full), m, d_at, x_at, lr, weight_decay, clip)


@Loop
def _update(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    params: int, param: int, hyper: int, coefficient: int, clip: int,
    messages: int, row_bytes: int, tensor: int, copies: int, d: int, master: int,
) -> None:  # fmt: skip
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        message = message_of(messages, its, row_bytes, copies)
        if any_flag(message, copies, row_bytes) == 0:
            p, start, h = its.parameter, 4 * its.start, hyper_of(hyper, its.group)
            address, lr = long_at(params + 8 * p), h.lr
            if coefficient != 0:
                lr = lr * float_at(coefficient + 4 * p)
            scale, bits = of_message(message, its, tensor)
            m_at = 0
            if copies != 1:
                m_at = scratch + 4 * size
                unpack(scale, bits, row_bytes, copies, up(its.valid), m_at, 0)
            x_at = staged(address, param, its.offset, its.valid, scratch) if master == 0 else master + start
            _update_block(its.valid, bits, float_at(scale), m_at, d + start, x_at, lr, h.weight_decay, clip_of(clip, p))
            put(x_at, address, param, its.offset, its.valid, scratch + 8 * size)


def adam_warmup(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    sums: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.adam_warmup` in one loop."""
    arguments = (
        *over(span), *table(params), *table(grads), at(hyper), at(flags), at(exp_avg), at(exp_avg_sq), at(master),
        at(sums),
    )  # fmt: skip
    over_blocks(_warmup, span, arguments, scratch_blocks=2)


def adam_update(
    span: Span,
    params: Pointers,
    d: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    coefficient: Tensor | None = None,
    clip: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.adam_update` in one loop."""
    arguments = (
        *over(span), *table(params), at(hyper), at(coefficient), at(clip), *messages_at(replies), at(d), at(master),
    )  # fmt: skip
    over_blocks(_update, span, arguments, scratch_blocks=2)

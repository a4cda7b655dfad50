"""0/1 Adam's two updates, each one pass over the model.

    full     m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2;  x = x - lr (mhat / (u + eps) + wd x);  e = e + b1 m
    update   x = x - lr (clip_p mhat / (u + eps) + wd x),   m = decode(reply)
    inverses sum of 1 / (u + eps)^2 over a block

u = max(sqrt(vhat), least_p), or a parameter's root_at_zero where v is 0. clip_p bounds how far a step moves.

Bytes an element, fp32: full reads g 4, m 1/8, v 4, e 4, x 4, writes v 4, e 4, x 4, live 1/8: 28.25; update reads x 4,
v 4, bits 1/8, writes x 4: 12.1. A 16-bit parameter with a master copy adds 2 (written only).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from onebit.kernels.cpu.blocks import (
    ALL,
    any_flag,
    at,
    clip_of,
    first_bits,
    hyper_of,
    left_out,
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
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, not_zero, ones, root, splat, total, where
from onebit.kernels.cpu.memory import bits_at, fill, float_at, int_at, load, long_at, set_bits, set_float, store
from onebit.kernels.cpu.threads import over_blocks
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages


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
    had = ALL if at_zero > ZERO else not_zero(old_v)
    m, v = moments(load(g_at + 4 * i) * h.grad_scale, where(had, load(m_at + 4 * i), ZERO), old_v, h)
    u = used_root(v, h, least, at_zero)
    x = moved(old_x, direction(m, u, h), u, h)
    store(v_at + 4 * i, where(counts, v, old_v))
    store(x_at + 4 * i, where(counts, x, old_x))
    if e_at != 0:
        e = load(e_at + 4 * i)
        store(e_at + 4 * i, where(counts, where(had, left_out(e, last), ZERO) + h.beta1 * m, e))
    v = where(counts, v, ZERO)
    return v, not_zero(v)


@tile
def _full_block(valid, length, g_at, m_at, v_at, e_at, x_at, live, h, least, at_zero, last):
    """Returns the sum of v, and how many are not 0."""
    summed, count, n = splat(ZERO), 0, up(valid)
    for i in range(0, n, WIDTH):
        counts = ALL if i + WIDTH <= valid else first_bits(valid - i)
        v, nonzero = _full_lanes(i, counts, g_at, m_at, v_at, e_at, x_at, h, least, at_zero, last)
        summed, count = summed + v, count + ones(nonzero)
        set_bits(live + i // 8, nonzero)
    fill(live + n // 8, 0, (length - n) // 8)
    return total(summed), count


@Loop
def _full(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    params: int, param: int, grads: int, grad: int, hyper: int, flags: int,
    messages: int, row_bytes: int, tensor: int, copies: int, exp_avg_sq: int, value: int,
    residual_scale: int, master: int, least_root: int, root_at_zero: int, live: int, sums: int, counts: int,
) -> None:  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        p, start, m_at = its.parameter, 4 * its.start, scratch + 8 * size
        address = long_at(params + 8 * p)
        g_at = staged(long_at(grads + 8 * p), grad, its.offset, its.valid, scratch)
        x_at = staged(address, param, its.offset, its.valid, scratch + 4 * size) if master == 0 else master + start
        scale, bits = of_message(message_of(messages, its, row_bytes, copies), its, tensor)
        unpack(scale, bits, row_bytes, copies, up(its.valid), m_at, 0)
        summed, count = _full_block(
            its.valid, its.length, g_at, m_at, exp_avg_sq + start, 0 if value == 0 else value + start, x_at,
            live + its.start // 8, hyper_of(hyper, its.group), float_at(least_root + 4 * p),
            float_at(root_at_zero + 4 * p),
            ZERO if residual_scale == 0 else float_at(residual_scale + 4 * its.shard),
        )  # fmt: skip
        put(x_at, address, param, its.offset, its.valid, scratch)
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
    for i in range(0, up(valid), WIDTH):
        counts = ALL if i + WIDTH <= valid else first_bits(valid - i)
        m = load(m_at + 4 * i) if m_at != 0 else signed(bits_at(bits + i // 8), scale)
        _update_lanes(i, counts, m, v_at, x_at, h, least, at_zero, clip)


@Loop
def _update(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    params: int, param: int, hyper: int, messages: int, row_bytes: int, tensor: int, copies: int,
    exp_avg_sq: int, master: int, least_root: int, root_at_zero: int, clip: int,
) -> None:  # fmt: skip
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        message = message_of(messages, its, row_bytes, copies)
        if any_flag(message, copies, row_bytes) == 0:
            p, start = its.parameter, 4 * its.start
            address = long_at(params + 8 * p)
            scale, bits = of_message(message, its, tensor)
            m_at = 0
            if copies != 1:
                m_at = scratch + 4 * size
                unpack(scale, bits, row_bytes, copies, up(its.valid), m_at, 0)
            x_at = staged(address, param, its.offset, its.valid, scratch) if master == 0 else master + start
            _update_block(
                its.valid, bits, float_at(scale), m_at, exp_avg_sq + start, x_at, hyper_of(hyper, its.group),
                float_at(least_root + 4 * p), float_at(root_at_zero + 4 * p), clip_of(clip, p),
            )  # fmt: skip
            put(x_at, address, param, its.offset, its.valid, scratch + 8 * size)


@tile
def _inverse_lanes(i, counts, v_at, h, least, at_zero):
    u = used_root(load(v_at + 4 * i), h, least, at_zero)
    inverse = ONE / (u + h.eps)
    return where(counts & not_zero(u), inverse * inverse, ZERO)


@tile
def _inverse_block(valid, v_at, h, least, at_zero):
    summed = splat(ZERO)
    for i in range(0, up(valid), WIDTH):
        counts = ALL if i + WIDTH <= valid else first_bits(valid - i)
        summed = summed + _inverse_lanes(i, counts, v_at, h, least, at_zero)
    return total(summed)


@Loop
def _inverses(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    hyper: int, exp_avg_sq: int, least_root: int, root_at_zero: int, sums: int,
) -> None:  # fmt: skip
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        p, h = its.parameter, hyper_of(hyper, its.group)
        least, at_zero = float_at(least_root + 4 * p), float_at(root_at_zero + 4 * p)
        set_float(sums + 4 * block, _inverse_block(its.valid, exp_avg_sq + 4 * its.start, h, least, at_zero))


def zero_one_inverses(
    span: Span, exp_avg_sq: Tensor, hyper: Tensor, least_root: Tensor, root_at_zero: Tensor, sums: Tensor
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_inverses` in one loop."""
    arguments = (*over(span), at(hyper), at(exp_avg_sq), at(least_root), at(root_at_zero), at(sums))
    over_blocks(_inverses, span, arguments)


def zero_one_full(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg_sq: Tensor,
    replies: Messages,
    residual: Residual | None,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    live: Tensor,
    sums: Tensor,
    counts: Tensor,
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_full` in one loop."""
    value, scale = (None, None) if residual is None else (residual.value, residual.scale)
    arguments = (
        *over(span), *table(params), *table(grads), at(hyper), at(flags), *messages_at(replies), at(exp_avg_sq),
        at(value), at(scale), at(master), at(least_root), at(root_at_zero), at(live), at(sums), at(counts),
    )  # fmt: skip
    over_blocks(_full, span, arguments, scratch_blocks=3)


def zero_one_update(
    span: Span,
    params: Pointers,
    exp_avg_sq: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    clip: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_update` in one loop."""
    arguments = (
        *over(span), *table(params), at(hyper), *messages_at(replies), at(exp_avg_sq), at(master), at(least_root),
        at(root_at_zero), at(clip),
    )  # fmt: skip
    over_blocks(_update, span, arguments, scratch_blocks=2)

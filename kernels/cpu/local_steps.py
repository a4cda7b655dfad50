"""0/1 Adam's steps between messages and with one, each one pass over the model.

    local    m = b1 m + (1 - b1) g';  x = x - lr (clip_p mhat / (u + eps) + wd x);  e = e + lr mhat
    sync     x = decay_p anchor - clip_p U / (u + eps);  anchor = x as it was stored;  m = factor_p U;
             U = decode(reply)

u is that of `onebit.kernels.cpu.zero_one`.

Bytes an element, fp32: local reads g 4, v 4, m 4, x 4, e 4, writes m 4, x 4, e 4: 32; sync reads v 4, anchor 4,
bits 1/8, writes x 4, anchor 4, m 4: 20.1. A 16-bit parameter with a master copy adds 2 (written only).
"""

from __future__ import annotations

from torch import Tensor

from onebit.kernels.cpu.blocks import (
    ALL,
    FP32,
    any_flag,
    at,
    clip_of,
    first_bits,
    first_moment,
    hyper_of,
    left_out,
    locate,
    message_of,
    messages_at,
    of_message,
    over,
    put,
    staged,
    table,
    unpack,
    up,
)
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, ZERO, not_zero, splat, total, where
from onebit.kernels.cpu.memory import copy, float_at, int_at, load, long_at, set_float, store
from onebit.kernels.cpu.threads import over_blocks
from onebit.kernels.cpu.zero_one import direction, moved, used_root
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages


@tile
def _local_lanes(i, counts, g_at, m_at, v_at, e_at, x_at, h, least, at_zero, tensor, last, clip):
    """Sixteen elements; those that do not count stay as they are. Returns the squares of mhat / (u + eps)."""
    old_m, x, u = load(m_at + 4 * i), load(x_at + 4 * i), used_root(load(v_at + 4 * i), h, least, at_zero)
    m = first_moment(load(g_at + 4 * i) * h.grad_scale, old_m, h)
    store(m_at + 4 * i, where(counts & not_zero(u), m, old_m))
    by = direction(m, u, h)
    store(x_at + 4 * i, where(counts, moved(x, by * clip, u, h), x))
    if e_at != 0:
        value = load(e_at + 4 * i)
        held = value if tensor == 0 else where(counts, ZERO, value)
        store(e_at + 4 * i, where(counts & not_zero(u), left_out(value, last) + h.lr * h.bias1 * m, held))
    return where(counts & not_zero(u), by * by, ZERO)


@tile
def _local_block(valid, g_at, m_at, v_at, e_at, x_at, h, least, at_zero, tensor, last, clip):
    summed = splat(ZERO)
    for i in range(0, up(valid), WIDTH):
        counts = ALL if i + WIDTH <= valid else first_bits(valid - i)
        found = _local_lanes(i, counts, g_at, m_at, v_at, e_at, x_at, h, least, at_zero, tensor, last, clip)
        summed = summed + found
    return total(summed)


@Loop
def _local(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    params: int, param: int, grads: int, grad: int, hyper: int, flags: int, exp_avg: int, exp_avg_sq: int,
    value: int, residual_scale: int, master: int, least_root: int, root_at_zero: int, clip: int, squares: int,
) -> None:  # fmt: skip
    if int_at(flags) != 0:
        return
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        p, start = its.parameter, 4 * its.start
        address = long_at(params + 8 * p)
        g_at = staged(long_at(grads + 8 * p), grad, its.offset, its.valid, scratch)
        x_at = staged(address, param, its.offset, its.valid, scratch + 4 * size) if master == 0 else master + start
        summed = _local_block(
            its.valid, g_at, exp_avg + start, exp_avg_sq + start, 0 if value == 0 else value + start, x_at,
            hyper_of(hyper, its.group), float_at(least_root + 4 * p), float_at(root_at_zero + 4 * p), residual_scale,
            ZERO if residual_scale == 0 else float_at(residual_scale + 4 * its.shard), clip_of(clip, p),
        )  # fmt: skip
        if squares != 0:
            set_float(squares + 4 * block, summed)
        put(x_at, address, param, its.offset, its.valid, scratch)


@tile
def _sync_block(valid, total_at, m_at, v_at, anchor_at, h, least, at_zero, decay, factor, clip):
    """The anchor is x in fp32. Elements that do not count stay as they are."""
    for i in range(0, up(valid), WIDTH):
        counts = ALL if i + WIDTH <= valid else first_bits(valid - i)
        whole, x = load(total_at + 4 * i), load(anchor_at + 4 * i)
        u = used_root(load(v_at + 4 * i), h, least, at_zero)
        store(anchor_at + 4 * i, where(counts & not_zero(u), decay * x - whole / (u + h.eps) * clip, x))
        m = where(not_zero(u), factor * whole, ZERO)
        store(m_at + 4 * i, where(counts, m, load(m_at + 4 * i)))


@Loop
def _sync(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    params: int, param: int, hyper: int, messages: int, row_bytes: int, tensor: int, copies: int,
    exp_avg: int, exp_avg_sq: int, anchor: int, master: int, least_root: int, root_at_zero: int, decay: int,
    factor: int, clip: int,
) -> None:  # fmt: skip
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        message = message_of(messages, its, row_bytes, copies)
        if any_flag(message, copies, row_bytes) == 0:
            p, start, valid = its.parameter, 4 * its.start, its.valid
            address, x_at = long_at(params + 8 * p), anchor + start
            scale, bits = of_message(message, its, tensor)
            unpack(scale, bits, row_bytes, copies, up(valid), scratch, 0)
            _sync_block(
                valid, scratch, exp_avg + start, exp_avg_sq + start, x_at, hyper_of(hyper, its.group),
                float_at(least_root + 4 * p), float_at(root_at_zero + 4 * p), float_at(decay + 4 * p),
                float_at(factor + 4 * p), clip_of(clip, p),
            )  # fmt: skip
            put(x_at, address, param, its.offset, valid, scratch)
            if master != 0:
                copy(master + start, x_at, 4 * valid)
            elif param != FP32:  # as it was rounded
                copy(x_at, staged(address, param, its.offset, valid, scratch), 4 * valid)


def zero_one_local(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg_sq: Tensor,
    exp_avg: Tensor,
    residual: Residual | None,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    clip: Tensor | None = None,
    squares: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_local` in one loop."""
    value, scale = (None, None) if residual is None else (residual.value, residual.scale)
    arguments = (
        *over(span), *table(params), *table(grads), at(hyper), at(flags), at(exp_avg), at(exp_avg_sq), at(value),
        at(scale), at(master), at(least_root), at(root_at_zero), at(clip), at(squares),
    )  # fmt: skip
    over_blocks(_local, span, arguments, scratch_blocks=2)


def zero_one_sync(
    span: Span,
    params: Pointers,
    exp_avg_sq: Tensor,
    exp_avg: Tensor,
    anchor: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    decay: Tensor,
    factor: Tensor,
    clip: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_sync` in one loop."""
    arguments = (
        *over(span), *table(params), at(hyper), *messages_at(replies), at(exp_avg), at(exp_avg_sq), at(anchor),
        at(master), at(least_root), at(root_at_zero), at(decay), at(factor), at(clip),
    )  # fmt: skip
    over_blocks(_sync, span, arguments, scratch_blocks=1)

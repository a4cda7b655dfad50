"""compress, average and decode: momentum, error compensation, sign, scale and packing in one read of each array.

    compress   c = beta1 m + gamma_p ((1 - beta1) g') + e
    average    c = mean_i decode(message_i) + e
    both       bit = sigma(c);   scale = ||c||_1 / count, or as the norm says (`wire`);   e = c - scale sigma(c)
    decode     x = scale sigma

Where `live` has no bit, c = 0 and e = 0, and the scale neither sums nor counts it. A tensor scale is known only after
the last block: there the residual keeps c, and a second loop makes the scales from the blocks' sums and counts.

Bytes an element, fp32 gradients, momentum kept as a message: compress reads g 4, c 4, m 1/8, writes c 4, bits 1/8:
12.3. average, of the shard: reads N/8, E 4; writes E 4, bits 1/8. decode reads bits 1/8, writes x 4. `live` 1/8 more.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from onebit.kernels.cpu.blocks import (
    L2,
    UNBIASED,
    any_flag,
    at,
    clear,
    copy_block,
    count_of,
    flag_of,
    hyper_of,
    keep,
    kept_bits,
    left_out,
    locate,
    mean_scale,
    message_of,
    messages_at,
    momentum_at,
    of_message,
    over,
    put,
    signed,
    staged,
    table,
    unpack,
    up,
    write_header,
)
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, magnitude, splat, total
from onebit.kernels.cpu.memory import (
    bits_at,
    fill,
    float_at,
    int_at,
    load,
    long_at,
    set_bits,
    set_float,
    set_int,
    store,
    streamed,
)
from onebit.kernels.cpu.threads import over_blocks
from onebit.kernels.data.kept import Kept
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import MOST, NORMS, Messages

LARGE = 2**21  # elements that no cache holds


@tile
def _write(c, kept, i, value, bits, norm):
    """c where e was, its bits, and what it adds to the scale."""
    c = keep(kept, i, c)
    store(value + 4 * i, c)
    positive = c >= ZERO
    set_bits(bits + i // 8, positive if kept == 0 else positive & bits_at(kept + i // 8))
    return c * c if norm == L2 else magnitude(c)


@tile
def _unbiased_scale(squares, sizes, count):
    """||c||_2^2 / ||c||_1 of `count` elements, at most MOST times the root mean square."""
    largest = np.float32(MOST) * mean_scale(squares, count, L2)
    return min(np.float32(squares) / np.float32(sizes), largest) if sizes > ZERO else ZERO


@tile
def _squares(value, n):
    squares = splat(ZERO)
    for i in range(0, n, WIDTH):
        c = load(value + 4 * i)
        squares = squares + c * c
    return total(squares)


@tile
def _finish(summed, kept, valid, length, value, bits, scale, partial, counted, norm):
    """A block's scale and what its bits leave out; with a tensor scale its sum and count. Padding is 0."""
    count, n = count_of(kept, valid), up(valid)
    if partial != 0:
        set_float(partial, summed)
        set_int(counted, count)
    else:
        unbiased = norm == UNBIASED
        s = _unbiased_scale(_squares(value, n), summed, count) if unbiased else mean_scale(summed, count, norm)
        set_float(scale, s)
        for i in range(0, n, WIDTH):
            c = load(value + 4 * i)
            store(value + 4 * i, keep(kept, i, c - signed(c >= ZERO, s)))
    if n < length:
        clear(value + 4 * n, value + 4 * length)
        fill(bits + n // 8, 0, (length - n) // 8)


@tile
def _compensate(values, h, gamma, m_scale, m_flat, m_bits, n, kept, value, last, bits, norm):
    """c of a block, where e was; returns what its scale is made of."""
    beta1, rest, grad_scale = h.beta1, h.one_minus_beta1, h.grad_scale
    summed, m_scale = splat(ZERO), beta1 * m_scale
    if m_bits != 0:
        for i in range(0, n, WIDTH):
            y = gamma * (rest * (load(values + 4 * i) * grad_scale))
            c = signed(bits_at(m_bits + i // 8), m_scale) + y + left_out(load(value + 4 * i), last)
            summed = summed + _write(c, kept, i, value, bits, norm)
    else:
        for i in range(0, n, WIDTH):
            y = gamma * (rest * (load(values + 4 * i) * grad_scale))
            if m_flat != 0:
                y = beta1 * load(m_flat + 4 * i) + y
            summed = summed + _write(y + left_out(load(value + 4 * i), last), kept, i, value, bits, norm)
    return total(summed)


@Loop
def _compress(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    grads: int, grad: int, hyper: int, flags: int, gammas: int,
    m_flat: int, m_messages: int, m_copies: int,
    live: int, value: int, before: int, residual_scale: int, partial: int, counted: int,
    out: int, row_bytes: int, tensor: int, norm: int, fingerprint: int, shard_blocks: int,
) -> None:  # fmt: skip
    flag, packed = int_at(flags), m_messages != 0 and m_copies == 1
    unpacked = m_messages != 0 and not packed
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        message = message_of(out, its, row_bytes, 1)
        copy_block(before, value, its)
        if its.place == 0:
            write_header(message, flag, fingerprint, shard_blocks)
        if flag == 0:
            p, valid = its.parameter, its.valid
            values = staged(long_at(grads + 8 * p), grad, its.offset, valid, scratch)
            kept = kept_bits(0 if live == 0 else live + its.start // 8, valid, its.length, scratch + 8 * size)
            scale, bits = of_message(message, its, tensor)
            m_scale, m_bits = of_message(message_of(m_messages, its, row_bytes, m_copies), its, tensor)
            its_value, its_flat = value + 4 * its.start, m_flat + 4 * its.start
            if unpacked:
                its_flat = scratch + 4 * size
                unpack(m_scale, m_bits, row_bytes, m_copies, up(valid), its_flat, 0)
            summed = _compensate(
                values, hyper_of(hyper, its.group), ONE if gammas == 0 else float_at(gammas + 4 * p),
                float_at(m_scale) if packed else ZERO, its_flat if unpacked or m_flat != 0 else 0,
                m_bits if packed else 0, up(valid), kept, its_value,
                ZERO if tensor == 0 else float_at(residual_scale + 4 * its.shard), bits, norm,
            )  # fmt: skip
            _finish(
                summed, kept, valid, its.length, its_value, bits, scale,
                0 if tensor == 0 else partial + 4 * block, counted + 4 * block, norm,
            )  # fmt: skip
    streamed()


@tile
def _mean(in_bits, in_scales, ranks, row_bytes, inverse_ranks, n, kept, value, last, bits, norm):
    """C of a block, where E was; returns what its scale is made of."""
    summed = splat(ZERO)
    for i in range(0, n, WIDTH):
        added = splat(ZERO)
        for rank in range(ranks):
            start = rank * row_bytes
            added = added + signed(bits_at(in_bits + start + i // 8), float_at(in_scales + start))
        c = added * inverse_ranks + left_out(load(value + 4 * i), last)
        summed = summed + _write(c, kept, i, value, bits, norm)
    return total(summed)


@Loop
def _average(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    received: int, row_bytes: int, in_tensor: int, ranks: int, inverse_ranks: float,
    live: int, value: int, before: int, residual_scale: int, partial: int, counted: int,
    out: int, tensor: int, norm: int, fingerprint: int, shard_blocks: int,
) -> None:  # fmt: skip
    flag = any_flag(received, ranks, row_bytes)
    if first == 0:
        write_header(out, flag, fingerprint, shard_blocks)
    if flag != 0:
        for block in range(first, stop):
            copy_block(before, value, locate(blocks, parameters, block))
        streamed()
        return
    last = ZERO if tensor == 0 else float_at(residual_scale)
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        copy_block(before, value, its)
        valid, its_value = its.valid, value + 4 * its.start
        kept = kept_bits(0 if live == 0 else live + its.start // 8, valid, its.length, scratch)
        scale, bits = of_message(out, its, tensor)
        in_scale, in_bits = of_message(received, its, in_tensor)
        summed = _mean(
            in_bits, in_scale, ranks, row_bytes, np.float32(inverse_ranks), up(valid), kept, its_value, last, bits, norm
        )  # fmt: skip
        _finish(
            summed, kept, valid, its.length, its_value, bits, scale,
            0 if tensor == 0 else partial + 4 * block, counted + 4 * block, norm,
        )  # fmt: skip
    streamed()


@Loop
def _scales(
    blocks: int, parameters: int, messages: int, rows: int, row_bytes: int, partial: int, counted: int,
    residual_scale: int, norm: int,
) -> None:  # fmt: skip
    """The scale of each message from its blocks' sums and counts."""
    if flag_of(messages) != 0:
        return
    first = 0
    for row in range(rows):
        its, summed, count = locate(blocks, parameters, first), 0.0, 0
        for block in range(first, first + its.of_shard):
            summed += float_at(partial + 4 * block)
            count += int_at(counted + 4 * block)
        scale, _ = of_message(message_of(messages, its, row_bytes, 1), its, 1)
        set_float(scale, mean_scale(summed, count, norm))
        set_float(residual_scale + 4 * row, mean_scale(summed, count, norm))
        first += its.of_shard


@Loop
def _decode(
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    out: int, dtype: int, messages: int, row_bytes: int, tensor: int, copies: int, large: int,
) -> None:  # fmt: skip
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        address, n = long_at(out + 8 * its.parameter), up(its.valid)
        if address != 0 and n > 0:
            message = message_of(messages, its, row_bytes, copies)
            in_place = dtype == 0 and n == its.valid
            values = address + 4 * its.offset if in_place else scratch
            if any_flag(message, copies, row_bytes) == 0:
                scale, bits = of_message(message, its, tensor)
                past_caches = 1 if large != 0 and in_place and values % (4 * WIDTH) == 0 else 0
                unpack(scale, bits, row_bytes, copies, n, values, past_caches)
            else:
                for i in range(0, n, WIDTH):
                    store(values + 4 * i, splat(np.float32(np.nan)))
            put(values, address, dtype, its.offset, its.valid, scratch + 4 * size)
    streamed()


def compress(
    span: Span,
    grads: Pointers,
    momentum: Tensor | Messages | None,
    residual: Residual,
    hyper: Tensor,
    flags: Tensor,
    out: Messages,
    *,
    live: Tensor | None = None,
    gamma: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.compress` in one loop."""
    form = out.format
    arguments = (
        *over(span), *table(grads), at(hyper), at(flags), at(gamma), *momentum_at(momentum), at(live),
        *_residual_at(residual), at(out.buffer), form.nbytes, int(form.scale == "tensor"), NORMS[form.norm],
        form.fingerprint, form.layout.shard_blocks,
    )  # fmt: skip
    over_blocks(_compress, span, arguments, scratch_blocks=2)
    _finish_scales(span, residual, out)


def average(span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None) -> None:
    """`onebit.kernels.passes.Backend.average` in one loop."""
    form = out.format
    arguments = (
        *over(span), at(received.buffer), received.format.nbytes, int(received.format.scale == "tensor"),
        received.rows, 1 / received.rows, at(live), *_residual_at(residual), at(out.buffer),
        int(form.scale == "tensor"), NORMS[form.norm], form.fingerprint, form.layout.shard_blocks,
    )  # fmt: skip
    over_blocks(_average, span, arguments)
    _finish_scales(span, residual, out)


def _residual_at(residual: Residual) -> tuple[int, int, int, int, int]:
    parts = residual.value, residual.before, residual.scale, residual.partial, residual.counted
    value, before, scale, partial, counted = map(at, parts)
    return value, before, scale, partial, counted


def _finish_scales(span: Span, residual: Residual, out: Messages) -> None:
    if residual.scale is not None:
        blocks, parameters, _ = over(span)
        _scales(
            blocks, parameters, at(out.buffer), out.rows, out.format.nbytes, at(residual.partial),
            at(residual.counted), at(residual.scale), NORMS[out.format.norm],
        )  # fmt: skip


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """`onebit.kernels.passes.Backend.decode` in one loop."""
    arguments = (*over(span), *table(out), *messages_at(messages), int(span.elements >= LARGE))
    over_blocks(_decode, span, arguments, scratch_blocks=1)


def restore(kept: Kept, flags: Tensor) -> None:
    """`onebit.kernels.passes.Backend.restore`."""
    if int(flags):
        for now, before in kept.pairs:
            now.copy_(before)

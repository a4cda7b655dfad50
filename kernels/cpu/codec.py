"""compress, average and decode: momentum, error compensation, sign, scale and packing in one read of each array.

    compress   c = beta1 m + gamma_p ((1 - beta1) g') + e
    average    c = mean_i decode(message_i) + e
    both       bit = sigma(c);   scale = ||c||_1 / count;   e = c - scale sigma(c)
    decode     x = scale sigma

average may write 2 bits an element: whether it is large, more than ABOVE times the block's mean size, picks one of two
scales, each the mean size of those it stands for.

Where `live` has no bit, c = 0 and e = 0, and the scale neither sums nor counts it. A tensor scale is known only after
the last block: there the residual keeps c, and a second loop makes the scales from the blocks' sums and counts.

Bytes an element, fp32 gradients, momentum kept as a message: compress reads g 4, c 4, m 1/8, writes c 4, bits 1/8:
12.3. average, of the shard: reads N/8, E 4; writes E 4, bits 1/8. decode reads bits 1/8, writes x 4. `live` 1/8 more.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from onebit.kernels.cpu.blocks import (
    ONE,
    ZERO,
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
    momentum_at,
    of_message,
    one_of_two,
    over,
    packing,
    parts,
    put,
    signed,
    staged,
    table,
    unpack,
    up,
    write_header,
)
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, magnitude, ones, splat, total, where
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
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import ABOVE, Messages

LARGE = 2**21  # elements that no cache holds


@tile
def _write(c, kept, i, value, bits, l2):
    """c where e was, its bits, and what it adds to the scale."""
    c = keep(kept, i, c)
    store(value + 4 * i, c)
    positive = c >= ZERO
    set_bits(bits + i // 8, positive if kept == 0 else positive & bits_at(kept + i // 8))
    return c * c if l2 != 0 else magnitude(c)


@tile
def _finish(summed, kept, valid, size, value, bits, scale, partial, counted, l2):
    """A block's scale and what its bits leave out; with a tensor scale its sum and count. Padding is 0."""
    count, n = count_of(kept, valid), up(valid)
    if partial != 0:
        set_float(partial, summed)
        set_int(counted, count)
    else:
        s = mean_scale(summed, count, l2)
        set_float(scale, s)
        for i in range(0, n, WIDTH):
            c = load(value + 4 * i)
            store(value + 4 * i, keep(kept, i, c - signed(c >= ZERO, s)))
    if n < size:
        clear(value + 4 * n, value + 4 * size)
        fill(bits + n // 8, 0, (size - n) // 8)


@tile
def _compensate(values, h, gamma, m_scale, m_flat, m_bits, n, kept, value, last, bits, l2):
    """c of a block, where e was; returns what its scale is made of."""
    beta1, rest, grad_scale = h.beta1, h.one_minus_beta1, h.grad_scale
    summed, m_scale = splat(ZERO), beta1 * m_scale
    if m_bits != 0:
        for i in range(0, n, WIDTH):
            y = gamma * (rest * (load(values + 4 * i) * grad_scale))
            c = signed(bits_at(m_bits + i // 8), m_scale) + y + left_out(load(value + 4 * i), last)
            summed = summed + _write(c, kept, i, value, bits, l2)
    else:
        for i in range(0, n, WIDTH):
            y = gamma * (rest * (load(values + 4 * i) * grad_scale))
            if m_flat != 0:
                y = beta1 * load(m_flat + 4 * i) + y
            summed = summed + _write(y + left_out(load(value + 4 * i), last), kept, i, value, bits, l2)
    return total(summed)


@Loop
def _compress(
    first: int, stop: int, scratch: int, owner: int, rows: int, first_block: int, size: int,
    grads: int, grad: int, hyper: int, flags: int, shard_blocks: int, row_bytes: int, fingerprint: int,
    gammas: int, m_flat: int, m_scales: int, m_bits: int, m_row_bytes: int, m_tensor: int, m_copies: int, m_planes: int,
    live: int, value: int, before: int, residual_scale: int, partial: int, counted: int, header: int, scales: int,
    bits: int, tensor: int, l2: int,
) -> None:  # fmt: skip
    flag, packed = int_at(flags), m_bits != 0 and m_copies == 1 and m_planes == 1
    unpacked = m_bits != 0 and not packed
    for block in range(first, stop):
        row = block // shard_blocks
        copy_block(before, value, block, size)
        if block % shard_blocks == 0:
            write_header(header + row * row_bytes, flag, fingerprint, shard_blocks, 1)
        if flag == 0:
            p, group, offset, valid = locate(first_block + block, owner, rows, size)
            values = staged(long_at(grads + 8 * p), grad, offset, valid, scratch)
            kept = kept_bits(0 if live == 0 else live + block * (size // 8), valid, size, scratch + 8 * size)
            scale, its_bits = of_message(scales, bits, block, shard_blocks, row_bytes, size, tensor, 1, 1)
            m_scale, its_m = of_message(
                m_scales, m_bits, block, shard_blocks, m_row_bytes, size, m_tensor, m_copies, m_planes
            )
            its_value, its_flat = value + 4 * block * size, m_flat + 4 * block * size
            if unpacked:
                its_flat = scratch + 4 * size
                unpack(m_scale, its_m, size, m_copies, m_planes, m_row_bytes, up(valid), its_flat, 0)
            summed = _compensate(
                values, hyper_of(hyper, group), ONE if gammas == 0 else float_at(gammas + 4 * p),
                float_at(m_scale) if packed else ZERO, its_flat if unpacked or m_flat != 0 else 0,
                its_m if packed else 0, up(valid), kept, its_value,
                ZERO if tensor == 0 else float_at(residual_scale + 4 * row), its_bits, l2,
            )  # fmt: skip
            _finish(
                summed, kept, valid, size, its_value, its_bits, scale,
                0 if tensor == 0 else partial + 4 * block, counted + 4 * block, l2,
            )  # fmt: skip
    streamed()


@tile
def _mean(in_bits, in_scales, ranks, row_bytes, inverse_ranks, n, kept, value, last, bits, l2):
    """C of a block, where E was; returns what its scale is made of."""
    summed = splat(ZERO)
    for i in range(0, n, WIDTH):
        added = splat(ZERO)
        for rank in range(ranks):
            start = rank * row_bytes
            added = added + signed(bits_at(in_bits + start + i // 8), float_at(in_scales + start))
        c = added * inverse_ranks + left_out(load(value + 4 * i), last)
        summed = summed + _write(c, kept, i, value, bits, l2)
    return total(summed)


@tile
def _finish_two_bits(summed, kept, valid, size, value, bits, scale):
    """Which elements of a block are large, the mean sizes of both kinds, and what they leave out. Padding is 0."""
    count, n, large_bits = count_of(kept, valid), up(valid), bits + size // 8
    least = np.float32(ABOVE) * mean_scale(summed, count, 0)
    small_sum, large_sum, larger = splat(ZERO), splat(ZERO), 0
    for i in range(0, n, WIDTH):
        c = magnitude(load(value + 4 * i))
        large = c > least
        set_bits(large_bits + i // 8, large)
        larger += ones(large)
        small_sum, large_sum = small_sum + where(large, ZERO, c), large_sum + where(large, c, ZERO)
    set_float(scale, mean_scale(total(small_sum), count - larger, 0))
    set_float(scale + 4, mean_scale(total(large_sum), larger, 0))
    for i in range(0, n, WIDTH):
        left = load(value + 4 * i) - one_of_two(bits, scale, size, i)
        store(value + 4 * i, keep(kept, i, left))
    if n < size:
        clear(value + 4 * n, value + 4 * size)
        fill(bits + n // 8, 0, (size - n) // 8)
        fill(large_bits + n // 8, 0, (size - n) // 8)


@Loop
def _average(
    first: int, stop: int, scratch: int, owner: int, rows: int, first_block: int, size: int,
    row_bytes: int, in_tensor: int, fingerprint: int, ranks: int, inverse_ranks: float, shard_blocks: int,
    in_header: int, in_scales: int, in_bits: int, live: int, value: int, before: int, residual_scale: int,
    partial: int, counted: int, header: int, scales: int, bits: int, tensor: int, l2: int, planes: int,
) -> None:  # fmt: skip
    flag = any_flag(in_header, ranks, row_bytes)
    if first == 0:
        write_header(header, flag, fingerprint, shard_blocks, planes)
    if flag != 0:
        for block in range(first, stop):
            copy_block(before, value, block, size)
        streamed()
        return
    last = ZERO if tensor == 0 else float_at(residual_scale)
    for block in range(first, stop):
        _, _, _, valid = locate(first_block + block, owner, rows, size)
        copy_block(before, value, block, size)
        kept = kept_bits(0 if live == 0 else live + block * (size // 8), valid, size, scratch)
        scale, its_bits = of_message(scales, bits, block, shard_blocks, 0, size, tensor, 1, planes)
        in_scale, in_block = of_message(in_scales, in_bits, block, shard_blocks, row_bytes, size, in_tensor, 1, 1)
        its_value = value + 4 * block * size
        summed = _mean(
            in_block, in_scale, ranks, row_bytes, np.float32(inverse_ranks), up(valid), kept, its_value, last,
            its_bits, l2,
        )  # fmt: skip
        if planes == 2:
            _finish_two_bits(summed, kept, valid, size, its_value, its_bits, scale)
        else:
            _finish(
                summed, kept, valid, size, its_value, its_bits, scale,
                0 if tensor == 0 else partial + 4 * block, counted + 4 * block, l2,
            )  # fmt: skip
    streamed()


@Loop
def _scales(
    header: int, messages: int, row_bytes: int, shard_blocks: int, partial: int, counted: int, scales: int,
    residual_scale: int, l2: int,
) -> None:  # fmt: skip
    """The scale of each message from its blocks' sums and counts."""
    if flag_of(header, 0, row_bytes) != 0:
        return
    for row in range(messages):
        summed, count = 0.0, 0
        for block in range(row * shard_blocks, (row + 1) * shard_blocks):
            summed += float_at(partial + 4 * block)
            count += int_at(counted + 4 * block)
        scale = mean_scale(summed, count, l2)
        set_float(scales + row * row_bytes, scale)
        set_float(residual_scale + 4 * row, scale)


@Loop
def _decode(
    first: int, stop: int, scratch: int, owner: int, rows: int, first_block: int, size: int,
    out: int, dtype: int, shard_blocks: int, header: int, scales: int, bits: int, row_bytes: int, tensor: int,
    copies: int, planes: int, large: int,
) -> None:  # fmt: skip
    for block in range(first, stop):
        p, _, offset, valid = locate(first_block + block, owner, rows, size)
        address = long_at(out + 8 * p)
        if address != 0 and valid > 0:
            scale, its_bits = of_message(scales, bits, block, shard_blocks, row_bytes, size, tensor, copies, planes)
            first_row = block // shard_blocks * copies
            in_place = dtype == 0 and valid % WIDTH == 0
            values = address + 4 * offset if in_place else scratch
            if any_flag(header + first_row * row_bytes, copies, row_bytes) == 0:
                past_caches = 1 if large != 0 and in_place and values % (4 * WIDTH) == 0 else 0
                unpack(scale, its_bits, size, copies, planes, row_bytes, up(valid), values, past_caches)
            else:
                for i in range(0, up(valid), WIDTH):
                    store(values + 4 * i, splat(np.float32(np.nan)))
            put(values, address, dtype, offset, valid, scratch + 4 * size)
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
    """`onebit.kernels.reference.compress` in one loop."""
    form = out.format
    arguments = (
        *over(span), *table(grads), at(hyper), at(flags), form.shard_blocks, form.nbytes, form.fingerprint,
        at(gamma), *momentum_at(momentum), at(live), at(residual.value), at(residual.before), at(residual.scale),
        at(residual.partial), at(residual.counted), *parts(out), int(form.scale == "tensor"), int(form.norm == "l2"),
    )  # fmt: skip
    over_blocks(_compress, span.count, form.block_size, arguments, scratch_blocks=2)
    _finish_scales(residual, out)


def average(span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None) -> None:
    """`onebit.kernels.reference.average` in one loop."""
    form = out.format
    arguments = (
        *over(span), received.format.nbytes, int(received.format.scale == "tensor"), form.fingerprint, received.rows,
        1 / received.rows, form.shard_blocks, *parts(received), at(live), at(residual.value), at(residual.before),
        at(residual.scale), at(residual.partial), at(residual.counted), *parts(out), int(form.scale == "tensor"),
        int(form.norm == "l2"), form.bits,
    )  # fmt: skip
    over_blocks(_average, span.count, form.block_size, arguments)
    _finish_scales(residual, out)


def _finish_scales(residual: Residual, out: Messages) -> None:
    if residual.scale is not None:
        form, (header, scales, _) = out.format, parts(out)
        _scales(
            header, out.rows, form.nbytes, form.shard_blocks, at(residual.partial), at(residual.counted), scales,
            at(residual.scale), int(form.norm == "l2"),
        )  # fmt: skip


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """`onebit.kernels.reference.decode` in one loop."""
    arguments = (
        *over(span), *table(out), messages.format.shard_blocks, *parts(messages), *packing(messages),
        int(span.elements >= LARGE),
    )  # fmt: skip
    over_blocks(_decode, span.count, messages.format.block_size, arguments, scratch_blocks=1)

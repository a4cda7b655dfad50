"""compress, average and decode: momentum, error compensation, sign, scale and packing in one read of each array.
`onebit.kernels.passes` has the equations and the bytes.

A tensor scale is known only after the last block: there the residual keeps c, and a second loop makes the scales from
the blocks' sums and counts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
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
from onebit.kernels.cpu.threads import numbers, over_blocks
from onebit.kernels.data.wire import MOST

LARGE = 2**21  # elements that no cache holds


@tile
def _write(c, kept, i, value, bits, norm):
    """c where e was, its bits, and what it adds to the scale."""
    c = tiles.keep(kept, i, c)
    store(value + 4 * i, c)
    positive = c >= ZERO
    set_bits(bits + i // 8, positive if kept == 0 else positive & bits_at(kept + i // 8))
    return c * c if norm == tiles.L2 else magnitude(c)


@tile
def _unbiased_scale(squares, sizes, count):
    """||c||_2^2 / ||c||_1 of `count` elements, at most MOST times the root mean square."""
    largest = np.float32(MOST) * tiles.mean_scale(squares, count, tiles.L2)
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
    count, n = tiles.count_of(kept, valid), tiles.up(valid)
    if partial != 0:
        set_float(partial, summed)
        set_int(counted, count)
    else:
        unbiased = norm == tiles.UNBIASED
        s = _unbiased_scale(_squares(value, n), summed, count) if unbiased else tiles.mean_scale(summed, count, norm)
        set_float(scale, s)
        for i in range(0, n, WIDTH):
            c = load(value + 4 * i)
            store(value + 4 * i, tiles.keep(kept, i, c - tiles.signed(c >= ZERO, s)))
    if n < length:
        tiles.clear(value + 4 * n, value + 4 * length)
        fill(bits + n // 8, 0, (length - n) // 8)


@tile
def _compensate(values, h, gamma, m_scale, m_flat, m_bits, n, kept, value, last, bits, norm):
    """c of a block, where e was; returns what its scale is made of."""
    beta1, rest, grad_scale = h.beta1, h.one_minus_beta1, h.grad_scale
    summed, m_scale = splat(ZERO), beta1 * m_scale
    if m_bits != 0:
        for i in range(0, n, WIDTH):
            y = gamma * (rest * (load(values + 4 * i) * grad_scale))
            c = tiles.signed(bits_at(m_bits + i // 8), m_scale) + y + tiles.left_out(load(value + 4 * i), last)
            summed = summed + _write(c, kept, i, value, bits, norm)
    else:
        for i in range(0, n, WIDTH):
            y = gamma * (rest * (load(values + 4 * i) * grad_scale))
            if m_flat != 0:
                y = beta1 * load(m_flat + 4 * i) + y
            summed = summed + _write(y + tiles.left_out(load(value + 4 * i), last), kept, i, value, bits, norm)
    return total(summed)


@Loop
def _compress(
    first, stop, scratch, block_table, parameter_table, first_block, block_size,
    grad, grad_dtype, hyper, flags, gamma, momentum, momentum_copies, live,
    residual_value, residual_before, residual_scale, residual_partial, residual_counted,
    out, out_bytes, out_tensor, out_norm, out_fingerprint, out_shard_blocks,
):  # fmt: skip
    flag, packed = int_at(flags), momentum_copies == 1
    unpacked = momentum_copies > 1
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        message = tiles.message_of(out, its, out_bytes, 1)
        tiles.copy_block(residual_before, residual_value, its)
        if its.place == 0:
            tiles.write_header(message, flag, out_fingerprint, out_shard_blocks)
        if flag == 0:
            p, valid = its.parameter, its.valid
            values = tiles.gradient_at(grad, grad_dtype, its, scratch)
            kept = tiles.kept_bits(tiles.part(live, its.start // 8), valid, its.length, scratch + 8 * block_size)
            scale, bits = tiles.of_message(message, its, out_tensor)
            last = tiles.message_of(momentum, its, out_bytes, momentum_copies)
            m_scale, m_bits = tiles.of_message(last, its, out_tensor)
            its_value, its_flat = residual_value + 4 * its.start, momentum + 4 * its.start
            if unpacked:
                its_flat = scratch + 4 * block_size
                tiles.unpack(m_scale, m_bits, out_bytes, momentum_copies, tiles.up(valid), its_flat, 0)
            summed = _compensate(
                values, tiles.hyper_of(hyper, its.group), tiles.value_of(gamma, p, ONE),
                float_at(m_scale) if packed else ZERO, its_flat if momentum != 0 and not packed else 0,
                m_bits if packed else 0, tiles.up(valid), kept, its_value,
                tiles.value_of(residual_scale, its.shard, ZERO), bits, out_norm,
            )  # fmt: skip
            _finish(
                summed, kept, valid, its.length, its_value, bits, scale,
                tiles.part(residual_partial, 4 * block), residual_counted + 4 * block, out_norm,
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
            added = added + tiles.signed(bits_at(in_bits + start + i // 8), float_at(in_scales + start))
        c = added * inverse_ranks + tiles.left_out(load(value + 4 * i), last)
        summed = summed + _write(c, kept, i, value, bits, norm)
    return total(summed)


@Loop
def _average(
    first, stop, scratch, block_table, parameter_table, first_block,
    received, received_bytes, received_tensor, received_rows, inverse_ranks: float, live,
    residual_value, residual_before, residual_scale, residual_partial, residual_counted,
    out, out_tensor, out_norm, out_fingerprint, out_shard_blocks,
):  # fmt: skip
    flag = tiles.any_flag(received, received_rows, received_bytes)
    if first == 0:
        tiles.write_header(out, flag, out_fingerprint, out_shard_blocks)
    if flag != 0:
        for block in range(first, stop):
            tiles.copy_block(
                residual_before, residual_value, tiles.locate(block_table, parameter_table, first_block, block)
            )
        streamed()
        return
    last = tiles.value_of(residual_scale, 0, ZERO)
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        tiles.copy_block(residual_before, residual_value, its)
        valid, its_value = its.valid, residual_value + 4 * its.start
        kept = tiles.kept_bits(tiles.part(live, its.start // 8), valid, its.length, scratch)
        scale, bits = tiles.of_message(out, its, out_tensor)
        in_scale, in_bits = tiles.of_message(received, its, received_tensor)
        summed = _mean(
            in_bits, in_scale, received_rows, received_bytes, np.float32(inverse_ranks), tiles.up(valid), kept,
            its_value, last, bits, out_norm,
        )  # fmt: skip
        _finish(
            summed, kept, valid, its.length, its_value, bits, scale,
            tiles.part(residual_partial, 4 * block), residual_counted + 4 * block, out_norm,
        )  # fmt: skip
    streamed()


@Loop
def _scales(
    block_table, parameter_table, first_block, out, out_rows, out_bytes, out_norm,
    residual_partial, residual_counted, residual_scale,
):  # fmt: skip
    """The scale of each message from its blocks' sums and counts."""
    if tiles.flag_of(out) != 0:
        return
    first = 0
    for row in range(out_rows):
        its, summed, count = tiles.locate(block_table, parameter_table, first_block, first), 0.0, 0
        for block in range(first, first + its.of_shard):
            summed += float_at(residual_partial + 4 * block)
            count += int_at(residual_counted + 4 * block)
        scale, _ = tiles.of_message(tiles.message_of(out, its, out_bytes, 1), its, 1)
        set_float(scale, tiles.mean_scale(summed, count, out_norm))
        set_float(residual_scale + 4 * row, tiles.mean_scale(summed, count, out_norm))
        first += its.of_shard


@Loop
def _decode(
    first, stop, scratch, block_table, parameter_table, first_block, block_size,
    out, out_dtype, replies, replies_bytes, replies_tensor, replies_copies, large,
):  # fmt: skip
    for block in range(first, stop):
        its = tiles.locate(block_table, parameter_table, first_block, block)
        address, n = long_at(out + 8 * its.parameter), tiles.up(its.valid)
        if address != 0 and n > 0:
            message = tiles.message_of(replies, its, replies_bytes, replies_copies)
            in_place = out_dtype == tiles.FP32 and n == its.valid
            values = address + 4 * its.offset if in_place else scratch
            if tiles.any_flag(message, replies_copies, replies_bytes) == 0:
                scale, bits = tiles.of_message(message, its, replies_tensor)
                past_caches = 1 if large != 0 and in_place and values % (4 * WIDTH) == 0 else 0
                tiles.unpack(scale, bits, replies_bytes, replies_copies, n, values, past_caches)
            else:
                for i in range(0, n, WIDTH):
                    store(values + 4 * i, splat(np.float32(np.nan)))
            tiles.put_parameter(values, out, out_dtype, its, scratch + 4 * block_size)
    streamed()


def compress(work: passes.Compress) -> None:
    _encode(_compress, work, scratch_blocks=2)


def average(work: passes.Average) -> None:
    _encode(_average, work, scratch_blocks=0)


def _encode(loop: Loop, work: passes.Compress | passes.Average, scratch_blocks: int) -> None:
    found = work.arguments()
    over_blocks(loop, work.span, found, scratch_blocks)
    if work.residual.scale is not None:
        _scales(*numbers(_scales, found))


def decode(work: passes.Decode) -> None:
    large = work.span.elements >= LARGE
    over_blocks(_decode, work.span, work.arguments() | {"large": large}, scratch_blocks=1)


PASSES: dict[type[passes.Pass], Callable[..., None]] = {
    passes.Compress: compress,
    passes.Average: average,
    passes.Decode: decode,
}

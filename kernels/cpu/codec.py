"""compress, average and decode: momentum, error compensation, sign, scale and packing in one read of each array.
`onebit.kernels.passes` has the equations and the bytes.

A tensor scale is known only after the last block: there the residual keeps c, and a second loop makes the scales from
the blocks' sums and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from onebit.kernels.cpu.tiles import Gradients, Messages, Pointers, Residual, Run, Written
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
def _finish(summed, kept, block, its, value, found, residual, norm):
    """A block's scale and what its bits leave out; with a tensor scale its sum and count. Padding is 0."""
    count, n = tiles.count_of(kept, its.valid), tiles.up(its.valid)
    if residual.partial != 0:
        set_float(residual.partial + 4 * block, summed)
        set_int(residual.counted + 4 * block, count)
    else:
        unbiased = norm == tiles.UNBIASED
        s = _unbiased_scale(_squares(value, n), summed, count) if unbiased else tiles.mean_scale(summed, count, norm)
        set_float(found.scale, s)
        for i in range(0, n, WIDTH):
            c = load(value + 4 * i)
            store(value + 4 * i, tiles.keep(kept, i, c - tiles.signed(c >= ZERO, s)))
    if n < its.length:
        tiles.clear(value + 4 * n, value + 4 * its.length)
        fill(found.bits + n // 8, 0, (its.length - n) // 8)


@Loop
def _compress(run: Run, g: Gradients, gamma, momentum: Messages, live, residual: Residual, out: Written):
    flag = int_at(g.flags)
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        found, value, n = tiles.find(out, its), residual.value + 4 * its.start, tiles.up(its.valid)
        tiles.copy_block(residual.before, residual.value, its, 4)
        if its.block_in_shard == 0:
            tiles.write_header(found.header, tiles.MAGIC, flag, out)
        if flag == 0:
            g_at, h = tiles.gradient_at(g, its, tiles.room(run, 0)), tiles.hyper_of(g.hyper, its)
            kept = tiles.kept_bits(tiles.part(live, its.start // 8), its, tiles.room(run, 2))
            m, m_at = tiles.find(momentum, its), tiles.part(momentum.address, 4 * its.start)
            if momentum.senders > 1:
                m_at = tiles.room(run, 1)
                tiles.unpack(m, momentum, n, m_at, 0)
            m_scale = h.beta1 * float_at(m.scale) if momentum.senders == 1 else ZERO
            its_gamma, last = tiles.value_of(gamma, its.parameter, ONE), tiles.value_of(residual.scale, its.shard, ZERO)
            summed = splat(ZERO)
            for i in range(0, n, WIDTH):
                y = its_gamma * (h.one_minus_beta1 * (load(g_at + 4 * i) * h.grad_scale))
                if momentum.senders == 1:
                    y = tiles.signed(bits_at(m.bits + i // 8), m_scale) + y
                elif m_at != 0:
                    y = h.beta1 * load(m_at + 4 * i) + y
                c = y + tiles.left_out(load(value + 4 * i), last)
                summed = summed + _write(c, kept, i, value, found.bits, out.norm)
            _finish(total(summed), kept, block, its, value, found, residual, out.norm)
    streamed()


@Loop
def _average(run: Run, received: Messages, inverse_ranks: float, live, residual: Residual, out: Written):
    flag = tiles.any_flag(received.address, received.rows, received.bytes)
    if run.first == 0:
        tiles.write_header(out.address, tiles.MAGIC, flag, out)
    inverse, last = np.float32(inverse_ranks), tiles.value_of(residual.scale, 0, ZERO)
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        tiles.copy_block(residual.before, residual.value, its, 4)
        if flag == 0:
            value, found, first = residual.value + 4 * its.start, tiles.find(out, its), tiles.find(received, its)
            kept = tiles.kept_bits(tiles.part(live, its.start // 8), its, tiles.room(run, 0))
            summed = splat(ZERO)
            for i in range(0, its.valid, WIDTH):
                c = tiles.sum_of(first, received.rows, received.bytes, i) * inverse
                c = c + tiles.left_out(load(value + 4 * i), last)
                summed = summed + _write(c, kept, i, value, found.bits, out.norm)
            _finish(total(summed), kept, block, its, value, found, residual, out.norm)
    streamed()


@Loop
def _scales(run: Run, out: Written, residual: Residual):
    """The scale of each message from its blocks' sums and counts."""
    if tiles.any_flag(out.address, 1, 0) != 0:
        return
    first = 0
    for row in range(out.rows):
        its, summed, count = tiles.locate(run, first), 0.0, 0
        for block in range(first, first + its.of_shard):
            summed += float_at(residual.partial + 4 * block)
            count += int_at(residual.counted + 4 * block)
        scale = tiles.mean_scale(summed, count, out.norm)
        set_float(tiles.find(out, its).scale, scale)
        set_float(residual.scale + 4 * row, scale)
        first += its.of_shard


@Loop
def _decode(run: Run, out: Pointers, replies: Messages, large):
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        address, n = long_at(out.address + 8 * its.parameter), tiles.up(its.valid)
        if address != 0 and n > 0:
            found = tiles.find(replies, its)
            in_place = out.dtype == tiles.FP32 and n == its.valid
            values = address + 4 * its.offset if in_place else tiles.room(run, 0)
            if not tiles.flagged(found, replies):
                past_caches = 1 if large != 0 and in_place and values % (4 * WIDTH) == 0 else 0
                tiles.unpack(found, replies, n, values, past_caches)
            else:
                for i in range(0, n, WIDTH):
                    store(values + 4 * i, splat(np.float32(np.nan)))
            tiles.put(values, address, out.dtype, its.offset, its.valid, tiles.room(run, 1))
    streamed()


def _encode(loop: Loop, scratch_blocks: int) -> Callable[[Any], None]:
    """What runs compress or average."""

    def run(work: passes.Compress | passes.Average) -> None:
        found = work.arguments()
        over_blocks(loop, work.span, found, scratch_blocks)
        if work.residual.scale is not None:
            _scales(*numbers(_scales, found))

    return run


def decode(work: passes.Decode) -> None:
    large = work.span.elements >= LARGE
    over_blocks(_decode, work.span, work.arguments() | {"large": large}, scratch_blocks=1)


PASSES: dict[type[passes.Pass], Callable[..., None]] = {
    passes.Compress: _encode(_compress, scratch_blocks=2),
    passes.Average: _encode(_average, scratch_blocks=0),
    passes.Decode: decode,
}

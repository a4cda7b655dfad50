"""quantize, average_codes and dequantize: error compensation, scales and packing of 4 or 8 bits an element, in one read
of each array. `onebit.kernels.passes` has the equations and the bytes.

The scale of 256 elements is known when all are read: c waits in scratch memory, which stays in the first cache.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, ZERO, largest, magnitude, splat, where
from onebit.kernels.cpu.memory import (
    bytes_at,
    fill,
    float_at,
    int_at,
    load,
    load_bf16,
    long_at,
    nibbles_at,
    set_bytes,
    set_float,
    set_nibbles,
    store,
    store_bf16,
    streamed,
)
from onebit.kernels.cpu.threads import one_loop
from onebit.kernels.cpu.tiles import ALIGN, HEADER, Found, Gradients, Pointers, Residual, Run
from onebit.kernels.data import wire

GROUP = wire.GROUP
LEAST = np.float32(wire.LEAST)
LARGEST_4, LARGEST_8 = (np.float32(wire.largest_code(bits)) for bits in (4, 8))
TO_WHOLE = np.float32(1.5 * 2**23)  # what is added to a number below 2^22 rounds it, ties to even, and is its low bits

Codes = namedtuple("Codes", "address bytes rows senders bits groups")  # messages
Written = namedtuple("Written", "address bytes rows senders bits groups magic fingerprint shard_blocks")


@tile
def _find(messages, its):
    """A block in the messages of a span: its first scale and code."""
    header = messages.address + its.shard * messages.senders * messages.bytes
    scales, size = header + HEADER, 4 * messages.groups
    codes = scales + (size * its.of_shard + (ALIGN - 1)) // ALIGN * ALIGN
    return Found(header, scales + size * its.block_in_shard, codes + its.in_shard * messages.bits // 8)


@tile
def _codes_at(address, bits):
    """Sixteen codes, as floats."""
    return nibbles_at(address) if bits == 4 else bytes_at(address)


@tile
def _mean(found, messages, count, factor, i):
    """Sixteen elements of a block: what `count` messages stand for, added up in the order of ranks."""
    summed = splat(ZERO)
    for k in range(count):
        start = k * messages.bytes
        codes = _codes_at(found.bits + start + i * messages.bits // 8, messages.bits)
        summed = summed + codes * float_at(found.scale + start + 4 * (i // GROUP))
    return summed * factor


@tile
def _scale_of(c, count, bits):
    """The scale of some values, and the scale's inverse; 0 where all are 0, or nearly."""
    sizes = splat(ZERO)
    for i in range(0, count, WIDTH):
        size = magnitude(load(c + 4 * i))
        sizes = where(size > sizes, size, sizes)
    most, of_code = largest(sizes), LARGEST_4 if bits == 4 else LARGEST_8
    return (most / of_code, of_code / most) if most >= LEAST else (ZERO, ZERO)


@tile
def _quantize(c, value, found, its, out):
    """The codes of a block's c, their scales, and what they leave out. Padding is 0."""
    n, bits = tiles.up(its.valid), out.bits
    for group in range(out.groups):
        first = group * GROUP
        count = max(min(n - first, GROUP), 0)
        scale, inverse = _scale_of(c + 4 * first, count, bits)
        set_float(found.scale + 4 * group, scale)
        for i in range(first, first + count, WIDTH):
            x = load(c + 4 * i)
            code = x * inverse + TO_WHOLE
            if bits == 4:
                set_nibbles(found.bits + i // 2, code)
            else:
                set_bytes(found.bits + i, code)
            store_bf16(value + 2 * i, x - (code - TO_WHOLE) * scale)
    if n < its.length:
        fill(value + 2 * n, 0, 2 * (its.length - n))
        fill(found.bits + n * bits // 8, 0, (its.length - n) * bits // 8)


@Loop
def _quantize_loop(run: Run, g: Gradients, residual: Residual, out: Written):
    flag = int_at(g.flags)
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        found, value = _find(out, its), residual.value + 2 * its.start
        tiles.copy_block(residual.before, residual.value, its, 2)
        if its.block_in_shard == 0:
            tiles.write_header(found.header, out.magic, flag, out)
        if flag == 0:
            g_at, c_at = tiles.gradient_at(g, its, tiles.room(run, 0)), tiles.room(run, 1)
            kept, scale = tiles.kept_bits(0, its, tiles.room(run, 2)), tiles.hyper_of(g.hyper, its).grad_scale
            for i in range(0, its.valid, WIDTH):
                c = load(g_at + 4 * i) * scale + load_bf16(value + 2 * i)
                store(c_at + 4 * i, tiles.keep(kept, i, c))
            _quantize(c_at, value, found, its, out)
    streamed()


@Loop
def _average_codes(run: Run, received: Codes, inverse_ranks: float, residual: Residual, out: Written):
    flag, inverse = tiles.any_flag(received.address, received.rows, received.bytes), np.float32(inverse_ranks)
    if run.first == 0:
        tiles.write_header(out.address, out.magic, flag, out)
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        tiles.copy_block(residual.before, residual.value, its, 2)
        if flag == 0:
            value, found, first = residual.value + 2 * its.start, _find(out, its), _find(received, its)
            c_at, kept = tiles.room(run, 0), tiles.kept_bits(0, its, tiles.room(run, 1))
            for i in range(0, its.valid, WIDTH):
                c = _mean(first, received, received.rows, inverse, i) + load_bf16(value + 2 * i)
                store(c_at + 4 * i, tiles.keep(kept, i, c))
            _quantize(c_at, value, found, its, out)
    streamed()


@Loop
def _dequantize(run: Run, out: Pointers, replies: Codes):
    inverse = np.float32(1 / replies.senders)
    for block in range(run.first, run.stop):
        its = tiles.locate(run, block)
        address, n = long_at(out.address + 8 * its.parameter), tiles.up(its.valid)
        if address != 0 and n > 0:
            found = _find(replies, its)
            in_place = out.dtype == tiles.FP32 and n == its.valid
            values = address + 4 * its.offset if in_place else tiles.room(run, 0)
            spoiled = splat(np.float32(np.nan) if tiles.flagged(found, replies) else ZERO)
            for i in range(0, n, WIDTH):
                store(values + 4 * i, _mean(found, replies, replies.senders, inverse, i) + spoiled)
            tiles.put(values, address, out.dtype, its.offset, its.valid, tiles.room(run, 1))


PASSES = {
    passes.Quantize: one_loop(_quantize_loop, scratch_blocks=2),
    passes.AverageCodes: one_loop(_average_codes, scratch_blocks=1),
    passes.Dequantize: one_loop(_dequantize, scratch_blocks=1),
}

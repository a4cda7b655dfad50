"""One block at a time: where its values lie, and what is done with them in every pass.

The maths of a pass is a tile function on sixteen lanes; a loop over blocks does the addressing. Addresses are ints. A
block's fp32 values are read and written where they lie. Where they are of 16 bits, or end inside sixteen lanes, they
pass through scratch memory for one block, which stays in the first cache.
"""

from __future__ import annotations

import numpy as np
import torch

from onebit.kernels.cpu.compile import routine, tile
from onebit.kernels.cpu.lanes import WIDTH, not_zero, ones, splat, where
from onebit.kernels.cpu.memory import (
    bits_at,
    copy,
    fill,
    float_at,
    int_at,
    load,
    load_bf16,
    load_fp16,
    long_at,
    set_bits,
    set_int,
    store,
    store_bf16,
    store_fp16,
    stream,
)
from onebit.kernels.data import wire
from onebit.kernels.data.hyper import COLUMNS, Hyper
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages

FP32, BF16, FP16 = 0, 1, 2
TYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
ALL = (1 << WIDTH) - 1  # the bits of all lanes
_ROW = 4 * COLUMNS
_MAGIC, _FLAG = wire.MAGIC, 4 * wire.FLAGS_WORD
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)


@tile
def numel_of(rows, p):
    return long_at(rows + 24 * p + 8)


@tile
def locate(block, owner, rows, size):
    """The parameter of a block, its group, the block's offset in the parameter and its valid count."""
    p = int_at(owner + 4 * block)
    row = rows + 24 * p
    offset = (block - long_at(row)) * size
    valid = min(max(numel_of(rows, p) - offset, 0), size)
    return p, long_at(row + 16), offset, valid


@tile
def first_and_blocks(rows, p, size):
    """The first block of a parameter, and how many it has."""
    row = rows + 24 * p
    return long_at(row), (numel_of(rows, p) + (size - 1)) // size


@tile
def hyper_of(hyper, group):
    """The hyper-parameters of a group."""
    h = hyper + group * _ROW
    return Hyper(
        float_at(h), float_at(h + 4), float_at(h + 8), float_at(h + 12), float_at(h + 16),
        float_at(h + 20), float_at(h + 24), float_at(h + 28), float_at(h + 32), float_at(h + 36),
    )  # fmt: skip


@tile
def first_bits(count):
    return (1 << count) - 1


@tile
def up(valid):
    """Up to a multiple of the lanes."""
    return (valid + (WIDTH - 1)) // WIDTH * WIDTH


@routine
def staged(address, dtype, offset, valid, scratch):
    """Where a block's fp32 values lie: in place, or in `scratch`. Zeros fill up sixteen lanes, and stand for a
    tensor that is None.
    """
    if dtype == FP32 and address != 0 and valid % WIDTH == 0:
        return address + 4 * offset
    base, full = address + (4 if dtype == FP32 else 2) * offset, valid // WIDTH * WIDTH
    last = scratch + 4 * full
    if address == 0:
        fill(scratch, 0, 4 * up(valid))
        return scratch
    if dtype == FP32:
        copy(scratch, base, 4 * full)
    elif dtype == BF16:
        for i in range(0, full, WIDTH):
            store(scratch + 4 * i, load_bf16(base + 2 * i))
    else:
        for i in range(0, full, WIDTH):
            store(scratch + 4 * i, load_fp16(base + 2 * i))
    if valid > full:
        fill(last, 0, 4 * WIDTH)
        if dtype == FP32:
            copy(last, base + 4 * full, 4 * (valid - full))
        else:
            copy(last, base + 2 * full, 2 * (valid - full))
            store(last, load_bf16(last) if dtype == BF16 else load_fp16(last))
    return scratch


@tile
def _narrow(target, values, dtype):
    if dtype == BF16:
        store_bf16(target, values)
    else:
        store_fp16(target, values)


@routine
def put(values, address, dtype, offset, valid, scratch):
    """Write a block's fp32 values to its tensor, where there is one and they are not there already."""
    base, full = address + (4 if dtype == FP32 else 2) * offset, valid // WIDTH * WIDTH
    if address == 0 or values == base:
        return
    if dtype == FP32:
        copy(base, values, 4 * valid)
        return
    for i in range(0, full, WIDTH):
        _narrow(base + 2 * i, load(values + 4 * i), dtype)
    if valid > full:
        last = load(values + 4 * full)
        _narrow(scratch, last, dtype)
        copy(base + 2 * full, scratch, 2 * (valid - full))


@tile
def kept_bits(live, valid, size, scratch):
    """The bits of the elements that count, in `scratch`: the live ones before the valid count. 0 where all count."""
    if live == 0 and valid == size:
        return 0
    if live == 0:
        fill(scratch, 255, size // 8)
    else:
        copy(scratch, live, size // 8)
    full = valid // WIDTH
    if valid < size:
        set_bits(scratch + 2 * full, bits_at(scratch + 2 * full) & first_bits(valid % WIDTH))
        fill(scratch + 2 * full + 2, 0, size // 8 - 2 * full - 2)
    return scratch


@tile
def count_of(kept, valid):
    """How many elements count."""
    if kept == 0:
        return valid
    count = 0
    for i in range(0, up(valid), WIDTH):
        count += ones(bits_at(kept + i // 8))
    return count


@tile
def keep(kept, i, value):
    """0 where an element does not count."""
    return value if kept == 0 else where(bits_at(kept + i // 8), value, ZERO)


@tile
def signed(bits, scale):
    return where(bits, scale, -scale)


@routine
def clear(start, stop):
    """0 between two addresses, a multiple of the lanes apart, written only where something else is."""
    for address in range(start, stop, 4 * WIDTH):
        if not_zero(load(address)) != 0:
            fill(address, 0, 4 * WIDTH)


@tile
def copy_block(target, source, block, size):
    """A block of flat state, where `target` is one: past the caches, since nearly always nobody reads it."""
    if target != 0:
        to, values = target + 4 * block * size, source + 4 * block * size
        if to % (4 * WIDTH) == 0:
            for i in range(0, size, WIDTH):
                stream(to + 4 * i, load(values + 4 * i))
        else:
            copy(to, values, 4 * size)


@tile
def of_message(scales, bits, block, shard_blocks, row_bytes, size, tensor, copies, planes):
    """Where the scales and the bits of a block lie, in the first of the messages it is in, `row_bytes` apart. An
    element has as many bits as there are planes."""
    row, j = block // shard_blocks * copies, block % shard_blocks
    scale = scales + row * row_bytes + (0 if tensor != 0 else 4 * planes * j)
    return scale, bits + row * row_bytes + j * (planes * size // 8)


@tile
def one_of_two(bits, scale, size, i):
    """Sixteen elements of 2 bits: a sign, and which of the block's two scales it has."""
    small, large, chosen = float_at(scale), float_at(scale + 4), bits_at(bits + (size + i) // 8)
    return where(bits_at(bits + i // 8), where(chosen, large, small), where(chosen, -large, -small))


@tile
def mean_of_two(bits, scale, row_bytes, i):
    """Sixteen elements that are in two messages."""
    first = signed(bits_at(bits + i // 8), float_at(scale))
    return (first + signed(bits_at(bits + row_bytes + i // 8), float_at(scale + row_bytes))) * HALF


@tile
def mean_of_copies(bits, scale, copies, row_bytes, i):
    """Sixteen elements that are in several messages: the mean of those, in the order of their ranks."""
    summed = splat(ZERO)
    for k in range(copies):
        start = k * row_bytes
        summed = summed + signed(bits_at(bits + start + i // 8), float_at(scale + start))
    return summed * np.float32(1 / copies)


@tile
def write(target, values, past_caches):
    if past_caches != 0:
        stream(target, values)
    else:
        store(target, values)


@routine
def unpack(scale, bits, size, copies, planes, row_bytes, n, target, past_caches):
    """What the first n elements of a block stand for."""
    if planes == 2:
        for i in range(0, n, WIDTH):
            write(target + 4 * i, one_of_two(bits, scale, size, i), past_caches)
    elif copies == 1:
        value = float_at(scale)
        for i in range(0, n, WIDTH):
            write(target + 4 * i, signed(bits_at(bits + i // 8), value), past_caches)
    elif copies == 2:
        for i in range(0, n, WIDTH):
            write(target + 4 * i, mean_of_two(bits, scale, row_bytes, i), past_caches)
    else:
        for i in range(0, n, WIDTH):
            write(target + 4 * i, mean_of_copies(bits, scale, copies, row_bytes, i), past_caches)


@tile
def flag_of(header, row, row_bytes):
    return int_at(header + row * row_bytes + _FLAG)


@routine
def any_flag(header, rows, row_bytes):
    for row in range(rows):
        if flag_of(header, row, row_bytes) != 0:
            return 1
    return 0


@routine
def write_header(header, flag, fingerprint, blocks, planes):
    set_int(header, _MAGIC + planes - 1)
    set_int(header + _FLAG, flag)
    set_int(header + 8, fingerprint)
    set_int(header + 12, blocks)


@tile
def mean_scale(total, count, l2):
    """||c||_1 / count, or the root mean square; 0 for an empty block."""
    scale = np.float32(total) / np.float32(max(count, 1))
    return np.sqrt(scale) if l2 != 0 else scale


@tile
def left_out(e, last):
    """e, which with a tensor scale is computed from the c of the last step. `last` is that scale, else 0."""
    return e - signed(e >= ZERO, last)


@tile
def first_moment(g, m, h):
    """beta1 m + (1 - beta1) g"""
    return h.beta1 * m + h.one_minus_beta1 * g


@tile
def moments(g, m, v, h):
    """m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2"""
    return first_moment(g, m, h), h.beta2 * v + h.one_minus_beta2 * (g * g)


def over(span: Span) -> tuple[int, int, int, int]:
    """The arguments of every loop over the blocks of a span: owner, rows, first_block, size."""
    table = span.layout.table(torch.device("cpu"))
    return table.owner.data_ptr(), table.parameters.data_ptr(), span.first, span.layout.block_size


def at(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def table(pointers: Pointers) -> tuple[int, int]:
    """Where the addresses of tensors lie, and their type."""
    return pointers.addresses.data_ptr(), TYPES[pointers.dtype]


def momentum_at(momentum: torch.Tensor | Messages | None) -> tuple[int, ...]:
    """Where momentum lies, if it is dense, and its scales, bits and how they are packed, if it is kept as messages."""
    if isinstance(momentum, Messages):
        return (0, *parts(momentum)[1:], *packing(momentum))
    return at(momentum), 0, 0, 0, 0, 1, 1


def packing(messages: Messages) -> tuple[int, int, int, int]:
    """Bytes from message to message, whether each has one scale, how many have a block, and the bits of an element."""
    form = messages.format
    return form.nbytes, int(form.scale == "tensor"), messages.copies, form.bits


def parts(messages: Messages) -> tuple[int, int, int]:
    """Where the headers, the scales and the bits of messages begin."""
    start, form = messages.buffer.data_ptr(), messages.format
    return start, start + form.scales_offset, start + form.bits_offset

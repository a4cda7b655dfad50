"""One block at a time: where its values lie, and what is done with them in every pass.

The maths of a pass is a tile function on sixteen lanes; a loop over blocks does the addressing. Addresses are ints. A
block's fp32 values are read and written where they lie. Where they are of 16 bits, or end inside sixteen lanes, they
pass through scratch memory for one block, which stays in the first cache.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import numpy as np
import torch

from onebit.kernels.cpu.compile import routine, tile
from onebit.kernels.cpu.lanes import WIDTH, ZERO, not_zero, ones, splat, where
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
from onebit.kernels.data.layout import WORD, Block

FP32, BF16, FP16 = 0, 1, 2
TYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
ALL = (1 << WIDTH) - 1  # the bits of all lanes
_BLOCK, _PARAMETER, _HYPER = 4 * len(Block._fields), 24, 4 * COLUMNS  # bytes of a row of each table
MAGIC, _FLAG = wire.MAGIC, 4 * wire.FLAGS_WORD
HEADER, ALIGN = 4 * wire.HEADER_WORDS, wire.ALIGN
HALF = np.float32(0.5)
L2, UNBIASED = (wire.NORMS[norm] for norm in ("l2", "unbiased"))


class Run(NamedTuple):
    """Blocks [first, stop) of a span, and memory for them alone at `scratch`; the rest is of the whole span."""

    first: int
    stop: int
    scratch: int
    block_table: int
    parameter_table: int
    first_blocks: int
    first_block: int
    block_size: int
    blocks: int
    parameters: int


# The records of a pass as ints: addresses, 0 for None. Where a tensor is in place of messages `address` is its own, and
# `senders` is 0.
Parameters = namedtuple("Parameters", "param param_dtype master")
Gradients = namedtuple("Gradients", "grad grad_dtype hyper flags")
Pointers = namedtuple("Pointers", "address dtype")
Floors = namedtuple("Floors", "least_root root_at_zero")
Residual = namedtuple("Residual", "value before scale partial counted")
Messages = namedtuple("Messages", "address bytes rows senders tensor")
Written = namedtuple("Written", "address bytes rows senders tensor norm fingerprint shard_blocks")  # messages


class Located(NamedTuple):
    """The place of a block within its span, shard and parameter, in elements."""

    parameter: int
    group: int
    offset: int  # in the parameter
    valid: int  # how many elements are the parameter's
    length: int
    start: int  # in the span
    shard: int  # of the span, from 0
    block_in_shard: int
    of_shard: int  # how many blocks the shard has
    in_shard: int


class Found(NamedTuple):
    """The addresses of a block's parts in a message, the first sender's if there are several."""

    header: int
    scale: int
    bits: int


@tile
def numel_of(run, p):
    return long_at(run.parameter_table + _PARAMETER * p + 8)


@tile
def blocks_of(run, p):
    """The first block of a parameter, and the end of the last."""
    return long_at(run.first_blocks + 8 * p), long_at(run.first_blocks + 8 * p + 8)


@tile
def room(run, index):
    """Scratch memory for a block of fp32; after those that a loop has asked for, for its bits or sixteen floats."""
    return run.scratch + 4 * index * run.block_size


@tile
def _block_at(row):
    """A row of the table of blocks."""
    return Block(
        int_at(row), int_at(row + 4), int_at(row + 8), int_at(row + 12),
        int_at(row + 16), int_at(row + 20), int_at(row + 24), int_at(row + 28),
    )  # fmt: skip


@tile
def locate(run, block):
    """A block of the span."""
    row = run.block_table + _BLOCK * run.first_block
    first, its = _block_at(row), _block_at(row + _BLOCK * block)
    parameter, length = run.parameter_table + _PARAMETER * its.owner, WORD * its.words
    offset = WORD * its.start - long_at(parameter)
    valid = min(max(numel_of(run, its.owner) - offset, 0), length)
    return Located(
        its.owner, long_at(parameter + 16), offset, valid, length, WORD * (its.start - first.start),
        its.shard - first.shard, its.block_in_shard, its.of_shard, WORD * its.word,
    )  # fmt: skip


@tile
def hyper_of(hyper, its):
    """The hyper-parameters of a block."""
    h = hyper + its.group * _HYPER
    return Hyper(
        float_at(h), float_at(h + 4), float_at(h + 8), float_at(h + 12), float_at(h + 16),
        float_at(h + 20), float_at(h + 24), float_at(h + 28), float_at(h + 32), float_at(h + 36),
    )  # fmt: skip


@tile
def first_bits(count):
    return (1 << count) - 1


@tile
def counting(i, valid):
    """The bits of the elements that count, of sixteen from the i-th on."""
    return ALL if i + WIDTH <= valid else first_bits(valid - i)


@tile
def up(valid):
    """Round up to a multiple of the lanes."""
    return (valid + (WIDTH - 1)) // WIDTH * WIDTH


@routine
def staged(address, dtype, offset, valid, scratch):
    """Return the address of a block's fp32 values: in place, or in `scratch`. Zeros fill up sixteen lanes, and stand
    for a tensor that is None."""
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
def gradient_at(g, its, scratch):
    """Return the address of a block of a gradient in fp32."""
    return staged(long_at(g.grad + 8 * its.parameter), g.grad_dtype, its.offset, its.valid, scratch)


@tile
def parameter_at(x, its, scratch):
    """Return the address of a block of a parameter in fp32: in the master copy if there is one."""
    if x.master != 0:
        return x.master + 4 * its.start
    return staged(long_at(x.param + 8 * its.parameter), x.param_dtype, its.offset, its.valid, scratch)


@tile
def _narrow(target, values, dtype):
    if dtype == BF16:
        store_bf16(target, values)
    else:
        store_fp16(target, values)


@routine
def put(values, address, dtype, offset, valid, scratch):
    """Write a block's fp32 values to its tensor, where they are not there already."""
    base, full = address + (4 if dtype == FP32 else 2) * offset, valid // WIDTH * WIDTH
    if values == base:
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
def put_parameter(values, x, its, scratch):
    put(values, long_at(x.param + 8 * its.parameter), x.param_dtype, its.offset, its.valid, scratch)


@tile
def kept_bits(live, its, scratch):
    """The bits of the elements that count, in `scratch`: the live ones before the valid count. 0 where all count."""
    valid, length = its.valid, its.length
    if live == 0 and valid == length:
        return 0
    if live == 0:
        fill(scratch, 255, length // 8)
    else:
        copy(scratch, live, length // 8)
    full = valid // WIDTH
    if valid < length:
        set_bits(scratch + 2 * full, bits_at(scratch + 2 * full) & first_bits(valid % WIDTH))
        fill(scratch + 2 * full + 2, 0, length // 8 - 2 * full - 2)
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
def part(base, offset):
    """An address in memory that there may be none of: 0 then."""
    return 0 if base == 0 else base + offset


@tile
def value_of(values, i, otherwise):
    """One of some fp32, or what stands for it where there are none."""
    return otherwise if values == 0 else float_at(values + 4 * i)


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
def copy_block(target, source, its, itemsize):
    """A block of flat state, where `target` is one: past the caches, since nearly always nobody reads it."""
    if target != 0:
        nbytes = itemsize * its.length
        to, values = target + itemsize * its.start, source + itemsize * its.start
        if to % (4 * WIDTH) == 0:
            for i in range(0, nbytes, 4 * WIDTH):
                stream(to + i, load(values + i))
        else:
            copy(to, values, nbytes)


@tile
def find(messages, its):
    """A block in the messages of a span."""
    header, index, count = messages.address + its.shard * messages.senders * messages.bytes, 0, 1
    if messages.tensor == 0:
        index, count = its.block_in_shard, its.of_shard
    scales = header + HEADER
    return Found(header, scales + 4 * index, scales + (4 * count + (ALIGN - 1)) // ALIGN * ALIGN + its.in_shard // 8)


@tile
def mean_of_two(found, row_bytes, i):
    """Sixteen elements that are in two messages."""
    first = signed(bits_at(found.bits + i // 8), float_at(found.scale))
    return (first + signed(bits_at(found.bits + row_bytes + i // 8), float_at(found.scale + row_bytes))) * HALF


@tile
def sum_of(found, count, row_bytes, i):
    """Sixteen elements that are in several messages, added up in the order of their ranks."""
    summed = splat(ZERO)
    for k in range(count):
        start = k * row_bytes
        summed = summed + signed(bits_at(found.bits + start + i // 8), float_at(found.scale + start))
    return summed


@tile
def write(target, values, past_caches):
    if past_caches != 0:
        stream(target, values)
    else:
        store(target, values)


@routine
def unpack(found, messages, n, target, past_caches):
    """What the first n elements of a block stand for: the mean of its messages."""
    senders, row_bytes = messages.senders, messages.bytes
    if senders == 1:
        value = float_at(found.scale)
        for i in range(0, n, WIDTH):
            write(target + 4 * i, signed(bits_at(found.bits + i // 8), value), past_caches)
    elif senders == 2:
        for i in range(0, n, WIDTH):
            write(target + 4 * i, mean_of_two(found, row_bytes, i), past_caches)
    else:
        for i in range(0, n, WIDTH):
            write(target + 4 * i, sum_of(found, senders, row_bytes, i) * np.float32(1 / senders), past_caches)


@routine
def any_flag(header, rows, row_bytes):
    for row in range(rows):
        if int_at(header + row * row_bytes + _FLAG) != 0:
            return 1
    return 0


@tile
def flagged(found, messages):
    """Return whether the message of any sender of a block carries a flag."""
    return any_flag(found.header, messages.senders, messages.bytes) != 0


@routine
def write_header(header, magic, flag, messages):
    set_int(header, magic)
    set_int(header + _FLAG, flag)
    set_int(header + 8, messages.fingerprint)
    set_int(header + 12, messages.shard_blocks)


@tile
def mean_scale(total, count, norm):
    """||c||_1 / count, or the root mean square; 0 for an empty block."""
    scale = np.float32(total) / np.float32(max(count, 1))
    return np.sqrt(scale) if norm == L2 else scale


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


@tile
def new_moments(i, counts, g_at, m_at, v_at, h):
    """Those of sixteen elements; elements that do not count keep theirs."""
    g, old_m, old_v = load(g_at + 4 * i), load(m_at + 4 * i), load(v_at + 4 * i)
    m, v = moments(g * h.grad_scale, old_m, old_v, h)
    store(m_at + 4 * i, where(counts, m, old_m))
    store(v_at + 4 * i, where(counts, v, old_v))
    return m, v

"""Functions on one block's values, shared by the Triton kernels: the maths here, the addressing there.

A tile holds one block: TILE is block_size rounded up to a power of two. Each thread reads and writes 4 elements at a
time. Flat state is aligned and holds whole blocks, so its tiles are loaded before anything is known of the block's
parameter. Parameters and gradients are accessed so where the block is whole and the address 16-byte aligned, else
element by element with a mask. A kernel loads all its tiles before it decodes any bits or adds anything up.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct

import triton
import triton.language as tl

from onebit.kernels.data import wire
from onebit.kernels.data.hyper import COLUMNS, LARGEST, Hyper

_column = Hyper._fields.index
H_COLUMNS = tl.constexpr(COLUMNS)
H_LR = tl.constexpr(_column("lr"))
H_BETA1 = tl.constexpr(_column("beta1"))
H_ONE_MINUS_BETA1 = tl.constexpr(_column("one_minus_beta1"))
H_BETA2 = tl.constexpr(_column("beta2"))
H_ONE_MINUS_BETA2 = tl.constexpr(_column("one_minus_beta2"))
H_EPS = tl.constexpr(_column("eps"))
H_WEIGHT_DECAY = tl.constexpr(_column("weight_decay"))
H_BIAS1 = tl.constexpr(_column("bias1"))
H_BIAS2 = tl.constexpr(_column("bias2"))
H_GRAD_SCALE = tl.constexpr(_column("grad_scale"))
LARGEST_BITS = tl.constexpr(int.from_bytes(struct.pack("<f", LARGEST), "little"))
FLAGS_WORD = tl.constexpr(wire.FLAGS_WORD)
MAGIC = tl.constexpr(wire.MAGIC)
ABOVE = tl.constexpr(wire.ABOVE)
ACCESS = tl.constexpr(4)  # elements at a time, of 4 bytes or 2: tiles of any dtype lie alike over the threads

# A kernel that hosts launch. What changes with a model's size is not compiled in: one binary serves every layout.
entry = triton.jit(do_not_specialize=["first_block", "blocks", "shard_blocks", "fingerprint", "ranks", "words"])


@triton.jit
def locate(block, owner, parameter_table, BLOCK: tl.constexpr):
    """The parameter of a block, its group, the block's offset in the parameter and its valid count."""
    p = tl.load(owner + block)
    first = tl.load(parameter_table + 3 * p)
    numel = tl.load(parameter_table + 3 * p + 1)
    group = tl.load(parameter_table + 3 * p + 2)
    offset = (block - first) * BLOCK
    valid = tl.minimum(tl.maximum(numel - offset, 0), BLOCK).to(tl.int32)
    return p, group, offset, valid


@triton.jit
def pointer(addresses, p, offset, valid, TYPE: tl.constexpr, TILE: tl.constexpr):
    """The address of a parameter's block, how many elements may be accessed there, and whether in wide accesses."""
    address = tl.load(addresses + p)
    base = address.to(tl.pointer_type(TYPE)) + offset
    accessible = tl.where(address == 0, 0, valid)
    wide = (address % 16 == 0) & (accessible == TILE)
    return base, accessible, wide


@triton.jit
def _wide(base, TILE: tl.constexpr):
    return tl.max_contiguous(tl.multiple_of(base + tl.arange(0, TILE), 16), ACCESS)


@triton.jit
def load_tile(base, valid, wide, TILE: tl.constexpr):
    """A block of a parameter or gradient, 0 past the valid elements."""
    i = tl.arange(0, TILE)
    if wide:
        x = tl.load(_wide(base, TILE))
    else:
        x = tl.load(base + i, mask=i < valid, other=0)
    return x.to(tl.float32)


@triton.jit
def store_tile(base, x, valid, wide, TILE: tl.constexpr):
    """Store the valid elements."""
    i = tl.arange(0, TILE)
    x = x.to(base.dtype.element_ty)
    if wide:
        tl.store(_wide(base, TILE), x)
    else:
        tl.store(base + i, x, mask=i < valid)


@triton.jit
def load_flat(base, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A whole block of flat state. Past the valid elements it may hold anything."""
    i = tl.arange(0, TILE)
    if BLOCK == TILE:
        x = tl.load(_wide(base, TILE))
    else:
        x = tl.load(base + i, mask=i < BLOCK, other=0)
    return x


@triton.jit
def store_flat(base, x, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Store a whole block of flat state, past the valid elements too."""
    i = tl.arange(0, TILE)
    if BLOCK == TILE:
        tl.store(_wide(base, TILE), x)
    else:
        tl.store(base + i, x, mask=i < BLOCK)


@triton.jit
def valid_only(x, valid, TILE: tl.constexpr):
    """x, and 0 past the valid elements."""
    if valid < TILE:
        x = tl.where(tl.arange(0, TILE) < valid, x, tl.zeros_like(x))
    return x


@triton.jit
def signed(positive, scale):
    return tl.where(positive, scale, -scale)


@triton.jit
def pack(bit, out, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Store a tile of bits, each 0 or 1 as int32: 8 a byte, the first in the lowest place."""
    eight = tl.reshape(bit, (TILE // 8, 8)) << tl.arange(0, 8)[None, :]
    byte = tl.sum(eight, axis=1).to(tl.uint8)
    i = tl.arange(0, TILE // 8)
    tl.store(out + i, byte, mask=i < BLOCK // 8)


@triton.jit
def load_bits(bits, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile of packed bits, False past the block. Every element's thread loads the byte that its bit is in."""
    i = tl.arange(0, TILE)
    if BLOCK == TILE:
        byte = tl.load(bits + i // 8)
    else:
        byte = tl.load(bits + i // 8, mask=i < BLOCK, other=0)
    half = byte.to(tl.int32) >> (i & 4)  # a thread has 4 elements in a row: from here on their places are constants
    return (half >> (i % 4)) & 1 != 0


@triton.jit
def unpack(bits, scale, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile of +-scale from packed bits."""
    return signed(load_bits(bits, BLOCK, TILE), scale)


@triton.jit
def sum_of_messages(scales, bits, stride, count, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A block summed over `count` messages, in their order. Two are read at a time; a second that is missing adds 0."""
    total = tl.zeros((TILE,), tl.float32)
    for i in range(0, count, 2):
        more = i + 1 < count
        first = tl.load(scales)
        second = tl.load(scales + stride // 4, mask=more, other=0.0)
        first_bits = load_bits(bits, BLOCK, TILE)
        second_bits = load_bits(bits + tl.where(more, stride, 0), BLOCK, TILE)
        total += signed(first_bits, first)
        total += signed(second_bits, second)
        scales += 2 * (stride // 4)
        bits += 2 * stride
    return total


@triton.jit
def unpack_two(bits, scales, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile from 2 bits an element."""
    large = load_bits(bits + BLOCK // 8, BLOCK, TILE)
    return unpack(bits, tl.where(large, tl.load(scales + 1), tl.load(scales)), BLOCK, TILE)


@triton.jit
def find_block(
    scales, bits, block, shard_blocks, row_bytes,
    BLOCK: tl.constexpr, TENSOR: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Where the scale and the bits of a block are in messages that lie `row_bytes` apart; of its first copy."""
    row = (block // shard_blocks).to(tl.int64) * COPIES
    j = block % shard_blocks
    scales += row * (row_bytes // 4) + (0 if TENSOR else j * BITS)
    bits += row * row_bytes + j.to(tl.int64) * (BITS * BLOCK // 8)
    return scales, bits


@triton.jit
def decode_block(
    scales, bits, block, shard_blocks, row_bytes,
    BLOCK: tl.constexpr, TILE: tl.constexpr, TENSOR: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Block `block` of messages, or its mean over COPIES of them."""
    scales, bits = find_block(scales, bits, block, shard_blocks, row_bytes, BLOCK, TENSOR, COPIES, BITS)
    if BITS == 2:
        m = unpack_two(bits, scales, BLOCK, TILE)
    elif COPIES == 1:
        m = unpack(bits, tl.load(scales), BLOCK, TILE)
    else:
        m = sum_of_messages(scales, bits, row_bytes.to(tl.int64), COPIES, BLOCK, TILE) * (1 / COPIES)
    return m


@triton.jit
def load_momentum(
    flat, scales, bits, block, shard_blocks, row_bytes,
    BLOCK: tl.constexpr, TILE: tl.constexpr, TENSOR: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """m, kept as the messages that brought it, or still dense."""
    if bits is not None:
        m = decode_block(scales, bits, block, shard_blocks, row_bytes, BLOCK, TILE, TENSOR, COPIES, BITS)
    else:
        m = load_flat(flat + block.to(tl.int64) * BLOCK, BLOCK, TILE)
    return m


@triton.jit
def any_flag(header, first, count, row_bytes):
    """Whether one of `count` messages from row `first` on carries a flag: 32 headers are read at a time."""
    flagged = tl.zeros((32,), tl.int32)
    for start in range(0, count, 32):
        i = start + tl.arange(0, 32)
        flags = header + (first + i) * (row_bytes.to(tl.int64) // 4) + FLAGS_WORD
        flagged |= tl.load(flags, mask=i < count, other=0)
    return tl.max((flagged != 0).to(tl.int32), axis=0)


@triton.jit
def flag_of_block(header, block, shard_blocks, row_bytes, COPIES: tl.constexpr):
    """Not 0 where a message that the block is in carries a flag."""
    first = block // shard_blocks * COPIES
    if COPIES == 1:
        flag = tl.load(header + first * (row_bytes.to(tl.int64) // 4) + FLAGS_WORD)
    else:
        flag = any_flag(header, first, COPIES, row_bytes)
    return flag


@triton.jit
def write_header(header, flag, fingerprint, shard_blocks, BITS: tl.constexpr):
    tl.store(header, MAGIC + (BITS - 1))
    tl.store(header + FLAGS_WORD, flag)
    tl.store(header + 2, fingerprint)
    tl.store(header + 3, shard_blocks)


@triton.jit
def mean_scale(total, count, L2: tl.constexpr):
    """||c||_1 / count, or the root mean square; 0 for an empty block."""
    scale = tl.div_rn(total, tl.maximum(count, 1).to(tl.float32))
    if L2:
        scale = tl.sqrt_rn(scale)
    return scale


@triton.jit
def residual(kept, scale, TENSOR: tl.constexpr):
    """e, from what was kept: with a tensor scale that is the c of the last step."""
    e = kept
    if TENSOR:
        e = kept - signed(kept >= 0, tl.load(scale))
    return e


@triton.jit
def counted_only(x, live, valid, TILE: tl.constexpr):
    """x, and 0 for an element that does not count: past the valid ones, or with no bit in `live`."""
    if live is not None:
        x = tl.where(live, x, tl.zeros_like(x))
    return valid_only(x, valid, TILE)


@triton.jit
def encode(
    c, live, value, scale, partial, counted, bits, valid,
    BLOCK: tl.constexpr, TILE: tl.constexpr, TENSOR: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    """Store a block's bits, its scale and what they leave out. With a tensor scale: its bits, sum and count, and c."""
    c = counted_only(c, live, valid, TILE)
    positive = c >= 0
    total = tl.sum(c * c if L2 else tl.abs(c), axis=0)
    count = valid
    if live is not None:
        count = tl.sum(valid_only(live.to(tl.int32), valid, TILE), axis=0)
    if TENSOR:
        tl.store(partial, total)
        tl.store(counted, count)
        left = c
    else:
        s = mean_scale(total, count, L2)
        tl.store(scale, s)
        left = counted_only(c - signed(positive, s), live, valid, TILE)
    store_flat(value, left, BLOCK, TILE)
    pack(counted_only(positive.to(tl.int32), live, valid, TILE), bits, BLOCK, TILE)


@triton.jit
def encode_two_bits(c, live, value, scales, bits, valid, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Store a block's signs, which of its elements are large, the mean sizes of both kinds, and what they leave out."""
    c = counted_only(c, live, valid, TILE)
    positive, size = c >= 0, tl.abs(c)
    count = valid
    if live is not None:
        count = tl.sum(valid_only(live.to(tl.int32), valid, TILE), axis=0)
    large = size > mean_scale(tl.sum(size, axis=0), count, False) * ABOVE
    larger = tl.sum(large.to(tl.int32), axis=0)
    small_size = mean_scale(tl.sum(tl.where(large, 0.0, size), axis=0), count - larger, False)
    large_size = mean_scale(tl.sum(tl.where(large, size, 0.0), axis=0), larger, False)
    tl.store(scales, small_size)
    tl.store(scales + 1, large_size)
    left = c - signed(positive, tl.where(large, large_size, small_size))
    store_flat(value, counted_only(left, live, valid, TILE), BLOCK, TILE)
    pack(counted_only(positive.to(tl.int32), live, valid, TILE), bits, BLOCK, TILE)
    pack(large.to(tl.int32), bits + BLOCK // 8, BLOCK, TILE)


@triton.jit
def finished(counter, total):
    """Whether this is the last of `total` blocks to call. The last one sees every other's stores, and resets the
    counter to 0. It adds up their results in the order of the blocks, not of arrival: sums are deterministic.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == total - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def finish_scale(scale, residual_scale, partial, counted, blocks, L2: tl.constexpr):
    """The scale of one message from its blocks' sums and counts."""
    total = tl.zeros((1024,), tl.float32)
    count = tl.zeros((1024,), tl.int64)
    for start in range(0, blocks, 1024):
        i = start + tl.arange(0, 1024)
        count += tl.load(counted + i, mask=i < blocks, other=0, cache_modifier=".cg")
        total += tl.load(partial + i, mask=i < blocks, other=0.0, cache_modifier=".cg")
    s = mean_scale(tl.sum(total, axis=0), tl.sum(count, axis=0), L2)
    tl.store(scale, s)
    tl.store(residual_scale, s)


@triton.jit
def sum_partials(partial, blocks):
    """The sum of one value a block."""
    total = tl.zeros((1024,), tl.float32)
    for start in range(0, blocks, 1024):
        i = start + tl.arange(0, 1024)
        total += tl.load(partial + i, mask=i < blocks, other=0.0, cache_modifier=".cg")
    return tl.sum(total, axis=0)


@triton.jit
def max_partials(partial, blocks):
    """The largest of one value a block, none below 0."""
    largest = tl.zeros((1024,), tl.float32)
    for start in range(0, blocks, 1024):
        i = start + tl.arange(0, 1024)
        largest = tl.maximum(largest, tl.load(partial + i, mask=i < blocks, other=0.0, cache_modifier=".cg"))
    return tl.max(largest, axis=0)


@triton.jit
def group_row(hyper, group):
    return hyper + group * H_COLUMNS


@triton.jit
def first_moment(g, m, h):
    """beta1 m + (1 - beta1) g"""
    return tl.load(h + H_BETA1) * m + tl.load(h + H_ONE_MINUS_BETA1) * g


@triton.jit
def moments(g, m, v, h):
    """m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2"""
    m = first_moment(g, m, h)
    v = tl.load(h + H_BETA2) * v + tl.load(h + H_ONE_MINUS_BETA2) * (g * g)
    return m, v


@triton.jit
def direction(m, v, x, h):
    """mhat / (sqrt(vhat) + eps) + wd x"""
    denominator = tl.sqrt_rn(v) * tl.load(h + H_BIAS2) + tl.load(h + H_EPS)
    return tl.div_rn(m * tl.load(h + H_BIAS1), denominator) + tl.load(h + H_WEIGHT_DECAY) * x


@triton.jit
def load_parameter(base, master, valid, wide, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """fp32 x: the master copy where there is one."""
    if master is not None:
        x = load_flat(master, BLOCK, TILE)
    else:
        x = load_tile(base, valid, wide, TILE)
    return x


@triton.jit
def store_parameter(base, master, x, valid, accessible, wide, TILE: tl.constexpr):
    if master is not None:
        store_tile(master, x, valid, wide, TILE)
    store_tile(base, x, accessible, wide, TILE)

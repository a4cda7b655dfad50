"""Functions on one block's values, shared by the Triton kernels: the maths here, the addressing there.

A tile holds one block: TILE is block_size rounded up to a power of two. FULL tiles (every element valid, every
address 16-byte aligned) move 16 bytes a thread and access; the others are masked.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from onebit.kernels.data import wire
from onebit.kernels.data.hyper import COLUMNS, Hyper
from onebit.kernels.data.hyper import LARGEST as _LARGEST

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
LARGEST = tl.constexpr(_LARGEST)
FLAGS_WORD = tl.constexpr(wire.FLAGS_WORD)
MAGIC = tl.constexpr(wire.MAGIC)
ABOVE = tl.constexpr(wire.ABOVE)

# A kernel that hosts launch. What changes with a model's size is not compiled in: one binary serves every layout.
entry = triton.jit(do_not_specialize=["first_block", "blocks", "shard_blocks", "fingerprint", "ranks"])


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
    """The address of a parameter's block, how many elements may be accessed there, and whether they are aligned."""
    address = tl.load(addresses + p)
    base = address.to(tl.pointer_type(TYPE)) + offset
    readable = tl.where(address == 0, 0, valid)
    aligned = (address % 16 == 0) & (readable == TILE)
    return base, readable, aligned


@triton.jit
def load_tile(base, valid, TILE: tl.constexpr, FULL: tl.constexpr):
    i = tl.arange(0, TILE)
    if FULL:
        x = tl.load(tl.max_contiguous(tl.multiple_of(base + i, 16), 16))
    else:
        x = tl.load(base + i, mask=i < valid, other=0)
    return x.to(tl.float32)


@triton.jit
def store_tile(base, x, valid, TILE: tl.constexpr, FULL: tl.constexpr):
    i = tl.arange(0, TILE)
    x = x.to(base.dtype.element_ty)
    if FULL:
        tl.store(tl.max_contiguous(tl.multiple_of(base + i, 16), 16), x)
    else:
        tl.store(base + i, x, mask=i < valid)


@triton.jit
def signed(positive, scale):
    return tl.where(positive, scale, -scale)


@triton.jit
def pack(bit, out, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Store a tile of bits, 8 a byte, the first in the lowest place."""
    eight = tl.reshape(bit.to(tl.int32), (TILE // 8, 8)) << tl.arange(0, 8)[None, :]
    byte = tl.sum(eight, axis=1).to(tl.uint8)
    i = tl.arange(0, TILE // 8)
    tl.store(out + i, byte, mask=i < BLOCK // 8)


@triton.jit
def load_bits(bits, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile of packed bits, False past the block."""
    i = tl.arange(0, TILE // 8)
    byte = tl.load(bits + i, mask=i < BLOCK // 8, other=0).to(tl.int32)
    bit = (byte[:, None] >> tl.arange(0, 8)[None, :]) & 1
    return tl.reshape(bit, (TILE,)) != 0


@triton.jit
def unpack(bits, scale, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile of +-scale from packed bits."""
    return signed(load_bits(bits, BLOCK, TILE), scale)


@triton.jit
def unpack_two(bits, scales, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile from 2 bits an element."""
    large = load_bits(bits + BLOCK // 8, BLOCK, TILE)
    return unpack(bits, tl.where(large, tl.load(scales + 1), tl.load(scales)), BLOCK, TILE)


@triton.jit
def decode_block(
    scales, bits, block, shard_blocks, row_bytes,
    BLOCK: tl.constexpr, TILE: tl.constexpr, TENSOR: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Block `block` of messages that lie `row_bytes` apart, or its mean over COPIES of them."""
    row = (block // shard_blocks).to(tl.int64) * COPIES
    j = block % shard_blocks
    scales += row * (row_bytes // 4) + (0 if TENSOR else j * BITS)
    bits += row * row_bytes + j.to(tl.int64) * (BITS * BLOCK // 8)
    if BITS == 2:
        m = unpack_two(bits, scales, BLOCK, TILE)
    elif COPIES == 1:
        m = unpack(bits, tl.load(scales), BLOCK, TILE)
    else:
        m = tl.zeros((TILE,), tl.float32)
        stride = row_bytes.to(tl.int64)
        for i in range(COPIES):
            m += unpack(bits + i * stride, tl.load(scales + i * (stride // 4)), BLOCK, TILE)
        m = m * (1 / COPIES)
    return m


@triton.jit
def load_momentum(
    flat, scales, bits, block, shard_blocks, row_bytes, valid,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, TENSOR: tl.constexpr, COPIES: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """m, kept as the messages that brought it, or still dense."""
    if bits is not None:
        m = decode_block(scales, bits, block, shard_blocks, row_bytes, BLOCK, TILE, TENSOR, COPIES, BITS)
    else:
        m = load_tile(flat + block.to(tl.int64) * BLOCK, valid, TILE, FULL)
    return m


@triton.jit
def flag_of(header, row, row_bytes):
    return tl.load(header + row * (row_bytes.to(tl.int64) // 4) + FLAGS_WORD)


@triton.jit
def flag_of_block(header, block, shard_blocks, row_bytes, COPIES: tl.constexpr):
    """Not 0 where a message that the block is in carries a flag."""
    first = block // shard_blocks * COPIES
    flag = 0
    for i in range(COPIES):
        flag |= flag_of(header, first + i, row_bytes)
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
def load_residual(value, scale, valid, TILE: tl.constexpr, FULL: tl.constexpr, TENSOR: tl.constexpr):
    """e, which with a tensor scale is computed from the c of the last step."""
    e = load_tile(value, valid, TILE, FULL)
    if TENSOR:
        e = e - signed(e >= 0, tl.load(scale))
    return e


@triton.jit
def kept_elements(live, valid, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Which elements of a block count, and how many."""
    kept = tl.arange(0, TILE) < valid
    count = valid
    if live is not None:
        kept = kept & load_bits(live, BLOCK, TILE)
        count = tl.sum(kept.to(tl.int32), axis=0)
    return kept, count


@triton.jit
def encode(
    c, live, value, scale, partial, counted, bits, valid,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, TENSOR: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    """Store a block's bits, its scale and what they leave out. With a tensor scale: its bits, sum and count, and c."""
    kept, count = kept_elements(live, valid, BLOCK, TILE)
    if (live is not None) or (not FULL):
        c = tl.where(kept, c, 0.0)
    bit = (c >= 0) & kept
    total = tl.sum(c * c if L2 else tl.abs(c), axis=0)
    if TENSOR:
        tl.store(partial, total)
        tl.store(counted, count)
        left = c
    else:
        s = mean_scale(total, count, L2)
        tl.store(scale, s)
        left = c - signed(bit, s)
    if (live is not None) or (not FULL):
        left = tl.where(kept, left, 0.0)
    store_tile(value, left, BLOCK, TILE, FULL)
    pack(bit, bits, BLOCK, TILE)


@triton.jit
def encode_two_bits(
    c, live, value, scales, bits, valid, BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Store a block's signs, which of its elements are large, the mean sizes of both kinds, and what they leave out."""
    kept, count = kept_elements(live, valid, BLOCK, TILE)
    if (live is not None) or (not FULL):
        c = tl.where(kept, c, 0.0)
    size = tl.abs(c)
    large = size > mean_scale(tl.sum(size, axis=0), count, False) * ABOVE
    larger = tl.sum(large.to(tl.int32), axis=0)
    small_size = mean_scale(tl.sum(tl.where(large, 0.0, size), axis=0), count - larger, False)
    large_size = mean_scale(tl.sum(tl.where(large, size, 0.0), axis=0), larger, False)
    tl.store(scales, small_size)
    tl.store(scales + 1, large_size)
    bit = (c >= 0) & kept
    left = c - signed(bit, tl.where(large, large_size, small_size))
    if (live is not None) or (not FULL):
        left = tl.where(kept, left, 0.0)
    store_tile(value, left, BLOCK, TILE, FULL)
    pack(bit, bits, BLOCK, TILE)
    pack(large, bits + BLOCK // 8, BLOCK, TILE)


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
def moments(g, m, v, h):
    """m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2"""
    m = tl.load(h + H_BETA1) * m + tl.load(h + H_ONE_MINUS_BETA1) * g
    v = tl.load(h + H_BETA2) * v + tl.load(h + H_ONE_MINUS_BETA2) * (g * g)
    return m, v


@triton.jit
def direction(m, v, x, h):
    """mhat / (sqrt(vhat) + eps) + wd x"""
    denominator = tl.sqrt_rn(v) * tl.load(h + H_BIAS2) + tl.load(h + H_EPS)
    return tl.div_rn(m * tl.load(h + H_BIAS1), denominator) + tl.load(h + H_WEIGHT_DECAY) * x


@triton.jit
def load_parameter(base, master, valid, TILE: tl.constexpr, FULL: tl.constexpr):
    """fp32 x: the master copy where there is one."""
    if master is not None:
        x = load_tile(master, valid, TILE, FULL)
    else:
        x = load_tile(base, valid, TILE, FULL)
    return x


@triton.jit
def store_parameter(base, master, x, valid, readable, TILE: tl.constexpr, FULL: tl.constexpr):
    if master is not None:
        store_tile(master, x, valid, TILE, FULL)
    store_tile(base, x, readable, TILE, FULL)

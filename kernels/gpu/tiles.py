"""Functions on one block's values, shared by the Triton kernels: the maths here, the addressing there.

A tile holds one block: TILE is block_size rounded up to a power of two. Each thread reads and writes 4 elements at a
time, or 8 where a kernel has no tiles but of 16 bits. A block of flat state starts at a multiple of 32 elements and is
a multiple of 32 long, so that its tile is accessed so however short it is: nothing past the block is read or written.
Where it lies is in the block's row of the table, which a kernel reads first. Flat tiles are loaded before anything is
known of the block's parameter. Parameters and gradients are accessed so where the block is whole and the address
16-byte aligned, else element by element with a mask. A kernel loads all its tiles before it decodes any bits or adds
anything up. Predicates of elements do not live across sums and divisions: there are too few registers for them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from onebit.kernels.data import layout, wire
from onebit.kernels.data.hyper import COLUMNS, Hyper

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
_field = layout.Block._fields.index
B_COLUMNS = tl.constexpr(len(layout.Block._fields))
B_OWNER = tl.constexpr(_field("owner"))
B_START = tl.constexpr(_field("start"))
B_WORDS = tl.constexpr(_field("words"))
B_SHARD = tl.constexpr(_field("shard"))
B_BLOCK_IN_SHARD = tl.constexpr(_field("block_in_shard"))
B_WORD = tl.constexpr(_field("word"))
B_OF_SHARD = tl.constexpr(_field("of_shard"))
WORD = tl.constexpr(layout.WORD)
FLAGS_WORD = tl.constexpr(wire.FLAGS_WORD)
MAGIC = tl.constexpr(wire.MAGIC)
HEADER_BYTES = tl.constexpr(4 * wire.HEADER_WORDS)
ALIGN = tl.constexpr(wire.ALIGN)
MOST = tl.constexpr(wire.MOST)
L2, UNBIASED = (tl.constexpr(wire.NORMS[norm]) for norm in ("l2", "unbiased"))
NO_PART = tl.constexpr(2.0**100)  # what an element that does not count is divided by: the inverse's square is 0 in fp32
WIDEST = tl.constexpr(128)  # bits of an access
ACCESS = tl.constexpr(4)  # elements at a time, of 4 bytes or 2: tiles of any dtype lie alike over the threads

# A kernel that hosts launch. What changes with a model's size is not compiled in, nor how parts of buffers lie of which
# a block or a parameter has one number: one binary serves every layout, and none is compiled in the middle of a run.
entry = triton.jit(
    do_not_specialize=[
        "first_block", "first_word", "first_shard", "blocks", "out_shard_blocks", "out_fingerprint", "received_rows",
        "replies_rows", "parameters", "pairs",
    ],
    do_not_specialize_on_alignment=[
        "flags", "sums", "counts", "live", "residual_partial", "residual_counted", "residual_counter",
        "residual_scale", "squares", "gamma", "least_root", "root_at_zero", "decay", "factor", "coefficient", "clip",
        "state_coefficient", "state_partial", "state_counter", "values", "weight", "usual", "numels", "shortened",
    ],
)  # fmt: skip


@triton.jit
def find(block_table, block, first_word):
    """A block's row of the table, where the block starts in flat state from word `first_word` on, and its length."""
    row = block_table + block.to(tl.int64) * B_COLUMNS
    start = (tl.load(row + B_START) - first_word).to(tl.int64) * WORD
    length = tl.load(row + B_WORDS) * WORD
    return row, start, length


@triton.jit
def find_in_shard(row, first_shard):
    """Return a block's shard, counted from one on, the block's number in it, the word of the shard that it starts at,
    and how many blocks the shard has."""
    shard = (tl.load(row + B_SHARD) - first_shard).to(tl.int64)
    return shard, tl.load(row + B_BLOCK_IN_SHARD), tl.load(row + B_WORD), tl.load(row + B_OF_SHARD)


@triton.jit
def find_message(row, first_shard, messages, row_bytes, senders):
    """Find a block's message, the first of several, which lie `row_bytes` apart, and the block in it.
    `messages` are those of shards from one on."""
    shard, block_in_shard, word, of_shard = find_in_shard(row, first_shard)
    return messages + shard * senders * row_bytes, row_bytes, block_in_shard, word, of_shard


@triton.jit
def locate(row, length, parameter_table):
    """The parameter of a block, its group, the block's offset in the parameter and its valid count."""
    p = tl.load(row + B_OWNER)
    first = tl.load(parameter_table + 3 * p)
    numel = tl.load(parameter_table + 3 * p + 1)
    group = tl.load(parameter_table + 3 * p + 2)
    offset = tl.load(row + B_START).to(tl.int64) * WORD - first
    valid = tl.minimum(tl.maximum(numel - offset, 0), length).to(tl.int32)
    return p, group, offset, valid


@triton.jit
def locate_with_hyper(row, length, parameter_table, hyper):
    """The parameter of a block, the block's offset in the parameter, its valid count, and its hyper-parameters."""
    p, group, offset, valid = locate(row, length, parameter_table)
    return p, offset, valid, hyper + group * H_COLUMNS


@triton.jit
def pointer(addresses, p, offset, valid, TYPE: tl.constexpr, TILE: tl.constexpr):
    """The address of a parameter's block, how many elements may be accessed there, and whether in wide accesses."""
    address = tl.load(addresses + p)
    base = address.to(tl.pointer_type(TYPE)) + offset
    accessible = tl.where(address == 0, 0, valid)
    wide = (address % 16 == 0) & (accessible == TILE)
    return base, accessible, wide


@triton.jit
def pointers(param, grad, p, offset, valid, PARAM: tl.constexpr, GRAD: tl.constexpr, TILE: tl.constexpr):
    """Those of a parameter and its gradient, and whether both are accessed in wide accesses."""
    p_base, p_valid, p_wide = pointer(param, p, offset, valid, PARAM, TILE)
    g_base, g_valid, g_wide = pointer(grad, p, offset, valid, GRAD, TILE)
    return p_base, p_valid, g_base, g_valid, p_wide & g_wide


@triton.jit
def _wide(base, TILE: tl.constexpr, IN_A_ROW: tl.constexpr = ACCESS):
    return tl.max_contiguous(tl.multiple_of(base + tl.arange(0, TILE), 16), IN_A_ROW)


@triton.jit
def load_tile(base, valid, wide, TILE: tl.constexpr, IN_A_ROW: tl.constexpr = ACCESS):
    """A block of a parameter or gradient, 0 past the valid elements."""
    i = tl.arange(0, TILE)
    if wide:
        x = tl.load(_wide(base, TILE, IN_A_ROW))
    else:
        x = tl.load(base + i, mask=i < valid, other=0)
    return x.to(tl.float32)


@triton.jit
def store_tile(base, x, valid, wide, TILE: tl.constexpr, IN_A_ROW: tl.constexpr = ACCESS):
    """Store the valid elements."""
    i = tl.arange(0, TILE)
    x = x.to(base.dtype.element_ty)
    if wide:
        tl.store(_wide(base, TILE, IN_A_ROW), x)
    else:
        tl.store(base + i, x, mask=i < valid)


@triton.jit
def load_flat(base, length, TILE: tl.constexpr):
    """A block of flat state. Past the valid elements it may hold anything."""
    i = tl.arange(0, TILE)
    inside = tl.minimum(i, length - ACCESS + i % ACCESS)
    return tl.load(tl.max_contiguous(tl.multiple_of(base + inside, 16), ACCESS))


@triton.jit
def store_flat(base, x, length, TILE: tl.constexpr):
    """Store a block of flat state, past the valid elements too."""
    tl.store(_wide(base, TILE), x, mask=tl.arange(0, TILE) < length)


@triton.jit
def valid_only(x, valid, TILE: tl.constexpr):
    """x, and 0 past the valid elements."""
    if valid < TILE:
        x = tl.where(tl.arange(0, TILE) < valid, x, tl.zeros_like(x))
    return x


@triton.jit
def clip_of(clip, parameter):
    """1 where there is none."""
    if clip is not None:
        found = tl.load(clip + parameter)
    else:
        found = 1.0
    return found


@triton.jit
def signed(positive, scale):
    return tl.where(positive, scale, -scale)


@triton.jit
def pack(bit, TILE: tl.constexpr):
    """A tile of bits, 8 a byte, the first in the lowest place: a tile of bytes, as int32."""
    weight = tl.where(bit, 1 << (tl.arange(0, TILE) % 8), 0)
    return tl.sum(tl.reshape(weight, (TILE // 8, 8)), axis=1)


@triton.jit
def unpack(byte, TILE: tl.constexpr):
    """The bits of a tile of bytes."""
    i = tl.arange(0, TILE)
    half = tl.gather(byte, i // 8, 0) >> (i & 4)  # a thread has 4 elements in a row: their places in it are constants
    return (half >> (i % 4)) & 1 != 0


@triton.jit
def store_bytes(out, byte, length, TILE: tl.constexpr):
    i = tl.arange(0, TILE // 8)
    tl.store(out + i, byte.to(tl.uint8), mask=i < length // 8)


@triton.jit
def counting(live, valid, TILE: tl.constexpr):
    """A tile of bytes: the elements that count are valid, and have a bit in `live` if there is one."""
    i = 8 * tl.arange(0, TILE // 8)
    byte = tl.full((TILE // 8,), 255, tl.int32) if live is None else live.to(tl.int32)
    if valid < TILE:
        byte &= (1 << tl.minimum(tl.maximum(valid - i, 0), 8)) - 1
    return byte


@triton.jit
def how_many(byte):
    """How many bits a tile of bytes has."""
    byte -= (byte >> 1) & 0x55
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return tl.sum((byte + (byte >> 4)) & 0x0F, axis=0)


@triton.jit
def load_bytes(bits, length, TILE: tl.constexpr):
    """A tile of packed bits, 8 a byte; past the block they may be anything."""
    i = tl.arange(0, TILE // 8)
    inside = tl.minimum(i, length // 8 - ACCESS + i % ACCESS)
    return tl.load(tl.max_contiguous(tl.multiple_of(bits + inside, ACCESS), ACCESS))


@triton.jit
def load_bits(bits, length, TILE: tl.constexpr):
    """A tile of packed bits; past the block they may be anything. Every element's thread loads the byte that its bit is
    in."""
    i = tl.arange(0, TILE)
    byte = tl.load(bits + tl.minimum(i // 8, length // 8 - 1))
    half = byte.to(tl.int32) >> (i & 4)  # a thread has 4 elements in a row: from here on their places are constants
    return (half >> (i % 4)) & 1 != 0


@triton.jit
def scale_in(message, block_in_shard, TENSOR: tl.constexpr):
    """Return the address of a block's scale in a message."""
    return (message + HEADER_BYTES).to(tl.pointer_type(tl.float32)) + (0 if TENSOR else block_in_shard)


@triton.jit
def bits_in(message, word, of_shard, TENSOR: tl.constexpr):
    """Return the address of a word of bits in a message of so many blocks."""
    scales = 4 if TENSOR else 4 * of_shard
    return message + HEADER_BYTES + (scales + (ALIGN - 1)) // ALIGN * ALIGN + word.to(tl.int64) * 4


@triton.jit
def transposed(x):
    """8 bytes as a square of bits, mirrored: bit j of byte i becomes bit i of byte j."""
    t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AA
    x = x ^ t ^ (t << 7)
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCC
    x = x ^ t ^ (t << 14)
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0
    return x ^ t ^ (t << 28)


@triton.jit
def sum_of_messages(
    message, block_in_shard, word, of_shard, row_bytes, count, length,
    TILE: tl.constexpr, TENSOR: tl.constexpr, IN_TABLE: tl.constexpr = 8,
):  # fmt: skip
    """A block summed over `count` messages, in their order. Of the first 8 a table has 256 sums, one for each choice of
    signs, and an element's 8 bits say which is its own. A message that is missing among the 8 adds 0."""
    i, signs = tl.arange(0, TILE), tl.arange(0, 256)
    sums = tl.zeros((256,), tl.float32)
    bits = tl.zeros((TILE // 8,), tl.uint64)  # of 8 elements a byte of each message
    for r in tl.static_range(IN_TABLE):
        its = message + tl.minimum(count - 1, r).to(tl.int64) * row_bytes
        scale = tl.load(scale_in(its, block_in_shard, TENSOR))
        sums += signed((signs >> r) & 1 != 0, scale if r == 0 else tl.where(r < count, scale, 0.0))
        bits |= load_bytes(bits_in(its, word, of_shard, TENSOR), length, TILE).to(tl.uint64) << (8 * r)
    half = tl.gather(transposed(bits), i // 8, 0) >> (8 * (i & 4)).to(tl.uint64)
    total = tl.gather(sums, (half >> (8 * (i % 4)).to(tl.uint64)).to(tl.int32) & 255, 0)
    for r in range(IN_TABLE, count):
        its = message + tl.cast(r, tl.uint32).to(tl.int64) * row_bytes
        scale = tl.load(scale_in(its, block_in_shard, TENSOR))
        total += signed(load_bits(bits_in(its, word, of_shard, TENSOR), length, TILE), scale)
    return total


@triton.jit
def decode_block(found, length, TILE: tl.constexpr, TENSOR: tl.constexpr, SENDERS: tl.constexpr):
    """A block of a message that `find_message` has found, or its mean over all SENDERS."""
    message, row_bytes, block_in_shard, word, of_shard = found
    if SENDERS == 1:
        scale = tl.load(scale_in(message, block_in_shard, TENSOR))
        m = signed(load_bits(bits_in(message, word, of_shard, TENSOR), length, TILE), scale)
    else:
        IN_TABLE: tl.constexpr = SENDERS if SENDERS < 8 else 8
        total = sum_of_messages(
            message, block_in_shard, word, of_shard, row_bytes, SENDERS, length, TILE, TENSOR, IN_TABLE
        )
        m = total * (1 / SENDERS)
    return m


@triton.jit
def any_flag(messages, count, row_bytes):
    """Return whether one of `count` messages carries a flag: 32 headers are read at a time."""
    header = messages.to(tl.pointer_type(tl.int32))
    flagged = tl.zeros((32,), tl.int32)
    for start in range(0, count, 32):
        i = start + tl.arange(0, 32)
        flags = header + i * (row_bytes.to(tl.int64) // 4) + FLAGS_WORD
        flagged |= tl.load(flags, mask=i < count, other=0)
    return tl.max((flagged != 0).to(tl.int32), axis=0)


@triton.jit
def flag_of(found, SENDERS: tl.constexpr):
    """Return not 0 if a message that `find_message` has found, or another sender's, carries a flag."""
    message, row_bytes, _, _, _ = found
    if SENDERS == 1:
        flag = tl.load(message.to(tl.pointer_type(tl.int32)) + FLAGS_WORD)
    else:
        flag = any_flag(message, SENDERS, row_bytes)
    return flag


@triton.jit
def write_header(message, magic, flag, fingerprint, shard_blocks):
    header = message.to(tl.pointer_type(tl.int32))
    tl.store(header, magic)
    tl.store(header + FLAGS_WORD, flag)
    tl.store(header + 2, fingerprint)
    tl.store(header + 3, shard_blocks)


@triton.jit
def mean_scale(total, count, NORM: tl.constexpr):
    """||c||_1 / count, or the root mean square; 0 for an empty block."""
    scale = tl.div_rn(total, tl.maximum(count, 1).to(tl.float32))
    if NORM == L2:
        scale = tl.sqrt_rn(scale)
    return scale


@triton.jit
def unbiased_scale(squares, total, count):
    """||c||_2^2 / ||c||_1, at most MOST times the root mean square."""
    largest = mean_scale(squares, count, L2) * MOST
    return tl.minimum(tl.div_rn(squares, tl.where(total > 0, total, 1.0)), largest)


@triton.jit
def residual(kept, scale):
    """e, from what was kept: with a tensor scale that is the c of the last step."""
    e = kept
    if scale is not None:
        e = kept - signed(kept >= 0, tl.load(scale))
    return e


@triton.jit
def counted_only(x, live, valid, TILE: tl.constexpr):
    """x, and 0 for an element that does not count."""
    if live is not None:
        x = tl.where(live, x, tl.zeros_like(x))
    else:
        x = valid_only(x, valid, TILE)
    return x


@triton.jit
def encode(
    c, live, value, scale, partial, counted, bits, valid, length,
    TILE: tl.constexpr, TENSOR: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store a block's bits, its scale and what they leave out. With a tensor scale: its bits, sum and count, and c."""
    byte = counting(live, valid, TILE)
    its_live = None if live is None else unpack(byte, TILE)
    c = counted_only(c, its_live, valid, TILE)
    store_bytes(bits, pack(c >= 0, TILE) & byte, length, TILE)
    total = tl.sum(c * c if NORM == L2 else tl.abs(c), axis=0)
    count = valid if live is None else how_many(byte)
    if TENSOR:
        tl.store(partial, total)
        tl.store(counted, count)
        left = c
    else:
        s = unbiased_scale(tl.sum(c * c, axis=0), total, count) if NORM == UNBIASED else mean_scale(total, count, NORM)
        tl.store(scale, s)
        left = counted_only(c - tl.where(c < 0, -s, s), its_live, valid, TILE)
    store_flat(value, left, length, TILE)


@triton.jit
def finished(counter, total):
    """Return whether this is the last of `total` blocks to call. The last one sees every other's stores, and resets the
    counter to 0. It adds up their results in the order of the blocks, not of arrival: sums are deterministic."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == total - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def finish_scale(scale, residual_scale, partial, counted, blocks, NORM: tl.constexpr):
    """The scale of one message from its blocks' sums and counts."""
    total = tl.zeros((1024,), tl.float32)
    count = tl.zeros((1024,), tl.int64)
    for start in range(0, blocks, 1024):
        i = start + tl.arange(0, 1024)
        count += tl.load(counted + i, mask=i < blocks, other=0, cache_modifier=".cg")
        total += tl.load(partial + i, mask=i < blocks, other=0.0, cache_modifier=".cg")
    s = mean_scale(tl.sum(total, axis=0), tl.sum(count, axis=0), NORM)
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
def used_root(v, h, least, at_zero):
    """u"""
    root = tl.sqrt_rn(v)
    return tl.where(root != 0, tl.maximum(root * tl.load(h + H_BIAS2), least), at_zero)


@triton.jit
def over_root(m, u, h):
    """mhat / (u + eps)"""
    return tl.div_rn(m * tl.load(h + H_BIAS1), u + tl.load(h + H_EPS))


@triton.jit
def moved(x, by, u, h):
    """x after the update; an element with u = 0 does not move."""
    x_new = x - tl.load(h + H_LR) * (by + tl.load(h + H_WEIGHT_DECAY) * x)
    return tl.where(u != 0, x_new, x)


@triton.jit
def load_parameter(base, master, valid, wide, length, TILE: tl.constexpr):
    """fp32 x: the master copy where there is one."""
    if master is not None:
        x = load_flat(master, length, TILE)
    else:
        x = load_tile(base, valid, wide, TILE)
    return x


@triton.jit
def store_parameter(base, master, x, valid, accessible, wide, TILE: tl.constexpr):
    if master is not None:
        store_tile(master, x, valid, wide, TILE)
    store_tile(base, x, accessible, wide, TILE)

"""quantize, average_codes and dequantize as Triton kernels: 4 or 8 bits an element. `onebit.kernels.passes` has the
equations and the bytes.

A tile holds one block, whose groups of 256 elements are its rows where their scales are made.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from onebit.kernels import passes
from onebit.kernels.data import wire
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import one_launch

GROUP = tl.constexpr(wire.GROUP)
LEAST = tl.constexpr(wire.LEAST)
LARGEST_4, LARGEST_8 = (tl.constexpr(wire.largest_code(bits)) for bits in (4, 8))
TO_WHOLE = tl.constexpr(1.5 * 2**23)  # added to a number below 2^22 it rounds it, ties to even, and has it as low bits


@triton.jit
def codes_in(message, word, of_shard, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Return the address of a word's codes in a message of so many blocks."""
    scales = 4 * GROUPS * of_shard
    start = tiles.HEADER_BYTES + (scales + (tiles.ALIGN - 1)) // tiles.ALIGN * tiles.ALIGN
    return message + start + word.to(tl.int64) * (4 * BITS)


@triton.jit
def in_groups(x, TILE: tl.constexpr):
    """A tile as rows that share a scale."""
    ROW: tl.constexpr = GROUP if TILE > GROUP else TILE
    return tl.reshape(x, (TILE // ROW, ROW))


@triton.jit
def scales_of(message, block_in_shard, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """Return the addresses of a block's scales in a message, and which of them there are."""
    ROWS: tl.constexpr = TILE // GROUP if TILE > GROUP else 1
    i = tl.arange(0, ROWS)
    return tiles.scale_in(message, block_in_shard * GROUPS, False) + i, i < GROUPS


@triton.jit
def load_codes(codes, length, TILE: tl.constexpr, BITS: tl.constexpr):
    """A tile of whole numbers, in fp32; past the block they may be any."""
    BYTES: tl.constexpr = TILE // 8 * BITS
    i = tl.arange(0, BYTES)
    inside = tl.minimum(i, length // 8 * BITS - tiles.ACCESS + i % tiles.ACCESS)
    byte = tl.load(tl.max_contiguous(tl.multiple_of(codes + inside, tiles.ACCESS), tiles.ACCESS)).to(tl.int32)
    if BITS == 4:
        byte = tl.reshape(tl.join(byte << 28, (byte >> 4) << 28), (TILE,)) >> 28
    else:
        byte = (byte << 24) >> 24
    return byte.to(tl.float32)


@triton.jit
def store_codes(out, code, length, TILE: tl.constexpr, BITS: tl.constexpr):
    """Store the lowest bits of a tile of int32."""
    BYTES: tl.constexpr = TILE // 8 * BITS
    if BITS == 4:
        low, high = tl.split(tl.reshape(code & 15, (TILE // 2, 2)))
        code = low | (high << 4)
    i = tl.arange(0, BYTES)
    tl.store(out + i, (code & 255).to(tl.uint8), mask=i < length // 8 * BITS)


@triton.jit
def mean_of_codes(
    message, block_in_shard, word, of_shard, row_bytes, count, inverse, length,
    TILE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A block's mean over `count` messages, added up in their order."""
    total = tl.zeros((TILE,), tl.float32)
    for r in range(count):
        its = message + tl.cast(r, tl.uint32).to(tl.int64) * row_bytes
        scales, there = scales_of(its, block_in_shard, TILE, GROUPS)
        codes = in_groups(load_codes(codes_in(its, word, of_shard, BITS, GROUPS), length, TILE, BITS), TILE)
        total += tl.reshape(codes * tl.load(scales, mask=there, other=0.0)[:, None], (TILE,))
    return total * inverse


@triton.jit
def quantize(
    c, value, message, block_in_shard, word, of_shard, valid, length,
    TILE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Store a block's codes, their scales, and what they leave out."""
    LARGEST: tl.constexpr = LARGEST_4 if BITS == 4 else LARGEST_8
    rows = in_groups(tiles.valid_only(c, valid, TILE), TILE)
    most = tl.max(tl.abs(rows), axis=1)
    is_zero = most < LEAST
    divisor = tl.where(is_zero, 1.0, most)
    scale = tl.where(is_zero, 0.0, tl.div_rn(most, tl.full(most.shape, LARGEST, tl.float32)))
    inverse = tl.where(is_zero, 0.0, tl.div_rn(tl.full(most.shape, LARGEST, tl.float32), divisor))
    scales, there = scales_of(message, block_in_shard, TILE, GROUPS)
    tl.store(scales, scale, mask=there)
    shifted = rows * inverse[:, None] + TO_WHOLE
    left = rows - (shifted - TO_WHOLE) * scale[:, None]
    code = tl.reshape(shifted.to(tl.int32, bitcast=True), (TILE,))
    store_codes(codes_in(message, word, of_shard, BITS, GROUPS), code, length, TILE, BITS)
    tiles.store_flat(value, tl.reshape(left, (TILE,)).to(value.dtype.element_ty), length, TILE)


@tiles.entry
def quantize_kernel(
    block_table, parameter_table, grad, hyper, flags, first_block, first_word, first_shard, blocks, out_shard_blocks,
    out_fingerprint, residual_value, residual_before, out, out_bytes,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    OUT_BITS: tl.constexpr, OUT_GROUPS: tl.constexpr, OUT_MAGIC: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            shard, block_in_shard, word, of_shard = tiles.find_in_shard(row, first_shard)
            kept = tiles.load_flat(residual_value + start, length, TILE)
            if residual_before is not None:
                tiles.store_flat(residual_before + start, kept, length, TILE)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            base, readable, wide = tiles.pointer(grad, p, offset, valid, GRAD_DTYPE, TILE)
            message = out + shard * out_bytes
            if block_in_shard == 0:
                tiles.write_header(message, OUT_MAGIC, flag, out_fingerprint, out_shard_blocks)
            if flag == 0:
                g = tiles.load_tile(base, readable, wide, TILE)
                c = g * tl.load(h + tiles.H_GRAD_SCALE) + kept.to(tl.float32)
                quantize(
                    c, residual_value + start, message, block_in_shard, word, of_shard, valid, length, TILE, OUT_BITS,
                    OUT_GROUPS,
                )  # fmt: skip


@tiles.entry
def average_codes_kernel(
    block_table, parameter_table, first_block, first_word, blocks, out_shard_blocks, out_fingerprint, received_rows,
    inverse_ranks, received, received_bytes, residual_value, residual_before, out,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    OUT_BITS: tl.constexpr, OUT_GROUPS: tl.constexpr, OUT_MAGIC: tl.constexpr,
):  # fmt: skip
    flag = tiles.any_flag(received, received_rows, received_bytes)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:  # of one shard, which has it at `block`
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            word = tl.load(row + tiles.B_WORD)
            kept = tiles.load_flat(residual_value + start, length, TILE)
            if residual_before is not None:
                tiles.store_flat(residual_before + start, kept, length, TILE)
            _, _, _, valid = tiles.locate(row, length, parameter_table)
            if block == 0:
                tiles.write_header(out, OUT_MAGIC, flag, out_fingerprint, out_shard_blocks)
            if flag == 0:
                mean = mean_of_codes(
                    received, block, word, blocks, received_bytes, received_rows, inverse_ranks, length, TILE, OUT_BITS,
                    OUT_GROUPS,
                )  # fmt: skip
                c = mean + kept.to(tl.float32)
                quantize(c, residual_value + start, out, block, word, blocks, valid, length, TILE, OUT_BITS, OUT_GROUPS)


@tiles.entry
def dequantize_kernel(
    block_table, parameter_table, out, first_block, first_word, first_shard, blocks, replies, replies_bytes,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, OUT_DTYPE: tl.constexpr, REPLIES_BITS: tl.constexpr,
    REPLIES_GROUPS: tl.constexpr, REPLIES_SENDERS: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, _, length = tiles.find(block_table, first_block + block, first_word)
            found = tiles.find_message(row, first_shard, replies, replies_bytes, REPLIES_SENDERS)
            message, row_bytes, block_in_shard, word, of_shard = found
            p, _, offset, valid = tiles.locate(row, length, parameter_table)
            base, writable, wide = tiles.pointer(out, p, offset, valid, OUT_DTYPE, TILE)
            x = mean_of_codes(
                message, block_in_shard, word, of_shard, row_bytes, REPLIES_SENDERS, 1 / REPLIES_SENDERS, length, TILE,
                REPLIES_BITS, REPLIES_GROUPS,
            )  # fmt: skip
            x = tl.where(tiles.flag_of(found, REPLIES_SENDERS) == 0, x, float("nan"))
            tiles.store_tile(base, x, writable, wide, TILE)


PASSES = {
    passes.Quantize: one_launch(quantize_kernel),
    passes.AverageCodes: one_launch(average_codes_kernel),
    passes.Dequantize: one_launch(dequantize_kernel),
}

"""compress, average and decode as Triton kernels. `onebit.kernels.passes` has the equations, the papers' lines and the
bytes.

compress does momentum, error compensation, sign, scale and packing in one pass, and average unpacking, mean, error
compensation and packing: each element of the residual is read once and written once.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl

from onebit.kernels import passes
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import one_launch


@tiles.entry
def compress_kernel(
    block_table, parameter_table, grad, hyper, flags, first_block, first_word, first_shard, blocks, out_shard_blocks,
    out_fingerprint, gamma, momentum, live, residual_value, residual_before, residual_scale, residual_partial,
    residual_counted, residual_counter, out, out_bytes,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    OUT_TENSOR: tl.constexpr, OUT_NORM: tl.constexpr, MOMENTUM_SENDERS: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            shard, block_in_shard, word, of_shard = tiles.find_in_shard(row, first_shard)
            its_value = residual_value + start
            kept = tiles.load_flat(its_value, length, TILE)
            its_live = None if live is None else tiles.load_bytes(live + start // 8, length, TILE)
            if residual_before is not None:
                tiles.store_flat(residual_before + start, kept, length, TILE)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            g_base, g_valid, wide = tiles.pointer(grad, p, offset, valid, GRAD_DTYPE, TILE)
            message = out + shard * out_bytes
            if block_in_shard == 0:
                tiles.write_header(message, tiles.MAGIC, flag, out_fingerprint, out_shard_blocks)
            if flag == 0:
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                y = tl.load(h + tiles.H_ONE_MINUS_BETA1) * (g * tl.load(h + tiles.H_GRAD_SCALE))
                if gamma is not None:
                    y = tl.load(gamma + p) * y
                if MOMENTUM_SENDERS is not None:
                    last = (momentum + shard * MOMENTUM_SENDERS * out_bytes, out_bytes, block_in_shard, word, of_shard)
                    m = tiles.decode_block(last, length, TILE, OUT_TENSOR, MOMENTUM_SENDERS)
                    y = tl.load(h + tiles.H_BETA1) * m + y
                elif momentum is not None:
                    y = tl.load(h + tiles.H_BETA1) * tiles.load_flat(momentum + start, length, TILE) + y
                scale = tiles.scale_in(message, block_in_shard, OUT_TENSOR)
                bits = tiles.bits_in(message, word, of_shard, OUT_TENSOR)
                its_partial = None if residual_partial is None else residual_partial + block
                its_counted = None if residual_counted is None else residual_counted + block
                its_scale = None if residual_scale is None else residual_scale + shard
                c = y + tiles.residual(kept, its_scale)
                tiles.encode(
                    c, its_live, its_value, scale, its_partial, its_counted, bits, valid, length, TILE, OUT_TENSOR,
                    OUT_NORM,
                )  # fmt: skip
                if OUT_TENSOR:
                    if tiles.finished(residual_counter + shard, of_shard):
                        first = block - block_in_shard
                        tiles.finish_scale(
                            scale, its_scale, residual_partial + first, residual_counted + first, of_shard, OUT_NORM
                        )


@tiles.entry
def average_kernel(
    block_table, parameter_table, first_block, first_word, blocks, out_shard_blocks, out_fingerprint, received_rows,
    inverse_ranks, received, received_bytes, live, residual_value, residual_before, residual_scale, residual_partial,
    residual_counted, residual_counter, out,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, OUT_TENSOR: tl.constexpr, OUT_NORM: tl.constexpr,
    RECEIVED_TENSOR: tl.constexpr,
):  # fmt: skip
    flag = tiles.any_flag(received, received_rows, received_bytes)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:  # of one shard, which has it at `block`
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            word = tl.load(row + tiles.B_WORD)
            its_value = residual_value + start
            kept = tiles.load_flat(its_value, length, TILE)
            its_live = None if live is None else tiles.load_bytes(live + start // 8, length, TILE)
            if residual_before is not None:
                tiles.store_flat(residual_before + start, kept, length, TILE)
            _, _, _, valid = tiles.locate(row, length, parameter_table)
            if block == 0:
                tiles.write_header(out, tiles.MAGIC, flag, out_fingerprint, out_shard_blocks)
            if flag == 0:
                total = tiles.sum_of_messages(
                    received, block, word, blocks, received_bytes, received_rows, length, TILE, RECEIVED_TENSOR
                )
                c = total * inverse_ranks + tiles.residual(kept, residual_scale)
                scale = tiles.scale_in(out, block, OUT_TENSOR)
                bits = tiles.bits_in(out, word, blocks, OUT_TENSOR)
                its_partial = None if residual_partial is None else residual_partial + block
                its_counted = None if residual_counted is None else residual_counted + block
                tiles.encode(
                    c, its_live, its_value, scale, its_partial, its_counted, bits, valid, length, TILE, OUT_TENSOR,
                    OUT_NORM,
                )  # fmt: skip
                if OUT_TENSOR:
                    if tiles.finished(residual_counter, blocks):
                        tiles.finish_scale(scale, residual_scale, residual_partial, residual_counted, blocks, OUT_NORM)


@tiles.entry
def decode_kernel(
    block_table, parameter_table, out, first_block, first_word, first_shard, blocks, replies, replies_bytes,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, OUT_DTYPE: tl.constexpr, REPLIES_TENSOR: tl.constexpr,
    REPLIES_SENDERS: tl.constexpr,
):  # fmt: skip
    IN_A_ROW: tl.constexpr = tiles.WIDEST // OUT_DTYPE.primitive_bitwidth
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, _, length = tiles.find(block_table, first_block + block, first_word)
            message = tiles.find_message(row, first_shard, replies, replies_bytes, REPLIES_SENDERS)
            p, _, offset, valid = tiles.locate(row, length, parameter_table)
            base, writable, wide = tiles.pointer(out, p, offset, valid, OUT_DTYPE, TILE)
            flag = tiles.flag_of(message, REPLIES_SENDERS)
            x = tiles.decode_block(message, length, TILE, REPLIES_TENSOR, REPLIES_SENDERS)
            x = tl.where(flag == 0, x, float("nan"))
            tiles.store_tile(base, x, writable, wide, TILE, IN_A_ROW)


PASSES = {
    passes.Compress: one_launch(compress_kernel),
    passes.Average: one_launch(average_kernel),
    passes.Decode: one_launch(decode_kernel),
}

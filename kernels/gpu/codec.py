"""compress, average and decode as Triton kernels.

    compress   c = beta1 m + gamma_p ((1 - beta1) g') + e;  bit = sigma(c);  scale = ||c||_1 / count;  e = c - scale bit
    average    C = mean_i decode(message_i) + E;            bit = sigma(C);  scale = ||C||_1 / count;  E = C - scale bit
    decode     x = scale sigma

compress does momentum, error compensation, sign, scale and packing in one pass, and average unpacking, mean, error
compensation and packing: each element of the residual is read once and written once. `onebit.kernels.passes` has the
papers' lines and the bytes of each.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import (
    TYPES,
    encoding_arguments,
    launch,
    message_arguments,
    momentum_arguments,
    momentum_format_arguments,
    replies_arguments,
    span_arguments,
)


@tiles.entry
def compress_kernel(
    owner, parameter_table, addresses, hyper, flags, first_block, blocks, shard_blocks, row_bytes, fingerprint,
    gamma, m_flat, m_scales, m_bits, m_row_bytes, live, value, before, residual_scale, partial, counted, counter,
    header, scales, bits,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, GRAD: tl.constexpr,
    TENSOR: tl.constexpr, L2: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    m_stride = m_row_bytes if BITS == 2 else row_bytes  # replies of 1 bit have the format of what is written
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row = (block // shard_blocks).to(tl.int64)
            j = block % shard_blocks
            block_value = value + block.to(tl.int64) * BLOCK
            kept = tiles.load_flat(block_value, BLOCK, TILE)
            if before is not None:
                tiles.store_flat(before + block.to(tl.int64) * BLOCK, kept, BLOCK, TILE)
            p, group, offset, valid = tiles.locate(first_block + block, owner, parameter_table, BLOCK)
            g_base, g_valid, wide = tiles.pointer(addresses, p, offset, valid, GRAD, TILE)
            h = tiles.group_row(hyper, group)
            if j == 0:
                tiles.write_header(header + row * (row_bytes // 4), flag, fingerprint, shard_blocks, 1)
            if flag == 0:
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                its_live = None if live is None else tiles.load_bits(
                    live + block.to(tl.int64) * (BLOCK // 8), BLOCK, TILE
                )  # fmt: skip
                y = tl.load(h + tiles.H_ONE_MINUS_BETA1) * (g * tl.load(h + tiles.H_GRAD_SCALE))
                if gamma is not None:
                    y = tl.load(gamma + p) * y
                if (m_bits is not None) or (m_flat is not None):
                    m = tiles.load_momentum(
                        m_flat, m_scales, m_bits, block, shard_blocks, m_stride,
                        BLOCK, TILE, TENSOR and BITS == 1, COPIES, BITS,
                    )  # fmt: skip
                    y = tl.load(h + tiles.H_BETA1) * m + y
                scale = scales + row * (row_bytes // 4) + (0 if TENSOR else j)
                block_bits = bits + row * row_bytes + j.to(tl.int64) * (BLOCK // 8)
                block_partial = partial + block if TENSOR else None
                block_counted = counted + block if TENSOR else None
                row_scale = residual_scale + row if TENSOR else None
                tiles.encode(
                    y + tiles.residual(kept, row_scale, TENSOR), its_live, block_value, scale, block_partial,
                    block_counted, block_bits, valid, BLOCK, TILE, TENSOR, L2,
                )  # fmt: skip
                if TENSOR:
                    if tiles.finished(counter + row, shard_blocks):
                        tiles.finish_scale(
                            scale, row_scale, partial + row * shard_blocks, counted + row * shard_blocks,
                            shard_blocks, L2,
                        )  # fmt: skip


@tiles.entry
def average_kernel(
    owner, parameter_table, first_block, blocks, row_bytes, fingerprint, ranks, inverse_ranks,
    in_header, in_scales, in_bits, live, value, before, residual_scale, partial, counted, counter, header, scales, bits,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, TENSOR: tl.constexpr, L2: tl.constexpr,
    IN_TENSOR: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    flag = tiles.any_flag(in_header, 0, ranks, row_bytes)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            block_value = value + block.to(tl.int64) * BLOCK
            kept = tiles.load_flat(block_value, BLOCK, TILE)
            if before is not None:
                tiles.store_flat(before + block.to(tl.int64) * BLOCK, kept, BLOCK, TILE)
            _, _, _, valid = tiles.locate(first_block + block, owner, parameter_table, BLOCK)
            if block == 0:
                tiles.write_header(header, flag, fingerprint, blocks, BITS)
            if flag == 0:
                its_live = None if live is None else tiles.load_bits(
                    live + block.to(tl.int64) * (BLOCK // 8), BLOCK, TILE
                )  # fmt: skip
                total = tiles.sum_of_messages(
                    in_scales + (0 if IN_TENSOR else block), in_bits + block.to(tl.int64) * (BLOCK // 8),
                    row_bytes.to(tl.int64), ranks, BLOCK, TILE,
                )  # fmt: skip
                c = total * inverse_ranks + tiles.residual(kept, residual_scale, TENSOR)
                scale = scales + (0 if TENSOR else block * BITS)
                block_bits = bits + block.to(tl.int64) * (BITS * BLOCK // 8)
                if BITS == 2:
                    tiles.encode_two_bits(c, its_live, block_value, scale, block_bits, valid, BLOCK, TILE)
                else:
                    block_partial = partial + block if TENSOR else None
                    block_counted = counted + block if TENSOR else None
                    tiles.encode(
                        c, its_live, block_value, scale, block_partial, block_counted, block_bits, valid,
                        BLOCK, TILE, TENSOR, L2,
                    )  # fmt: skip
                if TENSOR:
                    if tiles.finished(counter, blocks):
                        tiles.finish_scale(scale, residual_scale, partial, counted, blocks, L2)


@tiles.entry
def decode_kernel(
    owner, parameter_table, addresses, first_block, blocks, shard_blocks, row_bytes, header, scales, bits,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, OUT: tl.constexpr, TENSOR: tl.constexpr,
    COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            p, _, offset, valid = tiles.locate(first_block + block, owner, parameter_table, BLOCK)
            base, writable, wide = tiles.pointer(addresses, p, offset, valid, OUT, TILE)
            flag = tiles.flag_of_block(header, block, shard_blocks, row_bytes, COPIES)
            x = tiles.decode_block(scales, bits, block, shard_blocks, row_bytes, BLOCK, TILE, TENSOR, COPIES, BITS)
            x = tl.where(flag == 0, x, float("nan"))
            tiles.store_tile(base, x, writable, wide, TILE)


def compress(
    span: Span,
    grads: Pointers,
    momentum: Tensor | Messages | None,
    residual: Residual,
    hyper: Tensor,
    flags: Tensor,
    out: Messages,
    *,
    live: Tensor | None = None,
    gamma: Tensor | None = None,
) -> None:
    """`onebit.kernels.reference.compress` in one launch."""
    arguments = {
        **span_arguments(span, residual.value.device),
        **momentum_arguments(momentum, "m_"),
        **momentum_format_arguments(momentum),
        **encoding_arguments(residual, out),
        "addresses": grads.addresses,
        "hyper": hyper,
        "flags": flags,
        "gamma": gamma,
        "live": live,
        "GRAD": TYPES[grads.dtype],
    }
    launch(compress_kernel, span.count, arguments, residual.value, grads.dtype)


def average(span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None) -> None:
    """`onebit.kernels.reference.average` in one launch."""
    arguments = {
        **span_arguments(span, residual.value.device),
        **message_arguments(received, "in_"),
        **encoding_arguments(residual, out),
        "row_bytes": received.format.nbytes,
        "IN_TENSOR": received.format.scale == "tensor",
        "BITS": out.format.bits,
        "ranks": received.rows,
        "inverse_ranks": 1 / received.rows,
        "live": live,
    }
    del arguments["shard_blocks"]  # the span is one shard, so it is `blocks`
    launch(average_kernel, span.count, arguments, residual.value, residual.value.dtype)


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """`onebit.kernels.reference.decode` in one launch."""
    arguments = {
        **span_arguments(span, messages.buffer.device),
        **replies_arguments(messages),
        "addresses": out.addresses,
        "OUT": TYPES[out.dtype],
    }
    launch(decode_kernel, span.count, arguments, messages.buffer, out.dtype)

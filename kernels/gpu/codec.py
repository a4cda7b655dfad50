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

import triton
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


@triton.jit
def _compress_block(
    g_base, g_valid, h, gamma, m_flat, m_scales, m_bits, live, value, residual_scale, partial, counted, scale, bits,
    block, shard_blocks, m_row_bytes, valid,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, TENSOR: tl.constexpr, L2: tl.constexpr,
    COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    g = tiles.load_tile(g_base, g_valid, TILE, FULL) * tl.load(h + tiles.H_GRAD_SCALE)
    y = tl.load(h + tiles.H_ONE_MINUS_BETA1) * g
    if gamma is not None:
        y = tl.load(gamma) * y
    if (m_bits is not None) or (m_flat is not None):
        m = tiles.load_momentum(
            m_flat, m_scales, m_bits, block, shard_blocks, m_row_bytes, valid,
            BLOCK, TILE, FULL, TENSOR and BITS == 1, COPIES, BITS,
        )  # fmt: skip
        y = tl.load(h + tiles.H_BETA1) * m + y
    c = y + tiles.load_residual(value, residual_scale, valid, TILE, FULL, TENSOR)
    tiles.encode(c, live, value, scale, partial, counted, bits, valid, BLOCK, TILE, FULL, TENSOR, L2)


@tiles.entry
def compress_kernel(
    owner, parameter_table, addresses, hyper, flags, first_block, blocks, shard_blocks, row_bytes, fingerprint,
    gamma, m_flat, m_scales, m_bits, m_row_bytes, live, value, residual_scale, partial, counted, counter,
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
            if j == 0:
                tiles.write_header(header + row * (row_bytes // 4), flag, fingerprint, shard_blocks, 1)
            if flag == 0:
                p, group, offset, valid = tiles.locate(first_block + block, owner, parameter_table, BLOCK)
                g_base, g_valid, aligned = tiles.pointer(addresses, p, offset, valid, GRAD, TILE)
                h = tiles.group_row(hyper, group)
                scale = scales + row * (row_bytes // 4) + (0 if TENSOR else j)
                block_bits = bits + row * row_bytes + j.to(tl.int64) * (BLOCK // 8)
                block_value = value + block.to(tl.int64) * BLOCK
                block_live = None if live is None else live + block.to(tl.int64) * (BLOCK // 8)
                block_gamma = None if gamma is None else gamma + p
                block_partial = partial + block if TENSOR else None
                block_counted = counted + block if TENSOR else None
                row_scale = residual_scale + row if TENSOR else None
                if aligned:
                    _compress_block(
                        g_base, g_valid, h, block_gamma, m_flat, m_scales, m_bits, block_live, block_value, row_scale,
                        block_partial, block_counted, scale, block_bits, block, shard_blocks, m_stride, valid,
                        BLOCK, TILE, True, TENSOR, L2, COPIES, BITS,
                    )  # fmt: skip
                else:
                    _compress_block(
                        g_base, g_valid, h, block_gamma, m_flat, m_scales, m_bits, block_live, block_value, row_scale,
                        block_partial, block_counted, scale, block_bits, block, shard_blocks, m_stride, valid,
                        BLOCK, TILE, False, TENSOR, L2, COPIES, BITS,
                    )  # fmt: skip
                if TENSOR:
                    if tiles.finished(counter + row, shard_blocks):
                        tiles.finish_scale(
                            scale, row_scale, partial + row * shard_blocks, counted + row * shard_blocks,
                            shard_blocks, L2,
                        )  # fmt: skip


@triton.jit
def _average_block(
    in_scales, in_bits, ranks, inverse_ranks, row_bytes, live, value, residual_scale, partial, counted, scale, bits,
    block, valid,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, TENSOR: tl.constexpr, L2: tl.constexpr,
    IN_TENSOR: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((TILE,), tl.float32)
    stride = row_bytes.to(tl.int64)
    block_bits = in_bits + block.to(tl.int64) * (BLOCK // 8)
    for i in range(ranks):
        s = tl.load(in_scales + i * (stride // 4) + (0 if IN_TENSOR else block))
        total += tiles.unpack(block_bits + i * stride, s, BLOCK, TILE)
    c = total * inverse_ranks + tiles.load_residual(value, residual_scale, valid, TILE, FULL, TENSOR)
    if BITS == 2:
        tiles.encode_two_bits(c, live, value, scale, bits, valid, BLOCK, TILE, FULL)
    else:
        tiles.encode(c, live, value, scale, partial, counted, bits, valid, BLOCK, TILE, FULL, TENSOR, L2)


@tiles.entry
def average_kernel(
    owner, parameter_table, first_block, blocks, row_bytes, fingerprint, ranks, inverse_ranks,
    in_header, in_scales, in_bits, live, value, residual_scale, partial, counted, counter, header, scales, bits,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, TENSOR: tl.constexpr, L2: tl.constexpr,
    IN_TENSOR: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    flag = 0
    for i in range(ranks):
        flag |= tiles.flag_of(in_header, i, row_bytes)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            if block == 0:
                tiles.write_header(header, flag, fingerprint, blocks, BITS)
            if flag == 0:
                _, _, _, valid = tiles.locate(first_block + block, owner, parameter_table, BLOCK)
                scale = scales + (0 if TENSOR else block * BITS)
                block_bits = bits + block.to(tl.int64) * (BITS * BLOCK // 8)
                block_value = value + block.to(tl.int64) * BLOCK
                block_live = None if live is None else live + block.to(tl.int64) * (BLOCK // 8)
                block_partial = partial + block if TENSOR else None
                block_counted = counted + block if TENSOR else None
                if valid == TILE:
                    _average_block(
                        in_scales, in_bits, ranks, inverse_ranks, row_bytes, block_live, block_value, residual_scale,
                        block_partial, block_counted, scale, block_bits, block, valid, BLOCK, TILE, True, TENSOR, L2,
                        IN_TENSOR, BITS,
                    )  # fmt: skip
                else:
                    _average_block(
                        in_scales, in_bits, ranks, inverse_ranks, row_bytes, block_live, block_value, residual_scale,
                        block_partial, block_counted, scale, block_bits, block, valid, BLOCK, TILE, False, TENSOR, L2,
                        IN_TENSOR, BITS,
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
            base, writable, aligned = tiles.pointer(addresses, p, offset, valid, OUT, TILE)
            x = tiles.decode_block(scales, bits, block, shard_blocks, row_bytes, BLOCK, TILE, TENSOR, COPIES, BITS)
            flag = tiles.flag_of_block(header, block, shard_blocks, row_bytes, COPIES)
            x = tl.where(flag == 0, x, float("nan"))
            if aligned:
                tiles.store_tile(base, x, writable, TILE, True)
            else:
                tiles.store_tile(base, x, writable, TILE, False)


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

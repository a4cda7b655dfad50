"""compress, average and decode as Triton kernels.

    compress   c = beta1 m + gamma_p ((1 - beta1) g') + e;  bit = sigma(c);  scale = ||c||_1 / count;  e = c - scale bit
    average    C = mean_i decode(message_i) + E;            bit = sigma(C);  scale = ||C||_1 / count;  E = C - scale bit
    decode     x = scale sigma

Scales are those of norm "l1"; `onebit.kernels.data.wire` has the others.

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
    WIDE,
    encoding_arguments,
    launch,
    momentum_arguments,
    replies_arguments,
    span_arguments,
)


@tiles.entry
def compress_kernel(
    block_table, parameter_table, addresses, hyper, flags, first_block, first_word, first_shard, blocks, shard_blocks,
    fingerprint, gamma, m_flat, m_messages, live, value, before, residual_scale, partial, counted, counter,
    messages, row_bytes,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, GRAD: tl.constexpr,
    TENSOR: tl.constexpr, NORM: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            shard, place, word, of_shard = tiles.find_in_shard(row, first_shard)
            block_value = value + start
            kept = tiles.load_flat(block_value, length, TILE)
            its_live = None if live is None else tiles.load_bytes(live + start // 8, length, TILE)
            if before is not None:
                tiles.store_flat(before + start, kept, length, TILE)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            g_base, g_valid, wide = tiles.pointer(addresses, p, offset, valid, GRAD, TILE)
            h = tiles.group_row(hyper, group)
            message = messages + shard * row_bytes
            if place == 0:
                tiles.write_header(message, flag, fingerprint, shard_blocks)
            if flag == 0:
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                y = tl.load(h + tiles.H_ONE_MINUS_BETA1) * (g * tl.load(h + tiles.H_GRAD_SCALE))
                if gamma is not None:
                    y = tl.load(gamma + p) * y
                if m_messages is not None:
                    m_message = m_messages + shard * COPIES * row_bytes
                    m = tiles.decode_block(m_message, row_bytes, place, word, of_shard, length, TILE, TENSOR, COPIES)
                    y = tl.load(h + tiles.H_BETA1) * m + y
                elif m_flat is not None:
                    y = tl.load(h + tiles.H_BETA1) * tiles.load_flat(m_flat + start, length, TILE) + y
                scale = tiles.scale_in(message, place, TENSOR)
                bits = tiles.bits_in(message, word, of_shard, TENSOR)
                block_partial = partial + block if TENSOR else None
                block_counted = counted + block if TENSOR else None
                its_scale = residual_scale + shard if TENSOR else None
                c = y + tiles.residual(kept, its_scale, TENSOR)
                tiles.encode(
                    c, its_live, block_value, scale, block_partial, block_counted, bits, valid, length, TILE,
                    TENSOR, NORM,
                )  # fmt: skip
                if TENSOR:
                    if tiles.finished(counter + shard, of_shard):
                        first = block - place
                        tiles.finish_scale(scale, its_scale, partial + first, counted + first, of_shard, NORM)


@tiles.entry
def average_kernel(
    block_table, parameter_table, first_block, first_word, blocks, shard_blocks, fingerprint, ranks, inverse_ranks,
    received, received_bytes, live, value, before, residual_scale, partial, counted, counter, messages,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, TENSOR: tl.constexpr, NORM: tl.constexpr,
    IN_TENSOR: tl.constexpr,
):  # fmt: skip
    flag = tiles.any_flag(received, ranks, received_bytes)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:  # of one shard, so that its place there is `block`
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            word = tl.load(row + tiles.B_WORD)
            block_value = value + start
            kept = tiles.load_flat(block_value, length, TILE)
            its_live = None if live is None else tiles.load_bytes(live + start // 8, length, TILE)
            if before is not None:
                tiles.store_flat(before + start, kept, length, TILE)
            _, _, _, valid = tiles.locate(row, length, parameter_table)
            if block == 0:
                tiles.write_header(messages, flag, fingerprint, shard_blocks)
            if flag == 0:
                total = tiles.sum_of_messages(
                    received, block, word, blocks, received_bytes, ranks, length, TILE, IN_TENSOR
                )
                c = total * inverse_ranks + tiles.residual(kept, residual_scale, TENSOR)
                scale = tiles.scale_in(messages, block, TENSOR)
                bits = tiles.bits_in(messages, word, blocks, TENSOR)
                block_partial = partial + block if TENSOR else None
                block_counted = counted + block if TENSOR else None
                tiles.encode(
                    c, its_live, block_value, scale, block_partial, block_counted, bits, valid, length, TILE,
                    TENSOR, NORM,
                )  # fmt: skip
                if TENSOR:
                    if tiles.finished(counter, blocks):
                        tiles.finish_scale(scale, residual_scale, partial, counted, blocks, NORM)


@tiles.entry
def decode_kernel(
    block_table, parameter_table, addresses, first_block, first_word, first_shard, blocks, messages, row_bytes,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, OUT: tl.constexpr, TENSOR: tl.constexpr,
    COPIES: tl.constexpr, IN_A_ROW: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, _, length = tiles.find(block_table, first_block + block, first_word)
            shard, place, word, of_shard = tiles.find_in_shard(row, first_shard)
            p, _, offset, valid = tiles.locate(row, length, parameter_table)
            base, writable, wide = tiles.pointer(addresses, p, offset, valid, OUT, TILE)
            message = messages + shard * COPIES * row_bytes
            flag = tiles.flag_of(message, row_bytes, COPIES)
            x = tiles.decode_block(message, row_bytes, place, word, of_shard, length, TILE, TENSOR, COPIES)
            x = tl.where(flag == 0, x, float("nan"))
            tiles.store_tile(base, x, writable, wide, TILE, IN_A_ROW)


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
    """`onebit.kernels.passes.Backend.compress` in one launch."""
    arguments = {
        **span_arguments(span, residual.value.device),
        **momentum_arguments(momentum, "m_"),
        "COPIES": momentum.copies if isinstance(momentum, Messages) else 1,
        **encoding_arguments(residual, out),
        "first_shard": span.first_shard,
        "row_bytes": out.format.nbytes,
        "addresses": grads.addresses,
        "hyper": hyper,
        "flags": flags,
        "gamma": gamma,
        "live": live,
        "GRAD": TYPES[grads.dtype],
    }
    launch(compress_kernel, span.count, arguments, residual.value, grads.dtype)


def average(span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None) -> None:
    """`onebit.kernels.passes.Backend.average` in one launch."""
    arguments = {
        **span_arguments(span, residual.value.device),
        **encoding_arguments(residual, out),
        "received": received.buffer,
        "received_bytes": received.format.nbytes,
        "IN_TENSOR": received.format.scale == "tensor",
        "ranks": received.rows,
        "inverse_ranks": 1 / received.rows,
        "live": live,
    }
    launch(average_kernel, span.count, arguments, residual.value, residual.value.dtype)


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """`onebit.kernels.passes.Backend.decode` in one launch."""
    arguments = {
        **span_arguments(span, messages.buffer.device),
        **replies_arguments(span, messages),
        "addresses": out.addresses,
        "OUT": TYPES[out.dtype],
        "IN_A_ROW": WIDE // out.dtype.itemsize,
    }
    launch(decode_kernel, span.count, arguments, messages.buffer, out.dtype)

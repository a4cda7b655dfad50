"""average: unpack what N ranks sent for this rank's shard, take the mean, compensate, and pack again.

    C = mean_i decode(message_i) + E;   bit = sigma(C);   scale = ||C||_1 / count;   E = C - scale sigma(C)

Where `live` has no bit, C = 0 and E = 0, and the scale neither sums nor counts it.

(paper 001, Algorithm 1, line 10; paper 003, line 10)

Bytes an element of the shard: reads N/8, E 4; writes E 4, bits 1/8. On 1/N of the elements: (8.1 + N/8) / N.
With `live` 1/8 more.

decode: what a reply says, written to tensors. Bytes an element: reads bits 1/8; writes x 4.
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
from onebit.kernels.gpu.launch import TYPES, launch, over


@triton.jit
def _average_block(
    in_scales, in_bits, ranks, inverse_ranks, row_bytes, live, value, residual_scale, partial, counted, scale, bits,
    block, valid,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, TENSOR: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((TILE,), tl.float32)
    stride = row_bytes.to(tl.int64)
    block_bits = in_bits + block.to(tl.int64) * (BLOCK // 8)
    for i in range(ranks):
        s = tl.load(in_scales + i * (stride // 4) + (0 if TENSOR else block))
        total += tiles.unpack(block_bits + i * stride, s, BLOCK, TILE)
    c = total * inverse_ranks + tiles.load_residual(value, residual_scale, valid, TILE, FULL, TENSOR)
    tiles.encode(c, live, value, scale, partial, counted, bits, valid, BLOCK, TILE, FULL, TENSOR, L2)


@tiles.entry
def average_kernel(
    owner, rows, first_block, blocks, row_bytes, fingerprint, ranks, inverse_ranks,
    in_header, in_scales, in_bits, live, value, residual_scale, partial, counted, counter, header, scales, bits,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, TENSOR: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    flag = 0
    for i in range(ranks):
        flag = tl.maximum(flag, tiles.flag_of(in_header, i, row_bytes))
    for r in range(ROWS):
        block = tl.program_id(0) * ROWS + r
        if block < blocks:
            if block == 0:
                tiles.write_header(header, flag, fingerprint, blocks)
            if flag == 0:
                _, _, _, valid = tiles.locate(first_block + block, owner, rows, BLOCK)
                scale = scales + (0 if TENSOR else block)
                block_bits = bits + block.to(tl.int64) * (BLOCK // 8)
                block_value = value + block.to(tl.int64) * BLOCK
                block_live = None if live is None else live + block.to(tl.int64) * (BLOCK // 8)
                block_partial = partial + block if TENSOR else None
                block_counted = counted + block if TENSOR else None
                if valid == TILE:
                    _average_block(
                        in_scales, in_bits, ranks, inverse_ranks, row_bytes, block_live, block_value, residual_scale,
                        block_partial, block_counted, scale, block_bits, block, valid, BLOCK, TILE, True, TENSOR, L2,
                    )  # fmt: skip
                else:
                    _average_block(
                        in_scales, in_bits, ranks, inverse_ranks, row_bytes, block_live, block_value, residual_scale,
                        block_partial, block_counted, scale, block_bits, block, valid, BLOCK, TILE, False, TENSOR, L2,
                    )  # fmt: skip
                if TENSOR:
                    if tiles.finished(counter, blocks):
                        tiles.finish_scale(scale, residual_scale, partial, counted, blocks, L2)


@tiles.entry
def decode_kernel(
    owner, rows, addresses, first_block, blocks, shard_blocks, row_bytes, header, scales, bits,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, TENSOR: tl.constexpr,
):  # fmt: skip
    for r in range(ROWS):
        block = tl.program_id(0) * ROWS + r
        if block < blocks:
            p, _, offset, valid = tiles.locate(first_block + block, owner, rows, BLOCK)
            base, writable, aligned = tiles.pointer(addresses, p, offset, valid, OUT, TILE)
            x = tiles.decode_block(scales, bits, block, shard_blocks, row_bytes, BLOCK, TILE, TENSOR)
            flag = tiles.flag_of(header, block // shard_blocks, row_bytes)
            x = tl.where(flag == 0, x, float("nan"))
            if aligned:
                tiles.store_tile(base, x, writable, TILE, True)
            else:
                tiles.store_tile(base, x, writable, TILE, False)


def average(span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None) -> None:
    """`onebit.kernels.reference.average` in one launch."""
    form = out.format
    arguments = {
        **over(span, residual.value.device),
        "row_bytes": form.nbytes,
        "fingerprint": form.fingerprint,
        "ranks": received.rows,
        "inverse_ranks": 1 / received.rows,
        "in_header": received.header,
        "in_scales": received.scales,
        "in_bits": received.bits,
        "live": live,
        "value": residual.value,
        "residual_scale": residual.scale,
        "partial": residual.partial,
        "counted": residual.counted,
        "counter": residual.counter,
        "header": out.header,
        "scales": out.scales,
        "bits": out.bits,
        "TENSOR": form.scale == "tensor",
        "L2": form.norm == "l2",
    }
    launch(average_kernel, span.count, arguments, residual.value, residual.value.dtype)


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """`onebit.kernels.reference.decode` in one launch."""
    form = messages.format
    arguments = {
        **over(span, messages.buffer.device),
        "addresses": out.addresses,
        "shard_blocks": form.shard_blocks,
        "row_bytes": form.nbytes,
        "header": messages.header,
        "scales": messages.scales,
        "bits": messages.bits,
        "OUT": TYPES[out.dtype],
        "TENSOR": form.scale == "tensor",
    }
    launch(decode_kernel, span.count, arguments, messages.buffer, out.dtype)

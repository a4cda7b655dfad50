"""compress: momentum, error compensation, sign, scale and packing in one pass, into every outgoing message.

    c = beta1 m + (1 - beta1) g' + e;   bit = sigma(c);   scale = ||c||_1 / count;   e = c - scale sigma(c)

With gamma, one a parameter: c = beta1 m + gamma_p ((1 - beta1) g') + e, where m comes scaled (paper 003, section 4.3).
Where `live` has no bit, c = 0 and e = 0, and the scale neither sums nor counts it.

(paper 001, Algorithm 1, lines 6 and 7; paper 003, lines 6 and 7)

Bytes an element, fp32 gradients, momentum kept as a message: reads g 4, c 4, m 1/8; writes c 4, bits 1/8: 12.3. With
`live` 1/8 more.
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
def _compress_block(
    g_base, g_valid, h, gamma, m_flat, m_scales, m_bits, live, value, residual_scale, partial, counted, scale, bits,
    block, shard_blocks, row_bytes, valid,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, TENSOR: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    g = tiles.load_tile(g_base, g_valid, TILE, FULL) * tl.load(h + tiles.H_GRAD_SCALE)
    y = tl.load(h + tiles.H_ONE_MINUS_BETA1) * g
    if gamma is not None:
        y = tl.load(gamma) * y
    if (m_bits is not None) or (m_flat is not None):
        m = tiles.load_momentum(
            m_flat, m_scales, m_bits, block, shard_blocks, row_bytes, valid, BLOCK, TILE, FULL, TENSOR
        )
        y = tl.load(h + tiles.H_BETA1) * m + y
    c = y + tiles.load_residual(value, residual_scale, valid, TILE, FULL, TENSOR)
    tiles.encode(c, live, value, scale, partial, counted, bits, valid, BLOCK, TILE, FULL, TENSOR, L2)


@tiles.entry
def compress_kernel(
    owner, rows, addresses, hyper, flags, first_block, blocks, shard_blocks, row_bytes, fingerprint,
    gamma, m_flat, m_scales, m_bits, live, value, residual_scale, partial, counted, counter, header, scales, bits,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, GRAD: tl.constexpr,
    TENSOR: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(ROWS):
        block = tl.program_id(0) * ROWS + r
        if block < blocks:
            row = (block // shard_blocks).to(tl.int64)
            j = block % shard_blocks
            if j == 0:
                tiles.write_header(header + row * (row_bytes // 4), flag, fingerprint, shard_blocks)
            if flag == 0:
                p, group, offset, valid = tiles.locate(first_block + block, owner, rows, BLOCK)
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
                        block_partial, block_counted, scale, block_bits, block, shard_blocks, row_bytes, valid,
                        BLOCK, TILE, True, TENSOR, L2,
                    )  # fmt: skip
                else:
                    _compress_block(
                        g_base, g_valid, h, block_gamma, m_flat, m_scales, m_bits, block_live, block_value, row_scale,
                        block_partial, block_counted, scale, block_bits, block, shard_blocks, row_bytes, valid,
                        BLOCK, TILE, False, TENSOR, L2,
                    )  # fmt: skip
                if TENSOR:
                    if tiles.finished(counter + row, shard_blocks):
                        tiles.finish_scale(
                            scale, row_scale, partial + row * shard_blocks, counted + row * shard_blocks,
                            shard_blocks, L2,
                        )  # fmt: skip


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
    form = out.format
    packed = momentum if isinstance(momentum, Messages) else None
    arguments = {
        **over(span, residual.value.device),
        "addresses": grads.addresses,
        "hyper": hyper,
        "flags": flags,
        "shard_blocks": form.shard_blocks,
        "row_bytes": form.nbytes,
        "fingerprint": form.fingerprint,
        "gamma": gamma,
        "m_flat": None if packed else momentum,
        "m_scales": packed and packed.scales,
        "m_bits": packed and packed.bits,
        "live": live,
        "value": residual.value,
        "residual_scale": residual.scale,
        "partial": residual.partial,
        "counted": residual.counted,
        "counter": residual.counter,
        "header": out.header,
        "scales": out.scales,
        "bits": out.bits,
        "GRAD": TYPES[grads.dtype],
        "TENSOR": form.scale == "tensor",
        "L2": form.norm == "l2",
    }
    launch(compress_kernel, span.count, arguments, residual.value, grads.dtype)

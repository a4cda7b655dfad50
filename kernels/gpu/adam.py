"""Adam's two updates, each one pass over the model.

    warmup   m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2;  x = x - lr (mhat / (sqrt(vhat) + eps) + wd x)
    update   x = x - lr c_p (m d + wd x),   m = decode(reply)

1-bit Adam (Tang et al. 2021), equation 1 and Algorithm 1, line 13. c_p is 1 for Adam and the parameter's coefficient
for LAMB.

Bytes an element, fp32: warmup reads g 4, m 4, v 4, x 4, writes m 4, v 4, x 4: 28; update reads x 4, d 4,
bits 1/8, writes x 4: 12.1. A 16-bit parameter with a master copy adds 2 (written only).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import TYPES, launch, replies_arguments, span_arguments


@triton.jit
def _warmup_block(
    p_base, p_valid, g_base, g_valid, h, exp_avg, exp_avg_sq, master, total, valid,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    g = tiles.load_tile(g_base, g_valid, TILE, FULL) * tl.load(h + tiles.H_GRAD_SCALE)
    m, v = tiles.moments(
        g, tiles.load_tile(exp_avg, valid, TILE, FULL), tiles.load_tile(exp_avg_sq, valid, TILE, FULL), h
    )
    x = tiles.load_parameter(p_base, master, valid, TILE, FULL)
    x = x - tl.load(h + tiles.H_LR) * tiles.direction(m, v, x, h)
    tiles.store_tile(exp_avg, m, valid, TILE, FULL)
    tiles.store_tile(exp_avg_sq, v, valid, TILE, FULL)
    tiles.store_parameter(p_base, master, x, valid, p_valid, TILE, FULL)
    if total is not None:
        tl.store(total, tl.sum(v, axis=0))


@tiles.entry
def adam_warmup_kernel(
    owner, parameter_table, p_addresses, g_addresses, hyper, flags, first_block, blocks,
    exp_avg, exp_avg_sq, master, sums,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if (block < blocks) & (flag == 0):
            p, group, offset, valid = tiles.locate(first_block + block, owner, parameter_table, BLOCK)
            p_base, p_valid, p_aligned = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            g_base, g_valid, g_aligned = tiles.pointer(g_addresses, p, offset, valid, GRAD, TILE)
            h = tiles.group_row(hyper, group)
            start = block.to(tl.int64) * BLOCK
            x = None if master is None else master + start
            total = None if sums is None else sums + block
            if p_aligned & g_aligned:
                _warmup_block(
                    p_base, p_valid, g_base, g_valid, h, exp_avg + start, exp_avg_sq + start, x, total, valid,
                    BLOCK, TILE, True,
                )  # fmt: skip
            else:
                _warmup_block(
                    p_base, p_valid, g_base, g_valid, h, exp_avg + start, exp_avg_sq + start, x, total, valid,
                    BLOCK, TILE, False,
                )  # fmt: skip


@triton.jit
def _update_block(
    p_base, p_valid, h, d, m, master, lr, valid, TILE: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    d = tiles.load_tile(d, valid, TILE, FULL)
    x = tiles.load_parameter(p_base, master, valid, TILE, FULL)
    moved = x - lr * (m * d + tl.load(h + tiles.H_WEIGHT_DECAY) * x)
    x = tl.where(d != 0, moved, x)
    tiles.store_parameter(p_base, master, x, valid, p_valid, TILE, FULL)


@tiles.entry
def adam_update_kernel(
    owner, parameter_table, p_addresses, hyper, coefficient, first_block, blocks, shard_blocks, row_bytes,
    header, scales, bits, d, master,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    PARAM: tl.constexpr, TENSOR: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            if tiles.flag_of_block(header, block, shard_blocks, row_bytes, COPIES) == 0:
                p, group, offset, valid = tiles.locate(first_block + block, owner, parameter_table, BLOCK)
                p_base, p_valid, aligned = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
                h = tiles.group_row(hyper, group)
                lr = tl.load(h + tiles.H_LR)
                if coefficient is not None:
                    lr = lr * tl.load(coefficient + p)
                m = tiles.decode_block(scales, bits, block, shard_blocks, row_bytes, BLOCK, TILE, TENSOR, COPIES, BITS)
                start = block.to(tl.int64) * BLOCK
                x = None if master is None else master + start
                if aligned:
                    _update_block(p_base, p_valid, h, d + start, m, x, lr, valid, TILE, True)
                else:
                    _update_block(p_base, p_valid, h, d + start, m, x, lr, valid, TILE, False)


def adam_warmup(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    sums: Tensor | None = None,
) -> None:
    """`onebit.kernels.reference.adam_warmup` in one launch."""
    arguments = {
        **span_arguments(span, exp_avg.device),
        "p_addresses": params.addresses,
        "g_addresses": grads.addresses,
        "hyper": hyper,
        "flags": flags,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "master": master,
        "sums": sums,
        "PARAM": TYPES[params.dtype],
        "GRAD": TYPES[grads.dtype],
    }
    launch(adam_warmup_kernel, span.count, arguments, exp_avg, params.dtype)


def adam_update(
    span: Span,
    params: Pointers,
    d: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    coefficient: Tensor | None = None,
) -> None:
    """`onebit.kernels.reference.adam_update` in one launch."""
    arguments = {
        **span_arguments(span, d.device),
        **replies_arguments(replies),
        "p_addresses": params.addresses,
        "hyper": hyper,
        "coefficient": coefficient,
        "d": d,
        "master": master,
        "PARAM": TYPES[params.dtype],
    }
    launch(adam_update_kernel, span.count, arguments, d, params.dtype)

"""Adam's two updates, each one pass over the model.

    warmup   m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2;  x = x - lr (mhat / (sqrt(vhat) + eps) + wd x)
    update   x = x - lr c_p (clip_p m d + wd x),   m = decode(reply)

1-bit Adam (Tang et al. 2021), equation 1 and Algorithm 1, line 13. c_p is 1 for Adam and the parameter's coefficient
for LAMB; clip_p bounds how far a step moves.

Bytes an element, fp32: warmup reads g 4, m 4, v 4, x 4, writes m 4, v 4, x 4: 28; update reads x 4, d 4,
bits 1/8, writes x 4: 12.1. A 16-bit parameter with a master copy adds 2 (written only).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import TYPES, launch, replies_arguments, span_arguments


@tiles.entry
def adam_warmup_kernel(
    block_table, parameter_table, p_addresses, g_addresses, hyper, flags, first_block, first_word, blocks,
    exp_avg, exp_avg_sq, master, sums,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            its_master = None if master is None else master + start
            last_m = tiles.load_flat(exp_avg + start, length, TILE)
            last_v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            p_base, p_valid, p_wide = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            g_base, g_valid, g_wide = tiles.pointer(g_addresses, p, offset, valid, GRAD, TILE)
            wide = p_wide & g_wide
            h = tiles.group_row(hyper, group)
            if flag == 0:
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                m, v = tiles.moments(g * tl.load(h + tiles.H_GRAD_SCALE), last_m, last_v, h)
                tiles.store_tile(exp_avg + start, m, valid, wide, TILE)
                tiles.store_tile(exp_avg_sq + start, v, valid, wide, TILE)
                x = x - tl.load(h + tiles.H_LR) * tiles.direction(m, v, x, h)
                tiles.store_parameter(p_base, its_master, x, valid, p_valid, wide, TILE)
                if sums is not None:
                    tl.store(sums + block, tl.sum(tiles.valid_only(v, valid, TILE), axis=0))


@tiles.entry
def adam_update_kernel(
    block_table, parameter_table, p_addresses, hyper, coefficient, clip, first_block, first_word, first_shard, blocks,
    messages, row_bytes, d, master,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    PARAM: tl.constexpr, TENSOR: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            shard, place, word, of_shard = tiles.find_in_shard(row, first_shard)
            message = messages + shard * COPIES * row_bytes
            its_master = None if master is None else master + start
            its_d = tiles.load_flat(d + start, length, TILE)
            flag = tiles.flag_of(message, row_bytes, COPIES)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            its_clip = tiles.clip_of(clip, p)
            p_base, p_valid, wide = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            h = tiles.group_row(hyper, group)
            if flag == 0:
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                lr = tl.load(h + tiles.H_LR)
                if coefficient is not None:
                    lr = lr * tl.load(coefficient + p)
                m = tiles.decode_block(message, row_bytes, place, word, of_shard, length, TILE, TENSOR, COPIES)
                moved = x - lr * (m * its_d * its_clip + tl.load(h + tiles.H_WEIGHT_DECAY) * x)
                x = tl.where(its_d != 0, moved, x)
                tiles.store_parameter(p_base, its_master, x, valid, p_valid, wide, TILE)


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
    """`onebit.kernels.passes.Backend.adam_warmup` in one launch."""
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
    clip: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.adam_update` in one launch."""
    arguments = {
        **span_arguments(span, d.device),
        **replies_arguments(span, replies),
        "p_addresses": params.addresses,
        "hyper": hyper,
        "coefficient": coefficient,
        "clip": clip,
        "d": d,
        "master": master,
        "PARAM": TYPES[params.dtype],
    }
    launch(adam_update_kernel, span.count, arguments, d, params.dtype)

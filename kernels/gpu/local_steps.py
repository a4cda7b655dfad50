"""0/1 Adam's steps between messages and with one, each one pass over the model.

    local    m = b1 m + (1 - b1) g';  x = x - lr (clip_p mhat / (u + eps) + wd x);  e = e + lr mhat
    sync     x = decay_p anchor - clip_p U / (u + eps);  anchor = x as it was stored;  m = factor_p U;
             U = decode(reply)

u is that of `onebit.kernels.gpu.zero_one`.

Bytes an element, fp32: local reads g 4, v 4, m 4, x 4, e 4, writes m 4, x 4, e 4: 32; sync reads v 4, anchor 4,
bits 1/8, writes x 4, anchor 4, m 4: 20.1. A 16-bit parameter with a master copy adds 2 (written only).
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
from onebit.kernels.gpu.launch import TYPES, launch, replies_arguments, span_arguments
from onebit.kernels.gpu.zero_one import direction, moved, used_root


@tiles.entry
def zero_one_local_kernel(
    block_table, parameter_table, p_addresses, g_addresses, hyper, flags, first_block, first_word, first_shard, blocks,
    exp_avg_sq, exp_avg, value, residual_scale, master, least_root, root_at_zero, clip, squares,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    TENSOR: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            shard, _, _, _ = tiles.find_in_shard(row, first_shard)
            its_master = None if master is None else master + start
            v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            last_m = tiles.load_flat(exp_avg + start, length, TILE)
            kept = None if value is None else tiles.load_flat(value + start, length, TILE)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            its_clip = tiles.clip_of(clip, p)
            p_base, p_valid, p_wide = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            g_base, g_valid, g_wide = tiles.pointer(g_addresses, p, offset, valid, GRAD, TILE)
            wide = p_wide & g_wide
            h = tiles.group_row(hyper, group)
            if flag == 0:
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                u = used_root(v, h, tl.load(least_root + p), tl.load(root_at_zero + p))
                m = tl.where(u != 0, tiles.first_moment(g * tl.load(h + tiles.H_GRAD_SCALE), last_m, h), last_m)
                tiles.store_tile(exp_avg + start, m, valid, wide, TILE)
                if value is not None:
                    e_scale = residual_scale + shard if TENSOR else None
                    e = tiles.residual(kept, e_scale, TENSOR)
                    held = tl.zeros_like(e) if TENSOR else e
                    e = tl.where(u != 0, e + tl.load(h + tiles.H_LR) * tl.load(h + tiles.H_BIAS1) * m, held)
                    tiles.store_tile(value + start, e, valid, wide, TILE)
                by = direction(m, u, h)
                if squares is not None:
                    counted = tiles.valid_only(tl.where(u != 0, by * by, 0.0), valid, TILE)
                    tl.store(squares + block, tl.sum(counted, axis=0))
                x = moved(x, by * its_clip, u, h)
                tiles.store_parameter(p_base, its_master, x, valid, p_valid, wide, TILE)


@tiles.entry
def zero_one_sync_kernel(
    block_table, parameter_table, p_addresses, hyper, first_block, first_word, first_shard, blocks,
    messages, row_bytes, exp_avg_sq, exp_avg, anchor, master, least_root, root_at_zero, decay, factor, clip,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    PARAM: tl.constexpr, TENSOR: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            its_master = None if master is None else master + start
            shard, place, word, of_shard = tiles.find_in_shard(row, first_shard)
            message = messages + shard * COPIES * row_bytes
            v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            x = tiles.load_flat(anchor + start, length, TILE)
            flag = tiles.flag_of(message, row_bytes, COPIES)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            its_clip = tiles.clip_of(clip, p)
            p_base, p_valid, wide = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            h = tiles.group_row(hyper, group)
            if flag == 0:
                total = tiles.decode_block(message, row_bytes, place, word, of_shard, length, TILE, TENSOR, COPIES)
                u = used_root(v, h, tl.load(least_root + p), tl.load(root_at_zero + p))
                by = tl.div_rn(total, u + tl.load(h + tiles.H_EPS))
                moved_x = tl.load(decay + p) * x - by * its_clip
                new_x = tl.where(u != 0, moved_x, x)
                if master is None:
                    new_x = new_x.to(p_base.dtype.element_ty).to(tl.float32)
                m = tl.where(u != 0, tl.load(factor + p) * total, 0.0)
                tiles.store_parameter(p_base, its_master, new_x, valid, p_valid, wide, TILE)
                tiles.store_tile(anchor + start, new_x, valid, wide, TILE)
                tiles.store_tile(exp_avg + start, m, valid, wide, TILE)


def zero_one_local(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg_sq: Tensor,
    exp_avg: Tensor,
    residual: Residual | None,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    clip: Tensor | None = None,
    squares: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_local` in one launch."""
    value, scale = (None, None) if residual is None else (residual.value, residual.scale)
    arguments = {
        **span_arguments(span, exp_avg.device),
        "p_addresses": params.addresses,
        "g_addresses": grads.addresses,
        "hyper": hyper,
        "flags": flags,
        "exp_avg_sq": exp_avg_sq,
        "exp_avg": exp_avg,
        "value": value,
        "residual_scale": scale,
        "first_shard": span.first_shard,
        "master": master,
        "least_root": least_root,
        "root_at_zero": root_at_zero,
        "clip": clip,
        "squares": squares,
        "PARAM": TYPES[params.dtype],
        "GRAD": TYPES[grads.dtype],
        "TENSOR": scale is not None,
    }
    launch(zero_one_local_kernel, span.count, arguments, exp_avg, params.dtype)


def zero_one_sync(
    span: Span,
    params: Pointers,
    exp_avg_sq: Tensor,
    exp_avg: Tensor,
    anchor: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    decay: Tensor,
    factor: Tensor,
    clip: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_sync` in one launch."""
    arguments = {
        **span_arguments(span, exp_avg.device),
        **replies_arguments(span, replies),
        "p_addresses": params.addresses,
        "hyper": hyper,
        "exp_avg_sq": exp_avg_sq,
        "exp_avg": exp_avg,
        "anchor": anchor,
        "master": master,
        "least_root": least_root,
        "root_at_zero": root_at_zero,
        "decay": decay,
        "factor": factor,
        "clip": clip,
        "PARAM": TYPES[params.dtype],
    }
    launch(zero_one_sync_kernel, span.count, arguments, exp_avg, params.dtype)

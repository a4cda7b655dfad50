"""0/1 Adam's two updates, each one pass over the model.

    full     m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2;  x = x - lr (mhat / (u + eps) + wd x);  e = e + b1 m
    update   x = x - lr (clip_p mhat / (u + eps) + wd x),   m = decode(reply)
    inverses sum of 1 / (u + eps)^2 over a block

u = max(sqrt(vhat), least_p), or a parameter's root_at_zero where v is 0. clip_p bounds how far a step moves.

Bytes an element, fp32: full reads g 4, m 1/8, v 4, e 4, x 4, writes v 4, e 4, x 4, live 1/8: 28.25; update reads x 4,
v 4, bits 1/8, writes x 4: 12.1. A 16-bit parameter with a master copy adds 2 (written only).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import TYPES, launch, replies_arguments, span_arguments


@triton.jit
def used_root(v, h, least, at_zero):
    """u"""
    root = tl.sqrt_rn(v)
    return tl.where(root != 0, tl.maximum(root * tl.load(h + tiles.H_BIAS2), least), at_zero)


@triton.jit
def direction(m, u, h):
    """mhat / (u + eps)"""
    return tl.div_rn(m * tl.load(h + tiles.H_BIAS1), u + tl.load(h + tiles.H_EPS))


@triton.jit
def moved(x, by, u, h):
    """x after the update; a coordinate with u = 0 does not move."""
    x_new = x - tl.load(h + tiles.H_LR) * (by + tl.load(h + tiles.H_WEIGHT_DECAY) * x)
    return tl.where(u != 0, x_new, x)


@triton.jit
def _of_live(values, v, at_zero):
    """0 for a coordinate that takes no part."""
    return tl.where(at_zero != 0, values, tl.where(v != 0, values, 0.0))


@tiles.entry
def zero_one_full_kernel(
    block_table, parameter_table, p_addresses, g_addresses, hyper, flags, first_block, first_word, first_shard, blocks,
    messages, row_bytes, exp_avg_sq, value, residual_scale, master, least_root, root_at_zero, live, sums,
    counts,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    TENSOR: tl.constexpr, COPIES: tl.constexpr, RESIDUAL_TENSOR: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            shard, place, word, of_shard = tiles.find_in_shard(row, first_shard)
            message = messages + shard * COPIES * row_bytes
            its_master = None if master is None else master + start
            last_v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            kept = None if value is None else tiles.load_flat(value + start, length, TILE)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            p_base, p_valid, p_wide = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            g_base, g_valid, g_wide = tiles.pointer(g_addresses, p, offset, valid, GRAD, TILE)
            wide = p_wide & g_wide
            h = tiles.group_row(hyper, group)
            if flag == 0:
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                least, at_zero = tl.load(least_root + p), tl.load(root_at_zero + p)
                m = tiles.decode_block(message, row_bytes, place, word, of_shard, length, TILE, TENSOR, COPIES)
                m = _of_live(m, last_v, at_zero)
                m, v = tiles.moments(g * tl.load(h + tiles.H_GRAD_SCALE), m, last_v, h)
                if value is not None:
                    e_scale = residual_scale + shard if RESIDUAL_TENSOR else None
                    e = _of_live(tiles.residual(kept, e_scale, RESIDUAL_TENSOR), last_v, at_zero)
                    tiles.store_tile(value + start, e + tl.load(h + tiles.H_BETA1) * m, valid, wide, TILE)
                tiles.store_tile(exp_avg_sq + start, v, valid, wide, TILE)
                counted = tiles.valid_only(v, valid, TILE)
                byte = tiles.pack(counted != 0, TILE)
                tiles.store_bytes(live + start // 8, byte, length, TILE)
                tl.store(sums + block, tl.sum(counted, axis=0))
                tl.store(counts + block, tiles.how_many(byte).to(tl.float32))
                u = used_root(v, h, least, at_zero)
                x = moved(x, direction(m, u, h), u, h)
                tiles.store_parameter(p_base, its_master, x, valid, p_valid, wide, TILE)


@tiles.entry
def zero_one_update_kernel(
    block_table, parameter_table, p_addresses, hyper, first_block, first_word, first_shard, blocks,
    messages, row_bytes, exp_avg_sq, master, least_root, root_at_zero, clip,
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
            v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            flag = tiles.flag_of(message, row_bytes, COPIES)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            its_clip = tiles.clip_of(clip, p)
            p_base, p_valid, wide = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            h = tiles.group_row(hyper, group)
            if flag == 0:
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                least, at_zero = tl.load(least_root + p), tl.load(root_at_zero + p)
                m = tiles.decode_block(message, row_bytes, place, word, of_shard, length, TILE, TENSOR, COPIES)
                u = used_root(v, h, least, at_zero)
                x = moved(x, direction(m, u, h) * its_clip, u, h)
                tiles.store_parameter(p_base, its_master, x, valid, p_valid, wide, TILE)


@tiles.entry
def zero_one_inverses_kernel(
    block_table, parameter_table, hyper, first_block, first_word, blocks, exp_avg_sq, least_root, root_at_zero, sums,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            p, group, _, valid = tiles.locate(row, length, parameter_table)
            h = tiles.group_row(hyper, group)
            u = used_root(v, h, tl.load(least_root + p), tl.load(root_at_zero + p))
            divisor = tl.where(u != 0, u + tl.load(h + tiles.H_EPS), tiles.NO_PART)
            inverse = tl.div_rn(tl.full(u.shape, 1.0, tl.float32), divisor)
            tl.store(sums + block, tl.sum(tiles.valid_only(inverse * inverse, valid, TILE), axis=0))


def zero_one_inverses(
    span: Span, exp_avg_sq: Tensor, hyper: Tensor, least_root: Tensor, root_at_zero: Tensor, sums: Tensor
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_inverses` in one launch."""
    arguments = {
        **span_arguments(span, exp_avg_sq.device),
        "hyper": hyper,
        "exp_avg_sq": exp_avg_sq,
        "least_root": least_root,
        "root_at_zero": root_at_zero,
        "sums": sums,
    }
    launch(zero_one_inverses_kernel, span.count, arguments, exp_avg_sq, torch.float32)


def zero_one_full(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg_sq: Tensor,
    replies: Messages,
    residual: Residual | None,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    live: Tensor,
    sums: Tensor,
    counts: Tensor,
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_full` in one launch."""
    value, scale = (None, None) if residual is None else (residual.value, residual.scale)
    arguments = {
        **span_arguments(span, exp_avg_sq.device),
        **replies_arguments(span, replies),
        "p_addresses": params.addresses,
        "g_addresses": grads.addresses,
        "hyper": hyper,
        "flags": flags,
        "exp_avg_sq": exp_avg_sq,
        "value": value,
        "residual_scale": scale,
        "master": master,
        "least_root": least_root,
        "root_at_zero": root_at_zero,
        "live": live,
        "sums": sums,
        "counts": counts,
        "PARAM": TYPES[params.dtype],
        "GRAD": TYPES[grads.dtype],
        "RESIDUAL_TENSOR": scale is not None,
    }
    launch(zero_one_full_kernel, span.count, arguments, exp_avg_sq, params.dtype)


def zero_one_update(
    span: Span,
    params: Pointers,
    exp_avg_sq: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    clip: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.zero_one_update` in one launch."""
    arguments = {
        **span_arguments(span, exp_avg_sq.device),
        **replies_arguments(span, replies),
        "p_addresses": params.addresses,
        "hyper": hyper,
        "exp_avg_sq": exp_avg_sq,
        "master": master,
        "least_root": least_root,
        "root_at_zero": root_at_zero,
        "clip": clip,
        "PARAM": TYPES[params.dtype],
    }
    launch(zero_one_update_kernel, span.count, arguments, exp_avg_sq, params.dtype)

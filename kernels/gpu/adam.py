"""Adam's warmup and both updates as Triton kernels, each one pass over the model. `onebit.kernels.passes` has the
equations, the papers' lines and the bytes.

Adam's update divides by what was frozen, 0/1 Adam's by what the variance is now: nothing else is different.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from onebit.kernels import passes
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import one_launch


@tiles.entry
def adam_warmup_kernel(
    block_table, parameter_table, param, grad, hyper, flags, first_block, first_word, blocks, exp_avg, exp_avg_sq,
    master, sums,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            its_master = None if master is None else master + start
            last_m = tiles.load_flat(exp_avg + start, length, TILE)
            last_v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            p_base, p_valid, g_base, g_valid, wide = tiles.pointers(
                param, grad, p, offset, valid, PARAM_DTYPE, GRAD_DTYPE, TILE
            )
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


@triton.jit
def _update(
    block_table, parameter_table, param, hyper, coefficient, clip, first_block, first_word, first_shard, blocks,
    replies, replies_bytes, d, exp_avg_sq, least_root, root_at_zero, master,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    PARAM: tl.constexpr, TENSOR: tl.constexpr, SENDERS: tl.constexpr,
):  # fmt: skip
    """x by m d, or without `d` by mhat / (u + eps)."""
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            reply = tiles.find_message(row, first_shard, replies, replies_bytes, SENDERS)
            its_master = None if master is None else master + start
            d_or_v = tiles.load_flat((exp_avg_sq if d is None else d) + start, length, TILE)
            flag = tiles.flag_of(reply, SENDERS)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            its_clip = tiles.clip_of(clip, p)
            p_base, p_valid, wide = tiles.pointer(param, p, offset, valid, PARAM, TILE)
            if flag == 0:
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                if d is not None:
                    d_or_u, lr = d_or_v, tl.load(h + tiles.H_LR)
                    if coefficient is not None:
                        lr = lr * tl.load(coefficient + p)
                    by = tiles.decode_block(reply, length, TILE, TENSOR, SENDERS) * d_or_u
                else:
                    least, at_zero = tl.load(least_root + p), tl.load(root_at_zero + p)
                    m = tiles.decode_block(reply, length, TILE, TENSOR, SENDERS)
                    d_or_u = tiles.used_root(d_or_v, h, least, at_zero)
                    by, lr = tiles.over_root(m, d_or_u, h), tl.load(h + tiles.H_LR)
                moved = x - lr * (by * its_clip + tl.load(h + tiles.H_WEIGHT_DECAY) * x)
                x = tl.where(d_or_u != 0, moved, x)
                tiles.store_parameter(p_base, its_master, x, valid, p_valid, wide, TILE)


@tiles.entry
def adam_update_kernel(
    block_table, parameter_table, param, hyper, coefficient, clip, first_block, first_word, first_shard, blocks,
    replies, replies_bytes, d, master,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    PARAM_DTYPE: tl.constexpr, REPLIES_TENSOR: tl.constexpr, REPLIES_SENDERS: tl.constexpr,
):  # fmt: skip
    _update(
        block_table, parameter_table, param, hyper, coefficient, clip, first_block, first_word, first_shard, blocks,
        replies, replies_bytes, d, None, None, None, master,
        TILE, BLOCKS_PER_PROGRAM, PARAM_DTYPE, REPLIES_TENSOR, REPLIES_SENDERS,
    )  # fmt: skip


@tiles.entry
def zero_one_update_kernel(
    block_table, parameter_table, param, hyper, clip, first_block, first_word, first_shard, blocks,
    replies, replies_bytes, exp_avg_sq, least_root, root_at_zero, master,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    PARAM_DTYPE: tl.constexpr, REPLIES_TENSOR: tl.constexpr, REPLIES_SENDERS: tl.constexpr,
):  # fmt: skip
    _update(
        block_table, parameter_table, param, hyper, None, clip, first_block, first_word, first_shard, blocks,
        replies, replies_bytes, None, exp_avg_sq, least_root, root_at_zero, master,
        TILE, BLOCKS_PER_PROGRAM, PARAM_DTYPE, REPLIES_TENSOR, REPLIES_SENDERS,
    )  # fmt: skip


PASSES = {
    passes.AdamWarmup: one_launch(adam_warmup_kernel),
    passes.AdamUpdate: one_launch(adam_update_kernel),
    passes.ZeroOneUpdate: one_launch(zero_one_update_kernel),
}

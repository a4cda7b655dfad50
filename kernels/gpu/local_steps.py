"""0/1 Adam's steps between messages and with one, as Triton kernels. `onebit.kernels.passes` has the equations, the
papers' lines and the bytes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl

from onebit.kernels import passes
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import one_launch


@tiles.entry
def zero_one_length_kernel(
    block_table, parameter_table, grad, hyper, flags, first_block, first_word, blocks,
    exp_avg_sq, exp_avg, least_root, root_at_zero, squares,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, GRAD_DTYPE: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            m = tiles.load_flat(exp_avg + start, length, TILE)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            g_base, g_valid, wide = tiles.pointer(grad, p, offset, valid, GRAD_DTYPE, TILE)
            if flag == 0:
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                u = tiles.used_root(v, h, tl.load(least_root + p), tl.load(root_at_zero + p))
                m = tiles.first_moment(g * tl.load(h + tiles.H_GRAD_SCALE), m, h)
                by = tiles.over_root(m, u, h)
                counted = tiles.valid_only(tl.where(u != 0, by * by, 0.0), valid, TILE)
                tl.store(squares + block, tl.sum(counted, axis=0))


@tiles.entry
def zero_one_local_kernel(
    block_table, parameter_table, param, grad, hyper, flags, first_block, first_word, first_shard, blocks,
    exp_avg_sq, exp_avg, residual_value, residual_scale, master, least_root, root_at_zero, clip,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
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
            kept = None if residual_value is None else tiles.load_flat(residual_value + start, length, TILE)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            its_clip = tiles.clip_of(clip, p)
            p_base, p_valid, g_base, g_valid, wide = tiles.pointers(
                param, grad, p, offset, valid, PARAM_DTYPE, GRAD_DTYPE, TILE
            )
            if flag == 0:
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                u = tiles.used_root(v, h, tl.load(least_root + p), tl.load(root_at_zero + p))
                m = tl.where(u != 0, tiles.first_moment(g * tl.load(h + tiles.H_GRAD_SCALE), last_m, h), last_m)
                tiles.store_tile(exp_avg + start, m, valid, wide, TILE)
                if residual_value is not None:
                    its_scale = None if residual_scale is None else residual_scale + shard
                    e = tiles.residual(kept, its_scale)
                    held = e if residual_scale is None else tl.zeros_like(e)
                    e = tl.where(u != 0, e + tl.load(h + tiles.H_LR) * tl.load(h + tiles.H_BIAS1) * m, held)
                    tiles.store_tile(residual_value + start, e, valid, wide, TILE)
                x = tiles.moved(x, tiles.over_root(m, u, h) * its_clip, u, h)
                tiles.store_parameter(p_base, its_master, x, valid, p_valid, wide, TILE)


@tiles.entry
def zero_one_sync_kernel(
    block_table, parameter_table, param, hyper, first_block, first_word, first_shard, blocks,
    replies, replies_bytes, exp_avg_sq, exp_avg, anchor, master, least_root, root_at_zero, decay, factor, clip,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    PARAM_DTYPE: tl.constexpr, REPLIES_TENSOR: tl.constexpr, REPLIES_SENDERS: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            its_master = None if master is None else master + start
            reply = tiles.find_message(row, first_shard, replies, replies_bytes, REPLIES_SENDERS)
            v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            x = tiles.load_flat(anchor + start, length, TILE)
            flag = tiles.flag_of(reply, REPLIES_SENDERS)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            its_clip = tiles.clip_of(clip, p)
            p_base, p_valid, wide = tiles.pointer(param, p, offset, valid, PARAM_DTYPE, TILE)
            if flag == 0:
                total = tiles.decode_block(reply, length, TILE, REPLIES_TENSOR, REPLIES_SENDERS)
                u = tiles.used_root(v, h, tl.load(least_root + p), tl.load(root_at_zero + p))
                by = tl.div_rn(total, u + tl.load(h + tiles.H_EPS))
                moved_x = tl.load(decay + p) * x - by * its_clip
                new_x = tl.where(u != 0, moved_x, x)
                if master is None:
                    new_x = new_x.to(p_base.dtype.element_ty).to(tl.float32)
                m = tl.where(u != 0, tl.load(factor + p) * total, 0.0)
                tiles.store_parameter(p_base, its_master, new_x, valid, p_valid, wide, TILE)
                tiles.store_tile(anchor + start, new_x, valid, wide, TILE)
                tiles.store_tile(exp_avg + start, m, valid, wide, TILE)


PASSES = {
    passes.ZeroOneLength: one_launch(zero_one_length_kernel),
    passes.ZeroOneLocal: one_launch(zero_one_local_kernel),
    passes.ZeroOneSync: one_launch(zero_one_sync_kernel),
}

"""0/1 Adam's full step, and what its variance makes of a momentum, as Triton kernels. `onebit.kernels.passes` has the
equations, the papers' lines and the bytes; its update is in `onebit.kernels.gpu.adam`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from onebit.kernels import passes
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import one_launch


@triton.jit
def _of_live(values, v, at_zero):
    """0 for an element that takes no part."""
    return tl.where(at_zero != 0, values, tl.where(v != 0, values, 0.0))


@tiles.entry
def zero_one_full_kernel(
    block_table, parameter_table, param, grad, hyper, flags, first_block, first_word, first_shard, blocks,
    momentum, momentum_bytes, exp_avg_sq, residual_value, residual_scale, master, least_root, root_at_zero, live, sums,
    counts,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    MOMENTUM_TENSOR: tl.constexpr, MOMENTUM_SENDERS: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, first_block + block, first_word)
            shard, _, _, _ = tiles.find_in_shard(row, first_shard)
            if MOMENTUM_SENDERS is None:
                last_m = tiles.load_flat(momentum + start, length, TILE)
            else:
                message = tiles.find_message(row, first_shard, momentum, momentum_bytes, MOMENTUM_SENDERS)
            its_master = None if master is None else master + start
            last_v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            kept = None if residual_value is None else tiles.load_flat(residual_value + start, length, TILE)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            p_base, p_valid, g_base, g_valid, wide = tiles.pointers(
                param, grad, p, offset, valid, PARAM_DTYPE, GRAD_DTYPE, TILE
            )
            if flag == 0:
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                least, at_zero = tl.load(least_root + p), tl.load(root_at_zero + p)
                if MOMENTUM_SENDERS is not None:
                    last_m = tiles.decode_block(message, length, TILE, MOMENTUM_TENSOR, MOMENTUM_SENDERS)
                last_m = _of_live(last_m, last_v, at_zero)
                m, v = tiles.moments(g * tl.load(h + tiles.H_GRAD_SCALE), last_m, last_v, h)
                if residual_value is not None:
                    its_scale = None if residual_scale is None else residual_scale + shard
                    e = _of_live(tiles.residual(kept, its_scale), last_v, at_zero)
                    tiles.store_tile(residual_value + start, e + tl.load(h + tiles.H_BETA1) * m, valid, wide, TILE)
                tiles.store_tile(exp_avg_sq + start, v, valid, wide, TILE)
                counted = tiles.valid_only(v, valid, TILE)
                byte = tiles.pack(counted != 0, TILE)
                tiles.store_bytes(live + start // 8, byte, length, TILE)
                tl.store(sums + block, tl.sum(counted, axis=0))
                tl.store(counts + block, tiles.how_many(byte).to(tl.float32))
                u = tiles.used_root(v, h, least, at_zero)
                x = tiles.moved(x, tiles.over_root(m, u, h), u, h)
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
            p, _, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            u = tiles.used_root(v, h, tl.load(least_root + p), tl.load(root_at_zero + p))
            divisor = tl.where(u != 0, u + tl.load(h + tiles.H_EPS), tiles.NO_PART)
            inverse = tl.div_rn(tl.full(u.shape, 1.0, tl.float32), divisor)
            tl.store(sums + block, tl.sum(tiles.valid_only(inverse * inverse, valid, TILE), axis=0))


PASSES = {
    passes.ZeroOneFull: one_launch(zero_one_full_kernel),
    passes.ZeroOneInverses: one_launch(zero_one_inverses_kernel),
}

"""LAMB's passes as Triton kernels. `onebit.kernels.passes` has the equations, the papers' lines and the bytes.

The last block of a parameter to finish turns the blocks' partial results into the coefficient, so that no pass needs a
launch a parameter, or the host. The span is the whole layout: its first block, word and shard are 0.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from onebit.kernels import passes
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import launcher, one_launch


@triton.jit
def _first_and_blocks(parameter_table, p, block, offset, BLOCK: tl.constexpr):
    """A parameter's first block and how many it has, from one of them. All but the last have BLOCK elements."""
    return block - offset // BLOCK, tl.cdiv(tl.load(parameter_table + 3 * p + 1), BLOCK)


@tiles.entry
def lamb_moments_kernel(
    block_table, parameter_table, param, grad, hyper, flags, blocks, exp_avg, exp_avg_sq, master,
    state_coefficient, state_average, state_partial, state_counter, coeff_beta, one_minus_coeff_beta, min_coeff,
    max_coeff,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, block, 0)
            its_master = None if master is None else master + start
            last_m = tiles.load_flat(exp_avg + start, length, TILE)
            last_v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            p_base, p_valid, g_base, g_valid, wide = tiles.pointers(
                param, grad, p, offset, valid, PARAM_DTYPE, GRAD_DTYPE, TILE
            )
            if (valid > 0) & (flag == 0):
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                m, v = tiles.moments(g * tl.load(h + tiles.H_GRAD_SCALE), last_m, last_v, h)
                u = tiles.valid_only(tiles.direction(m, v, x, h), valid, TILE)
                x = tiles.valid_only(x, valid, TILE)
                tiles.store_tile(exp_avg + start, m, valid, wide, TILE)
                tiles.store_tile(exp_avg_sq + start, v, valid, wide, TILE)
                tl.store(state_partial + block, tl.sum(x * x, axis=0))
                tl.store(state_partial + blocks + block, tl.sum(u * u, axis=0))
                first, count = _first_and_blocks(parameter_table, p, block, offset, BLOCK_SIZE)
                last = tl.load(state_average + p)  # by every warp, before one of them stores another
                if tiles.finished(state_counter + p, count):
                    x_norm = tl.sqrt_rn(tiles.sum_partials(state_partial + first, count))
                    u_norm = tl.sqrt_rn(tiles.sum_partials(state_partial + blocks + first, count))
                    c = tl.minimum(
                        tl.maximum(tl.div_rn(x_norm, tl.where(u_norm > 0, u_norm, 1.0)), min_coeff), max_coeff
                    )
                    c = tl.where((x_norm > 0) & (u_norm > 0), c, 1.0)
                    tl.store(state_coefficient + p, c)
                    tl.store(state_average + p, coeff_beta * last + one_minus_coeff_beta * c)


@tiles.entry
def lamb_apply_kernel(
    block_table, parameter_table, param, hyper, flags, blocks, exp_avg, exp_avg_sq, master, state_coefficient,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM_DTYPE: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, block, 0)
            its_master = None if master is None else master + start
            m = tiles.load_flat(exp_avg + start, length, TILE)
            v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            p_base, p_valid, wide = tiles.pointer(param, p, offset, valid, PARAM_DTYPE, TILE)
            if flag == 0:
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                c = tl.load(state_coefficient + p)
                x = x - tl.load(h + tiles.H_LR) * c * tiles.direction(m, v, x, h)
                tiles.store_parameter(p_base, its_master, x, valid, p_valid, wide, TILE)


@triton.jit
def _gradient(m, m_prev, gamma, h):
    """ghat = (m - b1 m_prev) / (1 - b1), over gamma_p where there is one"""
    zero = tl.zeros_like(m)
    g = tl.div_rn(m - tl.load(h + tiles.H_BETA1) * m_prev, zero + tl.load(h + tiles.H_ONE_MINUS_BETA1))
    if gamma is not None:
        g = tl.div_rn(g, zero + tl.load(gamma))
    return g


@triton.jit
def _squared_gradient(
    reply, last_reply, last_m, length, gamma, h, TILE: tl.constexpr, TENSOR: tl.constexpr, SENDERS: tl.constexpr
):  # fmt: skip
    """ghat^2. Where m and m_prev have 1 bit each it has two values in a block: of equal and of unequal signs. m_prev is
    a reply, too, or lies at `last_m`."""
    if last_m is None and SENDERS == 1:
        message, _, block_in_shard, word, of_shard = reply
        previous, _, _, _, _ = last_reply
        bits = tiles.bits_in(message, word, of_shard, TENSOR)
        prev_bits = tiles.bits_in(previous, word, of_shard, TENSOR)
        differ = tiles.load_bytes(bits, length, TILE) ^ tiles.load_bytes(prev_bits, length, TILE)
        m = tl.load(tiles.scale_in(message, block_in_shard, TENSOR))
        m_prev = tl.load(tiles.scale_in(previous, block_in_shard, TENSOR))
        of_equal, of_unequal = _gradient(m, m_prev, gamma, h), _gradient(m, -m_prev, gamma, h)
        squared = tl.where(tiles.unpack(differ, TILE), of_unequal * of_unequal, of_equal * of_equal)
    else:
        m = tiles.decode_block(reply, length, TILE, TENSOR, SENDERS)
        if last_m is None:
            m_prev = tiles.decode_block(last_reply, length, TILE, TENSOR, SENDERS)
        else:
            m_prev = tiles.load_flat(last_m, length, TILE)
        g = _gradient(m, m_prev, gamma, h)
        squared = g * g
    return squared


@triton.jit
def _largest_ratio(v, d, gamma, live, h, valid, TILE: tl.constexpr, DENOMINATOR: tl.constexpr):
    """max v_T / v over the elements that count, 0 where none does"""
    its_live = None if live is None else tiles.unpack(tiles.counting(live, valid, TILE), TILE)
    d = tiles.counted_only(d, its_live, valid, TILE)
    counted = (v > 0) & (d > 0)
    if gamma is not None:
        d = d * tl.load(gamma)
    frozen = tl.div_rn(tl.full((TILE,), 1.0, tl.float32), tl.where(counted, d, tiles.NO_PART))  # sqrt(v_T) + eps
    if DENOMINATOR:
        ratio = tl.where(counted, tl.div_rn(frozen, tl.sqrt_rn(v) + tl.load(h + tiles.H_EPS)), 0.0)
    else:
        root = tl.maximum(frozen - tl.load(h + tiles.H_EPS), 0.0)
        ratio = tl.div_rn(root * root, tl.where(v > 0, v, 1.0))
    return tl.max(ratio, axis=0)


@tiles.entry
def lamb_statistics_kernel(
    block_table, parameter_table, hyper, blocks, replies, replies_bytes, previous, d, exp_avg_sq, live, gamma,
    state_coefficient, state_average, state_ratio, state_partial, state_counter,
    factor_min, factor_max, factor_low, factor_high,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    REPLIES_TENSOR: tl.constexpr, REPLIES_SENDERS: tl.constexpr, PREVIOUS_SENDERS: tl.constexpr,
    DENOMINATOR: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, block, 0)
            reply = tiles.find_message(row, 0, replies, replies_bytes, REPLIES_SENDERS)
            last_m = previous + start if PREVIOUS_SENDERS is None else None
            last_reply = tiles.find_message(row, 0, previous, replies_bytes, REPLIES_SENDERS)
            last_v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            its_d = tiles.load_flat(d + start, length, TILE)
            its_live = None if live is None else tiles.load_bytes(live + start // 8, length, TILE)
            flag = tiles.flag_of(reply, REPLIES_SENDERS)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            if (valid > 0) & (flag == 0):
                its_gamma = None if gamma is None else gamma + p
                squared = _squared_gradient(
                    reply, last_reply, last_m, length, its_gamma, h, TILE, REPLIES_TENSOR, REPLIES_SENDERS
                )
                v = tl.load(h + tiles.H_BETA2) * last_v + tl.load(h + tiles.H_ONE_MINUS_BETA2) * squared
                tiles.store_tile(exp_avg_sq + start, v, valid, valid == TILE, TILE)
                largest = _largest_ratio(v, its_d, its_gamma, its_live, h, valid, TILE, DENOMINATOR)
                tl.store(state_partial + block, largest)
                first, count = _first_and_blocks(parameter_table, p, block, offset, BLOCK_SIZE)
                last = tl.load(state_ratio + p)  # by every warp, before one of them stores another
                if tiles.finished(state_counter + p, count):
                    largest = tiles.max_partials(state_partial + first, count)
                    new = tl.where(largest > 0, largest, 1.0)
                    new = tl.minimum(tl.maximum(new, factor_low * last), factor_high * last)
                    new = tl.minimum(tl.maximum(new, factor_min), factor_max)
                    tl.store(state_ratio + p, new)
                    tl.store(state_coefficient + p, new * tl.load(state_average + p))


_launch_moments, _launch_apply = launcher(lamb_moments_kernel), launcher(lamb_apply_kernel)


def lamb_warmup(work: passes.LambWarmup) -> None:
    """Two launches: the norms are needed whole before x moves."""
    found = work.arguments()
    _launch_moments(found)
    if work.between is not None:
        work.between()
    _launch_apply(found)


PASSES: dict[type[passes.Pass], Callable[..., None]] = {
    passes.LambWarmup: lamb_warmup,
    passes.LambStatistics: one_launch(lamb_statistics_kernel),
}

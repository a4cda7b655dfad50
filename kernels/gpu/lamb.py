"""LAMB's passes as Triton kernels. The last block of a parameter to finish turns the blocks' partial results into the
coefficient, so that no pass needs a launch a parameter, or the host.

    warmup       u = mhat / (sqrt(vhat) + eps) + wd x;   c = clip(||x|| / ||u||);   x = x - lr c u
                 c_avg = b3 c_avg + (1 - b3) c
    statistics   ghat = (m - b1 m_prev) / (1 - b1);   v = b2 v + (1 - b2) ghat^2
                 r = clip(max v_T / v);   c = r c_avg

With gamma, one a parameter (section 4.3): ghat = ((m - b1 m_prev) / (1 - b1)) / gamma_p with m and m_prev
both scaled, d = 1 / ((sqrt(v_T) + eps) gamma_p). Where `live` has no bit, a ratio does not count.

1-bit LAMB (Li et al. 2021), equation 1 and Algorithm 1, lines 2 and 15 to 20. Line 21 is `adam_update` with c as its
coefficient.

Bytes an element, fp32: warmup reads g 4, m 4, v 4, x 4, writes m 4, v 4, then reads m 4, v 4, x 4, writes x 4: 40;
statistics reads v 4, d 4, bits 2/8, writes v 4: 12.3. With `live` 1/8 more.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import (
    TYPES,
    launch,
    momentum_arguments,
    replies_arguments,
    span_arguments,
)


@triton.jit
def _first_and_blocks(parameter_table, p, block, offset, BLOCK: tl.constexpr):
    """A parameter's first block and how many it has, from one of them. All but the last have BLOCK elements."""
    return block - offset // BLOCK, tl.cdiv(tl.load(parameter_table + 3 * p + 1), BLOCK)


@tiles.entry
def lamb_moments_kernel(
    block_table, parameter_table, p_addresses, g_addresses, hyper, flags, blocks, exp_avg, exp_avg_sq, master,
    coefficient, average, partial, counter, coeff_beta, one_minus_coeff_beta, min_coeff, max_coeff,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, block, 0)
            its_master = None if master is None else master + start
            last_m = tiles.load_flat(exp_avg + start, length, TILE)
            last_v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            p_base, p_valid, p_wide = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            g_base, g_valid, g_wide = tiles.pointer(g_addresses, p, offset, valid, GRAD, TILE)
            wide = p_wide & g_wide
            h = tiles.group_row(hyper, group)
            if (valid > 0) & (flag == 0):
                g = tiles.load_tile(g_base, g_valid, wide, TILE)
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                m, v = tiles.moments(g * tl.load(h + tiles.H_GRAD_SCALE), last_m, last_v, h)
                u = tiles.valid_only(tiles.direction(m, v, x, h), valid, TILE)
                x = tiles.valid_only(x, valid, TILE)
                tiles.store_tile(exp_avg + start, m, valid, wide, TILE)
                tiles.store_tile(exp_avg_sq + start, v, valid, wide, TILE)
                tl.store(partial + block, tl.sum(x * x, axis=0))
                tl.store(partial + blocks + block, tl.sum(u * u, axis=0))
                first, count = _first_and_blocks(parameter_table, p, block, offset, BLOCK)
                last = tl.load(average + p)  # by every warp, before one of them stores another
                if tiles.finished(counter + p, count):
                    x_norm = tl.sqrt_rn(tiles.sum_partials(partial + first, count))
                    u_norm = tl.sqrt_rn(tiles.sum_partials(partial + blocks + first, count))
                    c = tl.minimum(
                        tl.maximum(tl.div_rn(x_norm, tl.where(u_norm > 0, u_norm, 1.0)), min_coeff), max_coeff
                    )
                    c = tl.where((x_norm > 0) & (u_norm > 0), c, 1.0)
                    tl.store(coefficient + p, c)
                    tl.store(average + p, coeff_beta * last + one_minus_coeff_beta * c)


@tiles.entry
def lamb_apply_kernel(
    block_table, parameter_table, p_addresses, hyper, flags, blocks, exp_avg, exp_avg_sq, master, coefficient,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, block, 0)
            its_master = None if master is None else master + start
            m = tiles.load_flat(exp_avg + start, length, TILE)
            v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            p_base, p_valid, wide = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            h = tiles.group_row(hyper, group)
            if flag == 0:
                x = tiles.load_parameter(p_base, its_master, p_valid, wide, length, TILE)
                c = tl.load(coefficient + p)
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
    message, previous, prev_flat, row_bytes, place, word, of_shard, length, gamma, h,
    TILE: tl.constexpr, TENSOR: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """ghat^2. Where m and m_prev have 1 bit each it has two values in a block: of equal and of unequal signs."""
    if previous is not None and COPIES == 1:
        bits = tiles.bits_in(message, word, of_shard, TENSOR)
        prev_bits = tiles.bits_in(previous, word, of_shard, TENSOR)
        differ = tiles.load_bytes(bits, length, TILE) ^ tiles.load_bytes(prev_bits, length, TILE)
        m = tl.load(tiles.scale_in(message, place, TENSOR))
        m_prev = tl.load(tiles.scale_in(previous, place, TENSOR))
        of_equal, of_unequal = _gradient(m, m_prev, gamma, h), _gradient(m, -m_prev, gamma, h)
        squared = tl.where(tiles.unpack(differ, TILE), of_unequal * of_unequal, of_equal * of_equal)
    else:
        m = tiles.decode_block(message, row_bytes, place, word, of_shard, length, TILE, TENSOR, COPIES)
        if previous is not None:
            m_prev = tiles.decode_block(previous, row_bytes, place, word, of_shard, length, TILE, TENSOR, COPIES)
        else:
            m_prev = tiles.load_flat(prev_flat, length, TILE)
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
    block_table, parameter_table, hyper, blocks, messages, row_bytes, prev_flat, prev_messages, d, exp_avg_sq, live,
    gamma, coefficient, average, ratio, partial, counter,
    factor_min, factor_max, factor_low, factor_high,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    TENSOR: tl.constexpr, DENOMINATOR: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, start, length = tiles.find(block_table, block, 0)
            shard, place, word, of_shard = tiles.find_in_shard(row, 0)
            message = messages + shard * COPIES * row_bytes
            its_previous = None if prev_messages is None else prev_messages + shard * COPIES * row_bytes
            its_prev_flat = None if prev_flat is None else prev_flat + start
            last_v = tiles.load_flat(exp_avg_sq + start, length, TILE)
            its_d = tiles.load_flat(d + start, length, TILE)
            its_live = None if live is None else tiles.load_bytes(live + start // 8, length, TILE)
            flag = tiles.flag_of(message, row_bytes, COPIES)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            h = tiles.group_row(hyper, group)
            if (valid > 0) & (flag == 0):
                its_gamma = None if gamma is None else gamma + p
                squared = _squared_gradient(
                    message, its_previous, its_prev_flat, row_bytes, place, word, of_shard, length, its_gamma, h,
                    TILE, TENSOR, COPIES,
                )  # fmt: skip
                v = tl.load(h + tiles.H_BETA2) * last_v + tl.load(h + tiles.H_ONE_MINUS_BETA2) * squared
                tiles.store_tile(exp_avg_sq + start, v, valid, valid == TILE, TILE)
                largest = _largest_ratio(v, its_d, its_gamma, its_live, h, valid, TILE, DENOMINATOR)
                tl.store(partial + block, largest)
                first, count = _first_and_blocks(parameter_table, p, block, offset, BLOCK)
                last = tl.load(ratio + p)  # by every warp, before one of them stores another
                if tiles.finished(counter + p, count):
                    largest = tiles.max_partials(partial + first, count)
                    new = tl.where(largest > 0, largest, 1.0)
                    new = tl.minimum(tl.maximum(new, factor_low * last), factor_high * last)
                    new = tl.minimum(tl.maximum(new, factor_min), factor_max)
                    tl.store(ratio + p, new)
                    tl.store(coefficient + p, new * tl.load(average + p))


def _of_whole_layout(arguments: dict[str, Any]) -> dict[str, Any]:
    """Norms and maxima are a parameter's, so the span is the whole layout: its first block, word and shard are 0."""
    return {name: value for name, value in arguments.items() if not name.startswith("first_")}


def lamb_warmup(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    state: LambState,
    *,
    coeff_beta: float,
    min_coeff: float,
    max_coeff: float,
    between: Callable[[], None] | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.lamb_warmup` in two launches: the norms are needed whole before x moves."""
    shared: dict[str, Any] = {
        **_of_whole_layout(span_arguments(span, exp_avg.device)),
        "p_addresses": params.addresses,
        "hyper": hyper,
        "flags": flags,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "master": master,
        "coefficient": state.coefficient,
        "PARAM": TYPES[params.dtype],
    }
    moments = {
        **shared,
        "BLOCK": span.layout.block_size,
        "g_addresses": grads.addresses,
        "average": state.average,
        "partial": state.partial,
        "counter": state.counter,
        "coeff_beta": coeff_beta,
        "one_minus_coeff_beta": 1 - coeff_beta,
        "min_coeff": min_coeff,
        "max_coeff": max_coeff,
        "GRAD": TYPES[grads.dtype],
    }
    launch(lamb_moments_kernel, span.count, moments, exp_avg, params.dtype)
    if between is not None:
        between()
    launch(lamb_apply_kernel, span.count, shared, exp_avg, params.dtype)


def lamb_statistics(
    span: Span,
    replies: Messages,
    previous: Tensor | Messages,
    d: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    state: LambState,
    *,
    factor_min: float,
    factor_max: float,
    factor_threshold: float,
    ratio: Literal["variance", "denominator"] = "variance",
    live: Tensor | None = None,
    gamma: Tensor | None = None,
) -> None:
    """`onebit.kernels.passes.Backend.lamb_statistics` in one launch."""
    arguments = {
        **_of_whole_layout({**span_arguments(span, d.device), **replies_arguments(span, replies)}),
        **momentum_arguments(previous, "prev_"),
        "BLOCK": span.layout.block_size,
        "hyper": hyper,
        "d": d,
        "exp_avg_sq": exp_avg_sq,
        "live": live,
        "gamma": gamma,
        "coefficient": state.coefficient,
        "average": state.average,
        "ratio": state.ratio,
        "partial": state.partial,
        "counter": state.counter,
        "factor_min": factor_min,
        "factor_max": factor_max,
        "factor_low": 1 - factor_threshold,
        "factor_high": 1 + factor_threshold,
        "DENOMINATOR": ratio == "denominator",
    }
    launch(lamb_statistics_kernel, span.count, arguments, d, d.dtype)

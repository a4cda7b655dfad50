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

import torch
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
def _moments_block(
    p_base, g_base, g_valid, h, exp_avg, exp_avg_sq, master, x_partial, u_partial, valid,
    TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    g = tiles.load_tile(g_base, g_valid, TILE, FULL) * tl.load(h + tiles.H_GRAD_SCALE)
    m, v = tiles.moments(
        g, tiles.load_tile(exp_avg, valid, TILE, FULL), tiles.load_tile(exp_avg_sq, valid, TILE, FULL), h
    )
    x = tiles.load_parameter(p_base, master, valid, TILE, FULL)
    u = tiles.direction(m, v, x, h)
    if not FULL:
        u = tl.where(tl.arange(0, TILE) < valid, u, 0.0)
    tiles.store_tile(exp_avg, m, valid, TILE, FULL)
    tiles.store_tile(exp_avg_sq, v, valid, TILE, FULL)
    tl.store(x_partial, tl.sum(x * x, axis=0))
    tl.store(u_partial, tl.sum(u * u, axis=0))


@triton.jit
def _first_and_blocks(parameter_table, p, BLOCK: tl.constexpr):
    return tl.load(parameter_table + 3 * p), tl.cdiv(tl.load(parameter_table + 3 * p + 1), BLOCK)


@tiles.entry
def lamb_moments_kernel(
    owner, parameter_table, p_addresses, g_addresses, hyper, flags, blocks, exp_avg, exp_avg_sq, master,
    coefficient, average, partial, counter, coeff_beta, one_minus_coeff_beta, min_coeff, max_coeff,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if (block < blocks) & (flag == 0):
            p, group, offset, valid = tiles.locate(block, owner, parameter_table, BLOCK)
            if valid > 0:
                p_base, _, p_aligned = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
                g_base, g_valid, g_aligned = tiles.pointer(g_addresses, p, offset, valid, GRAD, TILE)
                h = tiles.group_row(hyper, group)
                start = block.to(tl.int64) * BLOCK
                x = None if master is None else master + start
                if p_aligned & g_aligned:
                    _moments_block(
                        p_base, g_base, g_valid, h, exp_avg + start, exp_avg_sq + start, x,
                        partial + block, partial + blocks + block, valid, TILE, True,
                    )  # fmt: skip
                else:
                    _moments_block(
                        p_base, g_base, g_valid, h, exp_avg + start, exp_avg_sq + start, x,
                        partial + block, partial + blocks + block, valid, TILE, False,
                    )  # fmt: skip
                first, count = _first_and_blocks(parameter_table, p, BLOCK)
                if tiles.finished(counter + p, count):
                    x_norm = tl.sqrt_rn(tiles.sum_partials(partial + first, count))
                    u_norm = tl.sqrt_rn(tiles.sum_partials(partial + blocks + first, count))
                    c = tl.minimum(
                        tl.maximum(tl.div_rn(x_norm, tl.where(u_norm > 0, u_norm, 1.0)), min_coeff), max_coeff
                    )
                    c = tl.where((x_norm > 0) & (u_norm > 0), c, 1.0)
                    tl.store(coefficient + p, c)
                    tl.store(average + p, coeff_beta * tl.load(average + p) + one_minus_coeff_beta * c)


@triton.jit
def _apply_block(
    p_base, p_valid, h, exp_avg, exp_avg_sq, master, c, valid, TILE: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    m = tiles.load_tile(exp_avg, valid, TILE, FULL)
    v = tiles.load_tile(exp_avg_sq, valid, TILE, FULL)
    x = tiles.load_parameter(p_base, master, valid, TILE, FULL)
    x = x - tl.load(h + tiles.H_LR) * c * tiles.direction(m, v, x, h)
    tiles.store_parameter(p_base, master, x, valid, p_valid, TILE, FULL)


@tiles.entry
def lamb_apply_kernel(
    owner, parameter_table, p_addresses, hyper, flags, blocks, exp_avg, exp_avg_sq, master, coefficient,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, PARAM: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags)
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if (block < blocks) & (flag == 0):
            p, group, offset, valid = tiles.locate(block, owner, parameter_table, BLOCK)
            base, p_valid, aligned = tiles.pointer(p_addresses, p, offset, valid, PARAM, TILE)
            h = tiles.group_row(hyper, group)
            start = block.to(tl.int64) * BLOCK
            x = None if master is None else master + start
            c = tl.load(coefficient + p)
            if aligned:
                _apply_block(base, p_valid, h, exp_avg + start, exp_avg_sq + start, x, c, valid, TILE, True)
            else:
                _apply_block(base, p_valid, h, exp_avg + start, exp_avg_sq + start, x, c, valid, TILE, False)


@triton.jit
def _statistics_block(
    scales, bits, prev_flat, prev_scales, prev_bits, block, shard_blocks, row_bytes,
    d, exp_avg_sq, live, gamma, partial, h, valid,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, TENSOR: tl.constexpr, DENOMINATOR: tl.constexpr,
    COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    m = tiles.decode_block(scales, bits, block, shard_blocks, row_bytes, BLOCK, TILE, TENSOR, COPIES, BITS)
    m_prev = tiles.load_momentum(
        prev_flat, prev_scales, prev_bits, block, shard_blocks, row_bytes, valid,
        BLOCK, TILE, FULL, TENSOR, COPIES, BITS,
    )  # fmt: skip
    one_minus_beta1 = tl.zeros_like(m) + tl.load(h + tiles.H_ONE_MINUS_BETA1)
    g = tl.div_rn(m - tl.load(h + tiles.H_BETA1) * m_prev, one_minus_beta1)
    if gamma is not None:
        g = tl.div_rn(g, tl.zeros_like(g) + tl.load(gamma))
    v = tiles.load_tile(exp_avg_sq, valid, TILE, FULL)
    v = tl.load(h + tiles.H_BETA2) * v + tl.load(h + tiles.H_ONE_MINUS_BETA2) * (g * g)
    tiles.store_tile(exp_avg_sq, v, valid, TILE, FULL)
    d = tiles.load_tile(d, valid, TILE, FULL)
    counted = (v > 0) & (d > 0) & (tl.arange(0, TILE) < valid)
    if live is not None:
        counted = counted & tiles.load_bits(live, BLOCK, TILE)
    if gamma is not None:
        d = d * tl.load(gamma)
    frozen = tl.div_rn(tl.full((TILE,), 1.0, tl.float32), tl.where(counted, d, 1.0))  # sqrt(v_T) + eps
    if DENOMINATOR:
        ratio = tl.div_rn(frozen, tl.sqrt_rn(v) + tl.load(h + tiles.H_EPS))
    else:
        root = tl.maximum(frozen - tl.load(h + tiles.H_EPS), 0.0)
        ratio = tl.div_rn(root * root, tl.where(counted, v, 1.0))
    tl.store(partial, tl.max(tl.where(counted, ratio, 0.0), axis=0))


@tiles.entry
def lamb_statistics_kernel(
    owner, parameter_table, hyper, blocks, shard_blocks, row_bytes, header, scales, bits,
    prev_flat, prev_scales, prev_bits, d, exp_avg_sq, live, gamma, coefficient, average, ratio, partial, counter,
    factor_min, factor_max, factor_low, factor_high,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    TENSOR: tl.constexpr, DENOMINATOR: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            p, group, _, valid = tiles.locate(block, owner, parameter_table, BLOCK)
            if (valid > 0) & (tiles.flag_of_block(header, block, shard_blocks, row_bytes, COPIES) == 0):
                h = tiles.group_row(hyper, group)
                start = block.to(tl.int64) * BLOCK
                block_live = None if live is None else live + block.to(tl.int64) * (BLOCK // 8)
                block_gamma = None if gamma is None else gamma + p
                if valid == TILE:
                    _statistics_block(
                        scales, bits, prev_flat, prev_scales, prev_bits, block, shard_blocks, row_bytes,
                        d + start, exp_avg_sq + start, block_live, block_gamma, partial + block, h, valid,
                        BLOCK, TILE, True, TENSOR, DENOMINATOR, COPIES, BITS,
                    )  # fmt: skip
                else:
                    _statistics_block(
                        scales, bits, prev_flat, prev_scales, prev_bits, block, shard_blocks, row_bytes,
                        d + start, exp_avg_sq + start, block_live, block_gamma, partial + block, h, valid,
                        BLOCK, TILE, False, TENSOR, DENOMINATOR, COPIES, BITS,
                    )  # fmt: skip
                first, count = _first_and_blocks(parameter_table, p, BLOCK)
                if tiles.finished(counter + p, count):
                    largest = tiles.max_partials(partial + first, count)
                    new = tl.where(largest > 0, largest, 1.0)
                    last = tl.load(ratio + p)
                    new = tl.minimum(tl.maximum(new, factor_low * last), factor_high * last)
                    new = tl.minimum(tl.maximum(new, factor_min), factor_max)
                    tl.store(ratio + p, new)
                    tl.store(coefficient + p, new * tl.load(average + p))


def _whole_layout_arguments(span: Span, device: torch.device) -> dict[str, Any]:
    """Norms and maxima are a parameter's, so the span is the whole layout: its first block is 0."""
    return {name: value for name, value in span_arguments(span, device).items() if name != "first_block"}


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
    """`onebit.kernels.reference.lamb_warmup` in two launches: the norms are needed whole before x moves."""
    shared: dict[str, Any] = {
        **_whole_layout_arguments(span, exp_avg.device),
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
    """`onebit.kernels.reference.lamb_statistics` in one launch."""
    arguments = {
        **_whole_layout_arguments(span, d.device),
        **momentum_arguments(previous, "prev_"),
        **replies_arguments(replies),
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

"""1-bit LAMB's statistics: a loop over blocks that leaves one number a block, then one over parameters.

    ghat = (m - b1 m_prev) / (1 - b1);   v = b2 v + (1 - b2) ghat^2;   r = clip(max v_T / v);   c = r c_avg

Messages scaled by gamma, one a parameter: ghat = ((m - b1 m_prev) / (1 - b1)) / gamma_p with m and m_prev both scaled,
d = 1 / ((sqrt(v_T) + eps) gamma_p). Where `live` has no bit, a ratio does not count.

Bytes an element: reads v 4, d 4, bits 2/8, writes v 4: 12.3. With `live` 1/8 more.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import Tensor

from onebit.kernels.cpu.blocks import (
    ALL,
    ONE,
    ZERO,
    any_flag,
    at,
    first_and_blocks,
    first_bits,
    hyper_of,
    kept_bits,
    locate,
    momentum_at,
    of_message,
    over,
    packing,
    parts,
    signed,
    unpack,
    up,
)
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import WIDTH, largest, root, splat, where
from onebit.kernels.cpu.memory import bits_at, float_at, load, set_float, store
from onebit.kernels.cpu.threads import over_blocks
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Span
from onebit.kernels.data.wire import Messages


@tile
def _square(m, m_prev, h, gamma):
    """(1 - beta2) ghat^2"""
    g = (m - h.beta1 * m_prev) / h.one_minus_beta1 / gamma
    return h.one_minus_beta2 * (g * g)


@tile
def _ratio_lanes(i, counts, square, d_at, v_at, h, gamma, denominator):
    """v of sixteen elements, and v_T / v, 0 where that does not count."""
    old, d = load(v_at + 4 * i), load(d_at + 4 * i)
    v = h.beta2 * old + square
    store(v_at + 4 * i, where(counts, v, old))
    frozen = ONE / (d * gamma)  # sqrt(v_T) + eps
    if denominator != 0:
        ratio = frozen / (root(v) + h.eps)
    else:
        above = frozen - h.eps
        above = where(above > ZERO, above, ZERO)
        ratio = above * above / v
    return where(counts & (v > ZERO) & (d > ZERO), ratio, ZERO)


@tile
def _larger(a, b):
    return where(a > b, a, b)


@tile
def _statistics_block(
    n, valid, kept, m, bits, m_at, m_flat, m_prev, bits_prev, d_at, v_at, h, gamma, denominator
):  # fmt: skip
    """The largest ratio. Where both momenta are packed, ghat^2 has two values: where the sign stayed, and changed.
    Else m lies at `m_at`, or is what the bits stand for, and the momentum before it at `m_flat`."""
    found = splat(ZERO)
    stayed, changed = _square(splat(m), splat(m_prev), h, gamma), _square(splat(m), splat(-m_prev), h, gamma)
    for i in range(0, n, WIDTH):
        if m_at != 0:
            square = _square(load(m_at + 4 * i), load(m_flat + 4 * i), h, gamma)
        elif bits_prev != 0:
            square = where(bits_at(bits + i // 8) ^ bits_at(bits_prev + i // 8), changed, stayed)
        else:
            square = _square(signed(bits_at(bits + i // 8), m), load(m_flat + 4 * i), h, gamma)
        counts = ALL if i + WIDTH <= valid else first_bits(valid - i)
        ratio = _ratio_lanes(i, counts, square, d_at, v_at, h, gamma, denominator)
        if kept != 0:
            ratio = where(bits_at(kept + i // 8), ratio, ZERO)
        found = _larger(ratio, found)
    return largest(found)


@Loop
def _statistics(
    first: int, stop: int, scratch: int, owner: int, rows: int, first_block: int, size: int,
    hyper: int, shard_blocks: int, messages: int, header: int, scales: int, bits: int, row_bytes: int, tensor: int,
    copies: int, planes: int, prev_flat: int, prev_scales: int, prev_bits: int, prev_row_bytes: int, prev_tensor: int,
    prev_copies: int, prev_planes: int, d: int, exp_avg_sq: int, live: int, gammas: int, partial: int, denominator: int,
) -> None:  # fmt: skip
    if any_flag(header, messages, row_bytes) != 0:
        return
    prev_packed = prev_bits != 0 and prev_copies == 1 and prev_planes == 1
    for block in range(first, stop):
        p, group, _, valid = locate(first_block + block, owner, rows, size)
        kept = 0 if live == 0 else kept_bits(live + block * (size // 8), valid, size, scratch + 8 * size)
        scale, its_bits = of_message(scales, bits, block, shard_blocks, row_bytes, size, tensor, copies, planes)
        prev_scale, its_prev = of_message(
            prev_scales, prev_bits, block, shard_blocks, prev_row_bytes, size, prev_tensor, prev_copies, prev_planes
        )
        start = 4 * block * size
        m_at, its_flat = 0, prev_flat + start
        if copies > 1 or planes > 1:
            m_at = scratch
            unpack(scale, its_bits, size, copies, planes, row_bytes, up(valid), m_at, 0)
        if prev_bits != 0 and not prev_packed:
            its_flat = scratch + 4 * size
            unpack(prev_scale, its_prev, size, prev_copies, prev_planes, prev_row_bytes, up(valid), its_flat, 0)
        ratio = _statistics_block(
            up(valid), valid, kept, float_at(scale), its_bits, m_at, its_flat,
            float_at(prev_scale) if prev_packed else ZERO, its_prev if prev_packed else 0, d + start,
            exp_avg_sq + start, hyper_of(hyper, group), ONE if gammas == 0 else float_at(gammas + 4 * p), denominator,
        )  # fmt: skip
        set_float(partial + 4 * block, ratio)


@Loop
def _ratios(
    parameters: int, rows: int, size: int, row_bytes: int, messages: int, header: int, partial: int,
    coefficient: int, average: int, last_ratio: int,
    factor_min: float, factor_max: float, factor_low: float, factor_high: float,
) -> None:  # fmt: skip
    if any_flag(header, messages, row_bytes) != 0:
        return
    low, high = np.float32(factor_low), np.float32(factor_high)
    for p in range(parameters):
        first, count = first_and_blocks(rows, p, size)
        found = ZERO
        for block in range(first, first + count):
            found = max(found, float_at(partial + 4 * block))
        r, last = found if found > ZERO else ONE, float_at(last_ratio + 4 * p)
        r = min(max(r, low * last), high * last)
        r = min(max(r, np.float32(factor_min)), np.float32(factor_max))
        set_float(last_ratio + 4 * p, r)
        set_float(coefficient + 4 * p, r * float_at(average + 4 * p))


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
    """`onebit.kernels.reference.lamb_statistics` in one loop."""
    form, (header, scales, bits) = replies.format, parts(replies)
    owner, rows, first_block, size = over(span)
    arguments = (
        owner, rows, first_block, size, at(hyper), form.shard_blocks, replies.rows, header, scales, bits,
        *packing(replies), *momentum_at(previous), at(d), at(exp_avg_sq), at(live), at(gamma), at(state.partial),
        int(ratio == "denominator"),
    )  # fmt: skip
    over_blocks(_statistics, span.count, size, arguments, scratch_blocks=2)
    _ratios(
        span.layout.parameters, rows, size, form.nbytes, replies.rows, header, at(state.partial),
        at(state.coefficient), at(state.average), at(state.ratio),
        factor_min, factor_max, 1 - factor_threshold, 1 + factor_threshold,
    )  # fmt: skip

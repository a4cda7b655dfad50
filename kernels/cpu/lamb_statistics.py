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
    any_flag,
    at,
    blocks_of,
    first_bits,
    hyper_of,
    kept_bits,
    locate,
    message_of,
    messages_at,
    momentum_at,
    of_message,
    over,
    signed,
    unpack,
    up,
)
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.lanes import ONE, WIDTH, ZERO, largest, root, splat, where
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
    first: int, stop: int, scratch: int, blocks: int, parameters: int, size: int,
    hyper: int, rows: int, messages: int, row_bytes: int, tensor: int, copies: int,
    prev_flat: int, previous: int, prev_copies: int,
    d: int, exp_avg_sq: int, live: int, gammas: int, partial: int, denominator: int,
) -> None:  # fmt: skip
    if any_flag(messages, rows, row_bytes) != 0:
        return
    prev_packed = previous != 0 and prev_copies == 1
    for block in range(first, stop):
        its = locate(blocks, parameters, block)
        start, n, h = 4 * its.start, up(its.valid), hyper_of(hyper, its.group)
        kept = 0 if live == 0 else kept_bits(live + its.start // 8, its.valid, its.length, scratch + 8 * size)
        scale, bits = of_message(message_of(messages, its, row_bytes, copies), its, tensor)
        prev_scale, prev_bits = of_message(message_of(previous, its, row_bytes, prev_copies), its, tensor)
        m_at, its_flat = 0, prev_flat + start
        if copies != 1:
            m_at = scratch
            unpack(scale, bits, row_bytes, copies, n, m_at, 0)
        if previous != 0 and not prev_packed:
            its_flat = scratch + 4 * size
            unpack(prev_scale, prev_bits, row_bytes, prev_copies, n, its_flat, 0)
        ratio = _statistics_block(
            n, its.valid, kept, float_at(scale), bits, m_at, its_flat,
            float_at(prev_scale) if prev_packed else ZERO, prev_bits if prev_packed else 0, d + start,
            exp_avg_sq + start, h, ONE if gammas == 0 else float_at(gammas + 4 * its.parameter), denominator,
        )  # fmt: skip
        set_float(partial + 4 * block, ratio)


@Loop
def _ratios(
    count: int, parameters: int, size: int, rows: int, messages: int, row_bytes: int,
    partial: int, coefficient: int, average: int, last_ratio: int,
    factor_min: float, factor_max: float, factor_low: float, factor_high: float,
) -> None:  # fmt: skip
    if any_flag(messages, rows, row_bytes) != 0:
        return
    low, high = np.float32(factor_low), np.float32(factor_high)
    stop = 0
    for p in range(count):
        first, stop = stop, stop + blocks_of(parameters, p, size)
        found = ZERO
        for block in range(first, stop):
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
    """`onebit.kernels.passes.Backend.lamb_statistics` in one loop."""
    blocks, parameters, size = over(span)
    arguments = (
        blocks, parameters, size, at(hyper), replies.rows, *messages_at(replies), *momentum_at(previous), at(d),
        at(exp_avg_sq), at(live), at(gamma), at(state.partial), int(ratio == "denominator"),
    )  # fmt: skip
    over_blocks(_statistics, span, arguments, scratch_blocks=2)
    _ratios(
        span.layout.parameters, parameters, size, replies.rows, at(replies.buffer), replies.format.nbytes,
        at(state.partial), at(state.coefficient), at(state.average), at(state.ratio),
        factor_min, factor_max, 1 - factor_threshold, 1 + factor_threshold,
    )  # fmt: skip

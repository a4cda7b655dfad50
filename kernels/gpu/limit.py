"""How long a step by m is, of each parameter, and how far it is made shorter: numbers of blocks and of parameters.

    squares    q_p = w_p^2 (sum over blocks of s_b^2 D_b)          limit      f_p = limit_p / sqrt(q_p / n_p), or 1

The sum has one order everywhere: lane i adds up blocks i, i + LANES, ..., and of the lanes the second half is added to
the first until one is left. All is fp64: `onebit.kernels.cpu.limit` has the same bits.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from onebit.kernels import passes
from onebit.kernels.data.limit import LANES
from onebit.kernels.data.wire import HEADER_WORDS
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import launcher

PARAMETERS = 1024  # at a time
HALVINGS = tl.constexpr(LANES.bit_length() - 1)
SCALES = tl.constexpr(HEADER_WORDS)  # fp32 words before the scales of a message


@triton.jit
def mean_scale(messages, block_table, block, there, row_words, SENDERS: tl.constexpr, TENSOR: tl.constexpr):
    """s of some blocks, fp64: the mean of what their messages have."""
    row = block_table + block * tiles.B_COLUMNS
    shard = tl.load(row + tiles.B_SHARD, mask=there, other=0).to(tl.int64)
    at = messages.to(tl.pointer_type(tl.float32)) + shard * SENDERS * row_words + SCALES
    if not TENSOR:
        at += tl.load(row + tiles.B_BLOCK_IN_SHARD, mask=there, other=0)
    total = tl.zeros(block.shape, tl.float64)
    for i in range(SENDERS):
        total += tl.load(at + i * row_words, mask=there, other=0).to(tl.float64)
    return total / SENDERS


@triton.jit
def halved(values, TIMES: tl.constexpr):
    """The sum of 2^TIMES values, the second half added to the first until one is left."""
    for _ in tl.static_range(TIMES):
        values = tl.sum(tl.reshape(values, (2, values.shape[0] // 2)), axis=0)
    return tl.sum(values, axis=0)


@tiles.entry
def step_squares_kernel(
    block_table, first_blocks, parameters, values, replies, replies_bytes, weight, squares,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, REPLIES_SENDERS: tl.constexpr, REPLIES_TENSOR: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        p = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if p < parameters:
            total = tl.zeros((TILE,), tl.float64)
            stop = tl.load(first_blocks + p + 1)
            for start in range(tl.load(first_blocks + p), stop, TILE):
                block = start + tl.arange(0, TILE)
                there = block < stop
                value = tl.load(values + block, mask=there, other=0).to(tl.float64)
                if replies is not None:
                    row_words = (replies_bytes // 4).to(tl.int64)
                    s = mean_scale(replies, block_table, block, there, row_words, REPLIES_SENDERS, REPLIES_TENSOR)
                    value = s * s * value
                total += value
            found = halved(total, HALVINGS)
            if weight is not None:
                w = tl.load(weight + p).to(tl.float64)
                found = found * (w * w)
            tl.store(squares + p, found)


@triton.jit
def of_usual(number, usual):
    return tl.where(number > 0, tl.abs(usual) * number, 0)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@tiles.entry
def step_limit_kernel(
    squares, numels, parameters, replies, replies_rows, replies_bytes, usual, least, times, trusted, factor, shortened,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    flag = 1 if replies is None else tiles.any_flag(replies, replies_rows, replies_bytes)
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, parameters, TILE):
        p = start + tl.arange(0, TILE)
        there = p < parameters
        n = tl.load(numels + p, mask=there, other=0)
        rms = tl.sqrt(tl.load(squares + p, mask=there, other=0) / tl.maximum(n, 1).to(tl.float64))
        r = tl.load(usual + p, mask=there, other=0)
        if flag == 0:
            now = rms.to(tl.float32)
            smaller = tl.where((r < 0) & (now > 0), tl.minimum(-r, now), r)
            r = tl.where(r == 0, now, smaller)
            tl.store(usual + p, r, mask=there)
        limit_p = larger(of_usual(times, r), least)
        trusted_p = larger(of_usual(trusted, r), limit_p)
        found = tl.where(rms <= trusted_p.to(tl.float64), 1.0, limit_p.to(tl.float64) / tl.where(rms == 0, 1.0, rms))
        tl.store(factor + p, found.to(tl.float32), mask=there)
        total += tl.where(found < 1, n, 0)
    tl.store(shortened, tl.sum(total, axis=0))


_run_squares, _run_limit = launcher(step_squares_kernel), launcher(step_limit_kernel)


def step_squares(work: passes.StepSquares) -> None:
    """A program a parameter."""
    found = work.arguments()
    _run_squares(found | {"blocks": found["parameters"], "tile": LANES})


def step_limit(work: passes.StepLimit) -> None:
    """One program."""
    _run_limit(work.arguments() | {"blocks": 1, "tile": PARAMETERS})


PASSES = {passes.StepSquares: step_squares, passes.StepLimit: step_limit}

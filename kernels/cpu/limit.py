"""How long a step by m is, of each parameter, and how far it is made shorter: numbers of blocks and of parameters.

    squares    q_p = w_p^2 (sum over blocks of s_b^2 D_b)          limit      f_p = limit_p / sqrt(q_p / n_p), or 1

The sum has one order everywhere: lane i adds up blocks i, i + LANES, ..., and of the lanes the second half is added to
the first until one is left. All is fp64: `onebit.kernels.gpu.limit` has the same bits.
"""

from __future__ import annotations

import math

import numpy as np

from onebit.kernels import passes
from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.memory import double_at, float_at, long_at, set_double, set_float, set_long
from onebit.kernels.cpu.threads import numbers
from onebit.kernels.cpu.tiles import Messages, Run
from onebit.kernels.data.limit import LANES


@tile
def _mean_scale(its, messages):
    """s of a block: the mean of what its messages have."""
    scale, total = tiles.find(messages, its).scale, 0.0
    for i in range(messages.senders):
        total += np.float64(float_at(scale + i * messages.bytes))
    return total / messages.senders


@tile
def _halved(lanes, count):
    """The sum of the first lanes, `count` of which may not be 0."""
    left = 1
    while left < count:
        left *= 2
    while left > 1:
        left //= 2
        for i in range(left):
            lanes[i] += lanes[left + i]
    return lanes[0]


@Loop
def _squares(run: Run, values, replies: Messages, weight, squares):
    lanes = np.zeros(LANES)
    for p in range(run.parameters):
        first, stop = tiles.blocks_of(run, p)
        lanes[:] = 0.0
        for block in range(first, stop):
            value = np.float64(float_at(values + 4 * block))
            if replies.address != 0:
                s = _mean_scale(tiles.locate(run, block), replies)
                value = s * s * value
            lanes[(block - first) % LANES] += value
        found = _halved(lanes, min(stop - first, LANES)) if stop > first else 0.0
        if weight != 0:
            w = np.float64(float_at(weight + 4 * p))
            found = found * (w * w)
        set_double(squares + 8 * p, found)


@tile
def _of_usual(number, usual):
    return np.float32(number) * usual if number > 0 else np.float32(0)


@Loop
def _limit(
    run: Run, squares, numels, replies: Messages, usual, least: float, times: float, trusted: float, factor, shortened
):
    by_messages = replies.address != 0 and tiles.any_flag(replies.address, replies.rows, replies.bytes) == 0
    total = 0
    for p in range(run.parameters):
        n = long_at(numels + 8 * p)
        rms = math.sqrt(double_at(squares + 8 * p) / max(n, 1))
        r = float_at(usual + 4 * p)
        if by_messages:
            now = np.float32(rms)
            if r == 0:
                r = now
            elif r < 0 and now > 0:
                r = min(-r, now)
            set_float(usual + 4 * p, r)
        limit_p = max(_of_usual(times, abs(r)), np.float32(least))
        trusted_p = max(limit_p, _of_usual(trusted, abs(r)))
        found = 1.0 if rms <= np.float64(trusted_p) else np.float64(limit_p) / rms
        set_float(factor + 4 * p, np.float32(found))
        total += n if found < 1 else 0
    set_long(shortened, total)


def step_squares(work: passes.StepSquares) -> None:
    _squares(*numbers(_squares, work.arguments()))


def step_limit(work: passes.StepLimit) -> None:
    _limit(*numbers(_limit, work.arguments()))


PASSES = {passes.StepSquares: step_squares, passes.StepLimit: step_limit}

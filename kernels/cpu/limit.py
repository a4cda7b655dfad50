"""How long a step by m is, of each parameter, and how far it is made shorter: numbers of blocks and of parameters.

    squares    q_p = w_p^2 (sum over blocks of s_b^2 D_b)          limit      f_p = min(1, limit_p / sqrt(q_p / n_p))

The sum has one order everywhere: lane i adds up blocks i, i + LANES, ..., and of the lanes the second half is added to
the first until one is left. All is fp64: `onebit.kernels.gpu.limit` has the same bits.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from onebit.kernels.cpu.blocks import any_flag, at, locate, message_of, messages_at, of_message, over
from onebit.kernels.cpu.compile import Loop, tile
from onebit.kernels.cpu.memory import double_at, float_at, long_at, set_double, set_float, set_long
from onebit.kernels.data.layout import Span
from onebit.kernels.data.limit import LANES, LEAST, TIMES
from onebit.kernels.data.wire import Messages

_LEAST, _TIMES = np.float32(LEAST), np.float32(TIMES)
_NO_MESSAGES = 0, 0, 0, 1


@tile
def _mean_scale(its, messages, row_bytes, tensor, copies):
    """s of a block: the mean of what its messages have."""
    scale, _ = of_message(message_of(messages, its, row_bytes, copies), its, tensor)
    total = 0.0
    for i in range(copies):
        total += np.float64(float_at(scale + i * row_bytes))
    return total / copies


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
def _squares(
    first_blocks: int, count: int, blocks: int, parameters: int, size: int,
    messages: int, row_bytes: int, tensor: int, copies: int, values: int, weight: int, out: int,
) -> None:  # fmt: skip
    lanes = np.zeros(LANES)
    for p in range(count):
        first, stop = long_at(first_blocks + 8 * p), long_at(first_blocks + 8 * p + 8)
        lanes[:] = 0.0
        for block in range(first, stop):
            value = np.float64(float_at(values + 4 * block))
            if messages != 0:
                s = _mean_scale(locate(blocks, parameters, block), messages, row_bytes, tensor, copies)
                value = s * s * value
            lanes[(block - first) % LANES] += value
        found = _halved(lanes, min(stop - first, LANES)) if stop > first else 0.0
        if weight != 0:
            w = np.float64(float_at(weight + 4 * p))
            found = found * (w * w)
        set_double(out + 8 * p, found)


@Loop
def _limit(
    count: int, squares: int, numels: int, messages: int, rows: int, row_bytes: int,
    usual: int, limit: float, out: int, shortened: int,
) -> None:  # fmt: skip
    by_messages = messages != 0 and any_flag(messages, rows, row_bytes) == 0
    total = 0
    for p in range(count):
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
        most = limit if limit > 0 else np.float64(max(_TIMES * abs(r), _LEAST))
        found = 1.0 if rms <= most else most / rms
        set_float(out + 4 * p, np.float32(found))
        total += n if found < 1 else 0
    set_long(shortened, total)


def step_squares(span: Span, values: Tensor, replies: Messages | None, weight: Tensor | None, out: Tensor) -> None:
    """`onebit.kernels.passes.Backend.step_squares` in one loop."""
    first_blocks = span.layout.table(values.device).first_blocks
    messages = _NO_MESSAGES if replies is None else messages_at(replies)
    _squares(at(first_blocks), len(out), *over(span), *messages, at(values), at(weight), at(out))


def step_limit(
    squares: Tensor,
    numels: Tensor,
    replies: Messages | None,
    usual: Tensor,
    limit: float | None,
    out: Tensor,
    shortened: Tensor,
) -> None:
    """`onebit.kernels.passes.Backend.step_limit` in one loop."""
    messages = (0, 0, 0) if replies is None else (at(replies.buffer), replies.rows, replies.format.nbytes)
    _limit(len(out), at(squares), at(numels), *messages, at(usual), limit or 0.0, at(out), at(shortened))

"""Messages, read by numpy alone from what their format's description says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onebit.kernels.data.wire import Messages
from tests import oracle


@dataclass(frozen=True)
class Contents:
    """What the bytes of one message say."""

    scales: np.ndarray
    bits: np.ndarray  # bool [elements]
    values: np.ndarray


def contents(messages: Messages, row: int, lengths: Sequence[int]) -> Contents:
    """lengths: of the blocks of the message."""
    raw = messages.buffer[row].cpu().numpy()
    count = len(lengths) if messages.format.scale == "block" else 1
    scales = raw[16 : 16 + 4 * count].view("<f4").astype(np.float64)
    start = 16 + -(-4 * count // 16) * 16
    bits = np.unpackbits(raw[start : start + sum(lengths) // 8], bitorder="little") == 1
    return Contents(scales, bits, signed(bits, scales, lengths))


def signed(bits: np.ndarray, scales: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """The value of every element. bits: bool, of one block after the other. scales: of each block, or one."""
    size = np.repeat(scales, lengths if len(scales) == len(lengths) else [sum(lengths)])
    return np.where(bits, size, -size)


def values_of(messages: Messages, plan: oracle.Layout, first: int = 0) -> np.ndarray:
    """Messages of all shards from the first on, one after the other: the mean over a shard's senders, in float64."""
    parts, senders = plan.shards()[first : first + messages.rows // messages.senders], messages.senders
    rows = [[contents(messages, k * senders + i, plan.lengths_in(part)).values for i in range(senders)]
            for k, part in enumerate(parts)]  # fmt: skip
    return np.concatenate([np.mean(each, axis=0) for each in rows])

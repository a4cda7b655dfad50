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

    scales: np.ndarray  # with 2 bits [blocks, 2]
    bits: np.ndarray  # bool [elements]
    large: np.ndarray  # bool [elements], with 2 bits
    values: np.ndarray


def contents(messages: Messages, row: int, lengths: Sequence[int]) -> Contents:
    """lengths: of the blocks of the message."""
    raw, per_element = messages.buffer[row].cpu().numpy(), messages.format.bits
    count = len(lengths) * per_element if messages.format.scale == "block" else 1
    scales = raw[16 : 16 + 4 * count].view("<f4").astype(np.float64)
    start = 16 + -(-4 * count // 16) * 16
    bits = np.unpackbits(raw[start : start + sum(lengths) * per_element // 8], bitorder="little") == 1
    of_elements = of_bits(bits, scales, per_element, lengths)
    return Contents(scales.reshape(-1, 2) if per_element == 2 else scales, *of_elements)


def of_bits(
    bits: np.ndarray, scales: np.ndarray, per_element: int, lengths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every element its bit, whether it is large, and its value. bits: bool, of one block after the other."""
    if per_element == 1:
        size = np.repeat(scales, lengths if len(scales) == len(lengths) else [sum(lengths)])
        return bits, np.zeros(0, bool), np.where(bits, size, -size)
    of_blocks = np.split(bits, np.cumsum([2 * length for length in lengths])[:-1]) if len(lengths) else []
    positive, large = (np.concatenate([np.zeros(0, bool), *(b.reshape(2, -1)[i] for b in of_blocks)]) for i in (0, 1))
    small_size, large_size = np.repeat(scales.reshape(-1, 2), lengths, axis=0).T
    size = np.where(large, large_size, small_size)
    return positive, large, np.where(positive, size, -size)


def values_of(messages: Messages, plan: oracle.Layout, first: int = 0) -> np.ndarray:
    """Messages of all shards from the first on, one after the other: the mean of a shard's copies, in float64."""
    parts, copies = plan.shards()[first : first + messages.rows // messages.copies], messages.copies
    rows = [[contents(messages, k * copies + i, plan.lengths_in(part)).values for i in range(copies)]
            for k, part in enumerate(parts)]  # fmt: skip
    return np.concatenate([np.mean(each, axis=0) for each in rows])

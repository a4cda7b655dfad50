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
    bits: np.ndarray  # bool [elements], or whole numbers where an element has several
    values: np.ndarray


def contents(messages: Messages, row: int, lengths: Sequence[int]) -> Contents:
    """lengths: of the blocks of the message."""
    raw = messages.buffer[row].cpu().numpy()
    if messages.format.bits > 1:
        return _codes(raw, messages.format.bits, messages.format.layout.block_size, lengths)
    count = len(lengths) if messages.format.scale == "block" else 1
    scales = raw[16 : 16 + 4 * count].view("<f4").astype(np.float64)
    start = 16 + -(-4 * count // 16) * 16
    bits = np.unpackbits(raw[start : start + sum(lengths) // 8], bitorder="little") == 1
    return Contents(scales, bits, signed(bits, scales, lengths))


def _codes(raw: np.ndarray, bits: int, block_size: int, lengths: Sequence[int]) -> Contents:
    """Read as many scales for each block as a whole one has; and codes, the first of two in the lower half."""
    each = -(-block_size // 256)
    count = each * len(lengths)
    start, half = 16 + -(-4 * count // 16) * 16, 2 ** (bits - 1)
    numbers = raw[start : start + sum(lengths) * bits // 8].astype(np.int64)
    if bits == 4:
        numbers = np.stack([numbers % 16, numbers // 16], axis=1).ravel()
    codes = (numbers + half) % (2 * half) - half
    scales = raw[16 : 16 + 4 * count].view("<f4").astype(np.float64).reshape(-1, each)
    sizes = np.concatenate([np.repeat(own, 256)[:length] for own, length in zip(scales, lengths, strict=True)])
    return Contents(scales.ravel(), codes, codes * sizes)


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

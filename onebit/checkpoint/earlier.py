"""States of version 1, in which all blocks were equally long, and all shards had equally many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from onebit.checkpoint.elements import joined_planes
from onebit.checkpoint.names import BITS
from onebit.kernels.data.layout import WORD, Layout

Saved = Mapping[str, Any]  # one parameter's


class EqualBlocks(Layout):
    """Every parameter in whole blocks, padded at the end to as many in every shard."""

    def _lengths(self) -> tuple[int, npt.NDArray[np.int64]]:
        parts = self.ranks * self.chunks
        blocks = max(1, -(-self.used_blocks // parts)) * parts
        return blocks, np.full(blocks, self.block_size, dtype=np.int64)

    def _shards(self) -> npt.NDArray[np.int64]:
        parts = self.ranks * self.chunks
        return np.arange(parts + 1) * (self.blocks // parts)


def layout_of(numbers: Mapping[str, Any]) -> type[Layout]:
    """How the residuals of a state lie."""
    return EqualBlocks if numbers["version"] == 1 else Layout


def with_short_blocks(own: Saved, numbers: Mapping[str, Any], numel: int, per_element: int) -> Saved:
    """One parameter's, with its bits as they are saved now. What has another shape is left for the checks to refuse."""
    size, bits = int(numbers["block_size"]), own.get(BITS)
    blocks = -(-numel // size)
    if numbers["version"] != 1 or not isinstance(bits, Tensor):
        return own
    if bits.shape[-2:] != (blocks, per_element * size // 8):
        return own
    planes = bits.unflatten(-1, (per_element, size // 8)).transpose(-3, -2).flatten(-2)
    return {**own, BITS: joined_planes(planes[..., : -(-numel // WORD) * WORD // 8], numel, size)}

"""Tensors, and room for what they were, which one pass puts back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Kept:
    """Pairs of a tensor and its copy on one device: both contiguous, of the same whole 4 bytes, and never replaced."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.pairs = list(pairs)
        self.words = [now.nbytes // 4 for now, _ in self.pairs]
        rows = [(now.data_ptr(), kept.data_ptr(), n) for (now, kept), n in zip(self.pairs, self.words, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64, device=self.pairs[0][0].device)
        """int64 [pairs, 3]: both addresses, and how many words of 4 bytes."""

"""Work on tensors of any size a piece at a time: what lies beside them is small beside a model.

torch adds up in another dtype, or counts, by a copy of the whole tensor: 8 bytes an element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 2**20  # elements


def in_pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Return views of a contiguous tensor's elements, which are one after the other."""
    return tensor.view(-1).split(PIECE)


def total(values: Tensor) -> Tensor:
    """Add up all values: fp64, without a dimension."""
    return torch.stack([piece.sum(dtype=torch.float64) for piece in in_pieces(values)]).sum()


def count_nonzero(values: Tensor) -> Tensor:
    """Count the values that are not 0, or True: int64, without a dimension."""
    return torch.stack([piece.count_nonzero() for piece in in_pieces(values)]).sum()

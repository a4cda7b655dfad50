"""Packed bits: eight a byte, the first in the lowest place, as numpy.packbits(..., bitorder="little") lays them out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebit.kernels.data import pieces


def packed(bits: Tensor) -> Tensor:
    """uint8 [.., n / 8, rounded up] from bool [.., n], or 0 and 1 of any kind."""
    shape = (*bits.shape[:-1], -(-bits.shape[-1] // 8))
    out = torch.empty(shape, dtype=torch.uint8, device=bits.device)
    for piece, place in zip(bits.split(pieces.PIECE, -1), out.split(pieces.PIECE // 8, -1), strict=True):
        place.copy_(packed_at_once(piece))
    return out


def packed_at_once(bits: Tensor) -> Tensor:
    eights = pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (eights << _places(bits)).sum(-1, dtype=torch.uint8)


def unpacked(packed: Tensor) -> Tensor:
    """bool [.., 8 n] from uint8 [.., n]."""
    return ((packed.unsqueeze(-1) >> _places(packed)) & 1).flatten(-2) != 0


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)

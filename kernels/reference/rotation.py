"""Blocks rotated forth and back in plain PyTorch: see `onebit.kernels.data.rotation`."""

from __future__ import annotations

import torch
from torch import Tensor

from onebit.kernels.data import rotation


def rotated(rows: Tensor, lengths: Tensor) -> Tensor:
    """H D c of each row, of which the first `lengths` elements are a block; others stay as they are."""
    return _mixed(_turned(rows), lengths)


def rotated_back(rows: Tensor, lengths: Tensor) -> Tensor:
    """D H z of each row: n times what was rotated."""
    return _turned(_mixed(rows, lengths))


def _turned(rows: Tensor) -> Tensor:
    flips = torch.from_numpy(rotation.flips()[: rows.shape[-1]].copy()).to(rows.device)
    return torch.where(flips, 0 - rows, rows)


def _mixed(rows: Tensor, lengths: Tensor) -> Tensor:
    size, h = rows.shape[-1], 1
    while 2 * h <= size:
        own = lengths % (2 * h) == 0
        if bool(own.any()):
            whole = size // (2 * h) * 2 * h
            first, second = rows[:, :whole].unflatten(1, (-1, 2, h)).unbind(2)
            mixed = torch.stack([first + second, first - second], 2).flatten(1)
            rows = torch.cat([torch.where(own[:, None], mixed, rows[:, :whole]), rows[:, whole:]], 1)
        h *= 2
    return rows

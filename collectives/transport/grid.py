"""The ranks of a grid, of which each knows its row and its column: what concerns all of them goes over the one, then
over the other. No group of all of them is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebit.collectives.transport.protocol import Ranks, Work


class Grid:
    """Decides and compares; messages go over the row or the column alone."""

    def __init__(self, column: Ranks, row: Ranks) -> None:
        """column: the ranks at this rank's place of every row."""
        self._column, self._row = column, row
        self.rank, self.size = column.rank * row.size + row.rank, column.size * row.size
        self.name = column.name

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        of_row = torch.empty((self._row.size, sent.shape[1]), dtype=sent.dtype, device=sent.device)
        self._row.all_gather(of_row, sent, phase).wait()
        return self._column.all_gather(out.view(self._column.size, -1), of_row.view(1, -1), phase)

    def all_max(self, values: Tensor, phase: str) -> None:
        self._row.all_max(values, phase)
        self._column.all_max(values, phase)

    def all_sum(self, values: Tensor, phase: str) -> Work:
        self._row.all_sum(values, phase).wait()
        return self._column.all_sum(values, phase)

    def of_hosts(self) -> Grid:
        return Grid(self._column.of_hosts(), self._row.of_hosts())

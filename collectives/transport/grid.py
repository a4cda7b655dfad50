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

    def world_rank(self, rank: int) -> int:
        """The number of a rank among all processes. Rows are alike in that, as in torch's device meshes."""
        column, row = divmod(rank, self._row.size)
        own = self._row.world_rank(self._row.rank)
        return self._column.world_rank(column) - own + self._row.world_rank(row)

    def host_of(self, rank: int) -> str | None:
        """The host of a rank of this rank's row or column; None for others."""
        column, row = divmod(rank, self._row.size)
        if column == self._column.rank:
            return self._row.host_of(row)
        return self._column.host_of(column) if row == self._row.rank else None

"""Restoring an exchange, where values are found not to be finite only after the first messages have left.

An exchange leaves state as it was when every message of a step has the flag. Where messages leave one by one, the
first are sent before the last gradients are there to be checked; and small ones leave before anyone has asked the
other ranks. So what an exchange changes is copied first, and restored where a step is skipped. An exchange that did not
end, since a rank died, can be taken back by the same copies.

compress and average keep residuals as they read them: 4 + 4/N B an element of memory, written once, and with direct
replies 4. The last replies are copied: 1/8 B an element is read and written, with direct ones N/8. On a GPU the device
decides whether to restore, by a flag that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onebit.collectives.exchange import Chunk, Exchange
from onebit.kernels.data.kept import Kept
from onebit.kernels.data.residual import Residual


class Undo:
    """Room for what a step changes in an exchange. Such a step runs with these `chunks`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.chunks = [_keeping(chunk) for chunk in exchange.chunks]
        self._copied = [[(t, torch.empty_like(t)) for t in _copied(chunk)] for chunk in self.chunks]
        of_chunks = zip(self.chunks, self._copied, strict=True)
        self._kept = Kept([pair for chunk, copied in of_chunks for pair in (*_kept(chunk.residuals), *copied)])

    def save(self, chunk: Chunk) -> None:
        """Copy what this chunk has, apart from residuals, before it is compressed."""
        for now, kept in self._copied[chunk.index]:
            kept.copy_(now)

    def restore(self, flags: Tensor) -> None:
        """Every chunk as it was kept, where `flags`, int32 [1], is set. On a GPU the host does not wait."""
        self.exchange.backend.restore(self._kept, flags)

    def take_back(self) -> None:
        """Restore what an exchange has changed so far, also of one that did not end."""
        for chunk, copied in zip(self.chunks, self._copied, strict=True):
            if chunk.index in self.exchange.compressed:
                served = chunk.server is not None and chunk.index in self.exchange.averaged
                changed = chunk.residuals if served else [chunk.residual]
                for now, kept in [*_kept(changed), *copied]:
                    now.copy_(kept)


def _keeping(chunk: Chunk) -> Chunk:
    def of(residual: Residual) -> Residual:
        return replace(residual, before=torch.empty_like(residual.value))

    server = chunk.server and replace(chunk.server, residual=of(chunk.server.residual))
    return replace(chunk, residual=of(chunk.residual), server=server)


def _kept(residuals: Sequence[Residual]) -> list[tuple[Tensor, Tensor]]:
    """Pair each residual with what compress and average keep of it."""
    return [(each.value, each.before) for each in residuals if each.before is not None]


def _copied(chunk: Chunk) -> list[Tensor]:
    """Its own reply too: a flagged message leaves in it what the last step had."""
    scales = [residual.scale for residual in chunk.residuals if residual.scale is not None]
    replies = {each.buffer.data_ptr(): each.buffer for each in (chunk.arriving, chunk.replies)}  # one with one level
    return [*scales, chunk.own_reply.buffer, *replies.values()]

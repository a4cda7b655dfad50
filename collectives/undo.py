"""Restoring an exchange, where values are found not to be finite only after the first messages have left.

An exchange leaves state as it was when every message of a step has the flag. Where messages leave one by one, the
first are sent before the last gradients are there to be checked; and small ones leave before anyone has asked the
other ranks. So what an exchange changes is copied first, and restored where a step is skipped.

A second residual buffer: 4 + 4/N + 1/8 B an element, with direct replies 4 + N/8 + 1/8. Bytes moved an element: reads
4, writes 4; on a GPU the device decides whether to restore, which reads 8 and writes 4 more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebit.collectives.exchange import Chunk, Exchange


class Undo:
    """Room for what a step changes in an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._pairs = [[(t, torch.empty_like(t)) for t in _changed(chunk)] for chunk in exchange.chunks]

    def save(self, chunk: Chunk) -> None:
        """Before this chunk is compressed."""
        for now, kept in self._pairs[chunk.index]:
            kept.copy_(now)

    def restore(self, flags: Tensor | None = None) -> None:
        """Every chunk as it was kept: where `flags`, int32 [1], is set, or always. On a GPU the host does not wait."""
        if flags is not None and flags.device.type == "cpu" and not int(flags):
            return
        for now, kept in (pair for pairs in self._pairs for pair in pairs):
            if flags is None or flags.device.type == "cpu":
                now.copy_(kept)
            else:
                torch.where(flags != 0, kept, now, out=now)


def _changed(chunk: Chunk) -> list[Tensor]:
    """Its own reply too: a flagged message leaves in it what the last step had."""
    states = [t for residual in chunk.residuals for t in (residual.value, residual.scale) if t is not None]
    replies = {each.buffer.data_ptr(): each.buffer for each in (chunk.arriving, chunk.replies)}  # one with one level
    return [*states, chunk.own_reply.buffer, *replies.values()]

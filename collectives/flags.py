"""A round, or the messages themselves, tell every rank whether a value on any rank is not finite.

To ask takes a round of its own. Where everything is one small message a rank, each carries its rank's flag instead:
every rank finds it in the replies, and what the exchange changed is restored (`onebit.collectives.undo`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onebit.collectives.exchange import Exchange

MOST_ELEMENTS = 2**20  # up to which copying what an exchange changes takes less than a round


def travel_in_messages(exchanges: Sequence[Exchange]) -> bool:
    """Return whether no round is spent on flags. The answer is the same on all ranks."""
    elements = sum(exchange.layout.elements for exchange in exchanges)
    several = any(exchange.everyone.size > 1 for exchange in exchanges)
    return several and all(may_travel_in_messages(elements, len(exchange.chunks)) for exchange in exchanges)


def may_travel_in_messages(elements: int, chunks: int) -> bool:
    """Return whether a model's message is the only one, and small."""
    return elements <= MOST_ELEMENTS and chunks == 1


def read_flags(exchanges: Sequence[Exchange], flags: Tensor) -> None:
    """Read the flags of messages that have come: `flags`, int32 [1], is set if any was, or it was set before, and all
    replies are marked alike."""
    replies = [exchange.replies.flags for exchange in exchanges]
    for marked in replies:
        torch.maximum(flags, marked.amax(0, keepdim=True), out=flags)
    for marked in replies:
        marked.copy_(flags.expand_as(marked))

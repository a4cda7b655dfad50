"""What a round trip between nodes adds to a collective: how many messages wait for one another, and how long each.

    message       a round trip over Gloo, half of one over NCCL: see ROUND_TRIPS
    all-to-all    1 message: all leave at once
    all-gather    1 over Gloo in pairs, half of it where the receive began before; else M - 1, from node to node
    one number    1 over Gloo; 2 ceil(log2 M) over NCCL's trees
    all-reduce    2 (M - 1) around a ring, 2 ceil(log2 M) over NCCL's trees. Gloo has but a few segments under way

With w segments under way, each of b seconds on the link, n segments of Gloo's all-reduce take, in each of two phases,

    n / w max(w b, b + message) + min((w - 1) b, message)

which is n b without a delay, and n b and one message more where the link is what they wait for. Left out: how much TCP
lets be under way, its slow start, lost packets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from onebit.collectives.transport.torch import MOST_IN_PAIRS, SMALL

Transport = Literal["nccl", "gloo"]
# Of a message. Gloo sends it when its receiver has said that it waits: half a round trip for that, half for the
# message (measured: docs/performance.md). NCCL's sockets send at once (assumed).
ROUND_TRIPS: dict[Transport, float] = {"nccl": 0.5, "gloo": 1.0}
SEGMENT, UNDER_WAY = 2**20, 2  # of Gloo's all-reduce: the most bytes, and how many are on their way; 2 a rank at least


@dataclass(frozen=True)
class Delay:
    """Between M = `nodes` nodes of `gpus` ranks in all. `shared`: whether ranks share hosts."""

    round_trip: float  # seconds
    transport: Transport
    gpus: int
    nodes: int
    shared: bool

    @property
    def message(self) -> float:
        """Seconds until a message has arrived, beside its bytes' time."""
        return ROUND_TRIPS[self.transport] * self.round_trip if self.nodes > 1 else 0.0

    @property
    def lets_others_pass(self) -> bool:
        """Whether the next chunk's messages leave while these are under way: NCCL runs one collective at a time."""
        return self.transport == "gloo"

    def all_to_all(self) -> float:
        return self.message

    def all_gather(self, row: float, expected: bool) -> float:
        """`row`: bytes of a rank. `expected`: whether every receive has begun long before (`EarlyReceiver`)."""
        if self.transport == "nccl":
            return (self.nodes - 1) * self.message
        if self.gpus <= MOST_IN_PAIRS and (self.gpus == 2 or row <= SMALL or not self.shared):
            return self.message / 2 if expected else self.message
        return self.message if row <= SMALL else (self.nodes - 1) * self.message

    def agreement(self) -> float:
        """Of one number."""
        if self.transport == "nccl":
            return 2 * math.ceil(math.log2(self.nodes)) * self.message
        return self.message if self.gpus > 2 else 2 * self.message

    def segments(self, size: float, seconds: float, at_once: int) -> float:
        """What Gloo's all-reduces of `size` bytes in all, so many `at_once`, take beyond `seconds`, their bytes' time.

        A ring passes on N - 1 of N parts of the bytes, in segments, twice.
        """
        if self.nodes == 1 or not self.message:
            return 0.0
        each = max(2, math.ceil(size / at_once / self.nodes / SEGMENT))
        count, most = at_once * (self.nodes - 1) * each, at_once * UNDER_WAY
        b = seconds / 2 / count
        return 2 * (count / most * max(most * b, b + self.message) + min((most - 1) * b, self.message)) - seconds

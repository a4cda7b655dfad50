"""reply="direct": messages travel once, each rank's to all others, and every rank takes their mean itself.

    m = mean_i decode(message_i), in the order of ranks

Nothing is compressed a second time, so there is no server and no server residual; m is kept as the messages, N / 8
bytes an element. A rank sends N - 1 bits an element, in two phases 2 (N - 1) / N: as many with two ranks, 1.5 times as
many with 3 and twice as many with 4, in one round instead of two. Not in the papers.
"""

from __future__ import annotations

from collections.abc import Iterator

from onebit.collectives.exchange import Chunk, Exchange, arrived
from onebit.collectives.transport.protocol import Transport


class Direct(Exchange):
    """An exchange in which every rank's messages go to all."""

    reply_option = "direct"

    @classmethod
    def shards(cls, ranks: int) -> int:
        return 1

    def _exchange_chunk(self, chunk: Chunk, over: Transport) -> Iterator[None]:
        self._count(self.format)
        phase = f"the exchange (all-gather of chunk {chunk.index})"
        work = over.all_gather(chunk.arriving.buffer, chunk.sent.buffer, phase)
        yield
        arrived(work, chunk.arriving, "the exchange")

"""The papers' compressed all-reduce, pipelined over chunks. Messages travel twice, with an average between.

    gather    each rank compresses its chunk and sends shard k to rank k                    (all-to-all)
    average   rank k averages what came for its shard, compresses it with its own residual
    scatter   every rank receives every shard                                               (all-gather)

(1-bit Adam (Tang et al. 2021), figure 3.) While chunk j is on the network, chunk j + 1 is compressed and chunk j - 1
averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from onebit.collectives.exchange import Chunk, Exchange, Reply, Server, arrived
from onebit.collectives.transport.protocol import EarlyReceiver, Transport, Work
from onebit.kernels.data.layout import Span
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format
from onebit.kernels.passes import Average


class TwoPhases(Exchange):
    """reply=1: each rank averages a shard of every chunk, and compresses the mean once more."""

    way: ClassVar[Reply] = 1
    server_residual: Residual

    @classmethod
    def shards(cls, ranks: int) -> int:
        return ranks

    def _pipeline(
        self, chunks: Sequence[Chunk], over: Transport, compress: Callable[[Chunk], None], use: Callable[[Chunk], None]
    ) -> None:
        last = len(chunks) - 1
        gathers: dict[int, Work] = {}
        scatters: dict[int, Work] = {}
        for j in range(last + 3):
            if j <= last:
                compress(chunks[j])
                gathers[j] = self._gather(chunks[j], over)
                if isinstance(over, EarlyReceiver):
                    over.expect(chunks[j].arriving.buffer, _scatter_phase(chunks[j]))
            if 0 <= j - 1 <= last:
                arrived(gathers.pop(j - 1), _server_of(chunks[j - 1]).received, "the gather phase")
                scatters[j - 1] = self._average_and_scatter(chunks[j - 1], over)
            if j >= 2:
                arrived(scatters.pop(j - 2), chunks[j - 2].arriving, "the scatter phase")
                use(chunks[j - 2])

    def _reply_format(self) -> Format:
        return self.format.of_means()

    def _servers(self) -> Sequence[Server]:
        layout, ranks = self.layout, self.transport.size
        owned = layout.parts(self.own_row, layout.ranks)
        self.server_residual = Residual.zeros(owned, self.reply_format, self.device)
        residuals = self.server_residual.parts(owned)
        self.received = self._zeros(self.format, layout.chunks * ranks)
        self.reply = self._zeros(self.reply_format, layout.chunks)
        return [self._server(j, shard, residuals[j]) for j, shard in enumerate(owned)]

    def _server(self, index: int, shard: Span, residual: Residual) -> Server:
        ranks = self.transport.size
        return Server(
            shard=shard,
            residual=residual,
            received=self.received.slice(index * ranks, ranks),
            reply=self.reply.slice(index, 1),
        )

    def _gather(self, chunk: Chunk, over: Transport) -> Work:
        self._count(self.format)
        phase = f"the gather phase (all-to-all of chunk {chunk.index})"
        return over.all_to_all(_server_of(chunk).received.buffer, chunk.sent.buffer, phase)

    def _average_and_scatter(self, chunk: Chunk, over: Transport) -> Work:
        server = _server_of(chunk)
        self.averaged.add(chunk.index)
        live = self.live_in(server.shard)
        self.backend.run(Average(server.shard, server.received, server.residual, server.reply, live=live))
        self._count(self.reply_format)
        return over.all_gather(chunk.arriving.buffer, server.reply.buffer, _scatter_phase(chunk))


def _scatter_phase(chunk: Chunk) -> str:
    return f"the scatter phase (all-gather of chunk {chunk.index})"


def _server_of(chunk: Chunk) -> Server:
    assert chunk.server is not None
    return chunk.server

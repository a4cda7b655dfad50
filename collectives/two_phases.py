"""The papers' compressed all-reduce, pipelined over chunks. Messages travel twice, with an average between.

    gather    each rank compresses its chunk and sends shard k to rank k                    (all-to-all)
    average   rank k averages what came for its shard, compresses it with its own residual
    scatter   every rank receives every shard                                               (all-gather)

(1-bit Adam (Tang et al. 2021), figure 3.) While chunk j is on the network, chunk j + 1 is compressed and chunk j - 1
averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from onebit.collectives.exchange import Chunk, Exchange, Reply, Server, arrived
from onebit.collectives.transport.protocol import EarlyReceiver, Transport
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format
from onebit.kernels.passes import Average, AverageCodes


class TwoPhases(Exchange):
    """reply=1: each rank averages a shard of every chunk, and compresses the mean once more."""

    reply_option: ClassVar[Reply] = 1
    server_residual: Residual

    @classmethod
    def shards(cls, ranks: int) -> int:
        return ranks

    def _reply_format(self) -> Format:
        return self.format.of_means()

    def _servers(self) -> Sequence[Server]:
        layout, ranks = self.layout, self.transport.size
        owned = layout.parts(self.own_row, layout.ranks)
        self.server_residual = Residual.zeros(owned, self.reply_format, self.device)
        self.received = self._zeros(self.format, layout.chunks * ranks)
        self.reply = self._zeros(self.reply_format, layout.chunks)
        residuals = self.server_residual.parts(owned)
        return [
            Server(shard, residual, self.received.slice(j * ranks, ranks), self.reply.slice(j, 1))
            for j, (shard, residual) in enumerate(zip(owned, residuals, strict=True))
        ]

    def _exchange_chunk(self, chunk: Chunk, over: Transport) -> Iterator[None]:
        server = chunk.server
        assert server is not None
        self._count(self.format)
        phase = f"the gather phase (all-to-all of chunk {chunk.index})"
        gather = over.all_to_all(server.received.buffer, chunk.sent.buffer, phase)
        phase = f"the scatter phase (all-gather of chunk {chunk.index})"
        if isinstance(over, EarlyReceiver):
            over.expect(chunk.arriving.buffer, phase)
        yield
        arrived(gather, server.received, "the gather phase")
        del gather  # with what it holds on the host
        self.averaged.add(chunk.index)
        arguments = server.shard, server.received, server.residual, server.reply
        if self.format.bits == 1:
            self.backend.run(Average(*arguments, live=self.live_in(server.shard)))
        else:
            self.backend.run(AverageCodes(*arguments))
        self._count(self.reply_format)
        scatter = over.all_gather(chunk.arriving.buffer, server.reply.buffer, phase)
        yield
        arrived(scatter, chunk.arriving, "the scatter phase")

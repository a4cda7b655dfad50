"""The three phases of a compressed all-reduce, pipelined over chunks.

    gather    each rank compresses its chunk and sends shard k to rank k                    (all-to-all)
    average   rank k averages what came for its shard, compresses it with its own residual
    scatter   every rank receives every shard                                               (all-gather)

(1-bit Adam (Tang et al. 2021), figure 3.) While chunk j is on the network, chunk j + 1 is compressed and chunk j - 1
averaged. All collectives start here, in one order, which is the same on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from onebit import kernels
from onebit.collectives.agreement import agree
from onebit.collectives.transport.protocol import Transport, Work
from onebit.kernels.data.layout import Layout, Span
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, Messages, Norm, Scale


@dataclass(frozen=True)
class Chunk:
    """One stage of the pipeline: its part of every buffer."""

    index: int
    span: Span
    shard: Span  # the part of it that this rank averages
    residual: Residual
    server_residual: Residual
    sent: Messages
    received: Messages
    reply: Messages
    replies: Messages


def facts(numels: Sequence[int], block_size: int, chunks: int | str, scale: Scale, norm: Norm) -> dict[str, int | str]:
    """What must be the same on all ranks for one to read another's messages."""
    return {
        "parameters": len(numels),
        "elements": sum(numels),
        "checksum of sizes": zlib.crc32(str(list(numels)).encode()),
        "block_size": block_size,
        "chunks": chunks,
        "scale": scale,
        "norm": norm,
    }


class Exchange:
    """Residuals and messages of one layout on one rank, and the way they go."""

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        device: torch.device,
        scale: Scale = "block",
        norm: Norm = "l1",
        *,
        value: Tensor | None = None,
    ) -> None:
        """`value`, fp32 [elements of the layout], becomes this rank's residual and is what it starts from."""
        if layout.ranks != transport.size:
            raise ValueError(f"the layout is cut for {layout.ranks} ranks, the group has {transport.size}")
        self.layout, self.transport, self.device = layout, transport, device
        self.format = Format.of(layout, scale, norm)
        self.backend = kernels.backend(device)
        self.wire_bytes = 0
        self.live: Tensor | None = None  # uint8 [elements / 8]: a bit for each coordinate that takes part, or all do
        everything = layout.all()
        owned = Span(layout, 0, layout.chunks * layout.shard_blocks)
        self.residual = Residual.zeros(everything, self.format, device, value)
        self.server_residual = Residual.zeros(owned, self.format, device)
        rows = layout.chunks * layout.ranks
        self.sent, self.received, self.replies = (self._zeros(rows) for _ in range(3))
        self.reply = self._zeros(layout.chunks)
        self.chunks = [self._chunk(j) for j in range(layout.chunks)]
        self._agreed = False

    def agree(self, more: Mapping[str, int | str] | None = None) -> None:
        """Once: compare how the ranks cut and encode, and `more`. A difference is a ValueError on all of them."""
        if not self._agreed:
            layout, form = self.layout, self.format
            common = facts(
                layout.numel.tolist(),
                block_size=layout.block_size,
                chunks=layout.chunks,
                scale=form.scale,
                norm=form.norm,
            )
            agree(self.transport, self.device, {**common, **(more or {})})
            self._agreed = True

    def run(
        self,
        compress: Callable[[Chunk], None],
        use: Callable[[Chunk], None] | None = None,
        *,
        backwards: bool = False,
        over: Transport | None = None,
    ) -> Messages:
        """Exchange every chunk: `compress` writes a chunk's messages, `use` reads its replies.

        backwards: the last chunk first. over: another transport of the same ranks.
        """
        self.agree()
        over = over or self.transport
        chunks = self.chunks[::-1] if backwards else self.chunks
        last = len(chunks) - 1
        gathers: dict[int, Work] = {}
        scatters: dict[int, Work] = {}
        for j in range(last + 3):
            if j <= last:
                compress(chunks[j])
                gathers[j] = self._gather(chunks[j], over)
            if 0 <= j - 1 <= last:
                _arrived(gathers.pop(j - 1), chunks[j - 1].received, "the gather phase")
                scatters[j - 1] = self._average_and_scatter(chunks[j - 1], over)
            if j >= 2:
                _arrived(scatters.pop(j - 2), chunks[j - 2].replies, "the scatter phase")
                if use is not None:
                    use(chunks[j - 2])
        return self.replies

    def live_in(self, span: Span) -> Tensor | None:
        """A span's part of `live`."""
        width = self.layout.block_size // 8
        return None if self.live is None else self.live[span.first * width : (span.first + span.count) * width]

    def _gather(self, chunk: Chunk, over: Transport) -> Work:
        self._count(chunk)
        phase = f"the gather phase (all-to-all of chunk {chunk.index})"
        return over.all_to_all(chunk.received.buffer, chunk.sent.buffer, phase)

    def _average_and_scatter(self, chunk: Chunk, over: Transport) -> Work:
        live = self.live_in(chunk.shard)
        self.backend.average(chunk.shard, chunk.received, chunk.server_residual, chunk.reply, live=live)
        self._count(chunk)
        phase = f"the scatter phase (all-gather of chunk {chunk.index})"
        return over.all_gather(chunk.replies.buffer, chunk.reply.buffer, phase)

    def _count(self, chunk: Chunk) -> None:
        """One message to every other rank."""
        self.wire_bytes += (self.transport.size - 1) * chunk.reply.format.nbytes

    def _zeros(self, rows: int) -> Messages:
        messages = self.format.empty(rows, self.device)
        messages.buffer.zero_()
        return messages

    def _chunk(self, index: int) -> Chunk:
        layout, ranks = self.layout, self.layout.ranks
        span, shard = layout.chunk(index), layout.shard(index, self.transport.rank)
        return Chunk(
            index=index,
            span=span,
            shard=shard,
            residual=self.residual.part(span.first, span, self.format),
            server_residual=self.server_residual.part(index * layout.shard_blocks, shard, self.format),
            sent=self.sent.slice(index * ranks, ranks),
            received=self.received.slice(index * ranks, ranks),
            reply=self.reply.slice(index, 1),
            replies=self.replies.slice(index * ranks, ranks),
        )

    def gathered_server_residual(self) -> Tensor:
        """E of every rank's shards, in the order of the layout: fp32 [elements]. A collective call."""
        layout, ranks = self.layout, self.layout.ranks
        own = self.server_residual.left_out().view(torch.uint8)
        everyone = torch.empty((ranks, own.numel()), dtype=torch.uint8, device=self.device)
        self.transport.all_gather(everyone, own[None], "gathering the server residuals (all-gather)").wait()
        return everyone.view(torch.float32).view(ranks, layout.chunks, -1).transpose(0, 1).reshape(-1)

    def materialize(self) -> None:
        """Keep both residuals as what was left out, with nothing to derive: the next step computes the same."""
        self.residual.materialize()
        self.server_residual.materialize()

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a restart: both residuals, of this rank."""
        state = {"residual": self.residual.value, "server_residual": self.server_residual.value}
        if self.residual.scale is not None and self.server_residual.scale is not None:
            state |= {"residual_scale": self.residual.scale, "server_residual_scale": self.server_residual.scale}
        return state

    def check_state_dict(self, state: dict[str, Tensor]) -> None:
        """A ValueError if `load_state_dict` could not copy all of it."""
        own = self.state_dict()
        foreign = [name for name, value in state.items() if not isinstance(value, Tensor)]
        if foreign:
            raise ValueError(f"{foreign[0]} is no tensor: this is not a state of this all-reduce, or it was damaged")
        if state.keys() != own.keys():
            raise ValueError(
                f"the state has {sorted(state)}, this all-reduce keeps {sorted(own)}: it was saved with another "
                f"scale. Build the all-reduce with the options it was saved with"
            )
        for name, tensor in own.items():
            if (state[name].shape, state[name].dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"{name} is {state[name].dtype} {tuple(state[name].shape)} in the state and {tensor.dtype} "
                    f"{tuple(tensor.shape)} here: it was saved with another model, block_size or number of ranks"
                )

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy residuals saved by the same rank of an equal group. Nothing changes if any does not fit."""
        self.check_state_dict(state)
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def _arrived(work: Work, messages: Messages, phase: str) -> None:
    """Wait for messages, and read what their headers say."""
    with record_function(f"onebit.wait for {phase}"):
        work.wait()
    messages.check(phase)

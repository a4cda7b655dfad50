"""The base of both exchanges of messages: a flat space cut into chunks, a residual, messages, and byte counts.

`two_phases`: each rank averages a shard for all ranks, and compresses the mean once more. `direct`: each rank's message
goes to all ranks. Both run a pipeline over chunks: while one chunk is on the network, the next chunk is compressed.
`run` starts all collectives, in one order, which is the same on all ranks.

With two levels a node is one rank to the network. A chunk is cut in slices, one for each rank of the node. A rank
compresses its slice, and exchanges the slice with the ranks of the same place on the other nodes. The ranks of the node
pass the replies on to one another, as bits. Both exchanges treat a slice as they treat a chunk.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebit import kernels
from onebit.collectives.agreement import NODES, agree
from onebit.collectives.averaging import average_
from onebit.collectives.topology import Topology
from onebit.collectives.transport.protocol import LocalTransport, Transport, Work, all_gather_values
from onebit.kernels.backends import labelled
from onebit.kernels.data.layout import Layout, Span
from onebit.kernels.data.pieces import in_pieces
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Bits, Format, Messages, Norm, Scale
from onebit.kernels.passes import Compress, Decode, Dequantize, Gradients, Quantize

Reply = Literal["direct", 1]  # every rank's messages, or the mean of them compressed once more to 1 bit an element


@dataclass(frozen=True)
class Server:
    """What a rank keeps of a chunk whose shard it averages for all."""

    shard: Span
    residual: Residual
    received: Messages
    reply: Messages


@dataclass(frozen=True)
class Chunk:
    """One stage of the pipeline: its part of every buffer. With one level the slice is the chunk."""

    index: int
    span: Span
    slice: Span  # what this rank compresses
    residual: Residual  # of the slice
    sent: Messages  # of the slice
    arriving: Messages  # replies of the slice
    replies: Messages  # of the chunk
    server: Server | None = None

    @property
    def own_reply(self) -> Messages:
        """This rank's part of the replies, as it was sent: where a step is skipped, it is what the last step left."""
        return self.sent if self.server is None else self.server.reply

    @property
    def residuals(self) -> list[Residual]:
        return [self.residual, *([] if self.server is None else [self.server.residual])]


def facts(
    layout: Layout,
    chunks: int | str,
    scale: Scale,
    norm: Norm,
    bits: Bits,
    reply: Reply,
    nodes: bool,
) -> dict[str, int | str]:
    """What must be the same on all ranks for one to read another's messages."""
    return {
        "parameters": layout.parameters,
        "elements": int(layout.numel.sum()),
        "checksum of sizes": zlib.crc32(layout.sizes),
        "block_size": layout.block_size,
        "chunks": chunks,
        "scale": scale,
        "norm": norm,
        "bits": bits,
        "reply": str(reply),
        NODES: "given" if nodes else "none",
    }


class Exchange(ABC):
    """Residuals and messages of one layout on one rank, and the way they go between the replicas of a topology. With
    two levels each rank of a node has a slice."""

    reply_option: ClassVar[Reply]
    server_residual: Residual | None = None

    @property
    def own_row(self) -> int:
        """The index of this rank's own message among those that a chunk's replies are."""
        return self.node.rank * self.transport.size + self.transport.rank

    def __init__(
        self,
        topology: Topology,
        layout: Layout,
        device: torch.device,
        scale: Scale = "block",
        norm: Norm = "l1",
        bits: Bits = 1,
        *,
        value: Tensor | None = None,
    ) -> None:
        """`value`, fp32 [elements of the slices], becomes this rank's residual and is what it starts from."""
        self.transport, self.everyone = topology.replicas, topology.data_parallel
        self.node = topology.node or LocalTransport()
        ranks, places = self.transport.size, self.node.size
        shards = self.shards(ranks)
        if layout.ranks != places * shards:
            raise ValueError(f"the layout is cut for {layout.ranks} ranks, the group has {ranks}, the node {places}")
        self.layout, self.device = layout, device
        self.format = Format(layout, scale, norm, bits)
        self.reply_format = self._reply_format()
        self.backend = kernels.backend(device)
        self.wire_bytes = 0
        self.begin()
        self.live: Tensor | None = None  # uint8 [elements / 8]: a bit for each element that takes part, or all do
        self.all_live = False  # whether `live`, where it is there, is known to have every element
        slices = layout.parts(self.node.rank, places)
        self.residual = Residual.zeros(slices, self.format, device, value)
        self.sent = self._zeros(self.format, layout.chunks * shards)
        self.replies = self._zeros(self.reply_format, layout.chunks * ranks * places, ranks // shards)
        self.arriving = self.replies
        if places > 1:
            self.arriving = self._zeros(self.reply_format, layout.chunks * ranks, ranks // shards)
        residuals = self.residual.parts(slices)
        self.chunks = [self._chunk(j, residuals[j], server) for j, server in enumerate(self._servers())]
        self.agreed = False  # whether the ranks were found to cut and encode alike

    @classmethod
    @abstractmethod
    def shards(cls, ranks: int) -> int:
        """The number of shards of a chunk: the `ranks` of its layout."""

    def _reply_format(self) -> Format:
        """The format of what comes back."""
        return self.format

    def _servers(self) -> Sequence[Server | None]:
        """What this rank keeps of each chunk's shard that it averages; None for a chunk without one."""
        return [None] * self.layout.chunks

    @abstractmethod
    def _exchange_chunk(self, chunk: Chunk, over: Transport) -> Iterator[None]:
        """Turn a chunk's messages into the replies of its slice. Yields when it has started what it will wait for."""

    def run(
        self,
        compress: Callable[[Chunk], None],
        use: Callable[[Chunk], None] | None = None,
        *,
        backwards: bool = False,
        over: Transport | None = None,
        node: Transport | None = None,
        chunks: Sequence[Chunk] | None = None,
    ) -> Messages:
        """Exchange every chunk: `compress` writes a chunk's messages, `use` reads its replies.

        backwards: the last chunk first. over, node: other transports of the same ranks. chunks: `Undo.chunks`, where
        the step may have to be undone.
        """
        self.agree()
        chunks = list(chunks or self.chunks)
        if backwards:
            chunks.reverse()
        self.begin()
        over, node = over or self.transport, node or self.node

        def stages(chunk: Chunk) -> Iterator[None]:
            compress(chunk)
            self.compressed.add(chunk.index)
            yield from self._exchange_chunk(chunk, over)
            if node.size > 1:
                phase = f"the spread over the node (all-gather of chunk {chunk.index})"
                out, own = chunk.replies.buffer.view(node.size, -1), chunk.arriving.buffer.view(1, -1)
                work = node.all_gather(out, own, phase)
                yield
                arrived(work, chunk.replies, "the spread over the node")
            if use is not None:
                use(chunk)

        under_way: list[Iterator[None]] = []  # the last to start first: a stage of each, in this order
        for chunk in chunks:
            under_way = _one_stage_on([stages(chunk), *under_way])
        while under_way:
            under_way = _one_stage_on(under_way)
        return self.replies

    def compress(self, chunk: Chunk, gradients: Gradients) -> None:
        """Write a chunk's messages from gradients alone, without momentum."""
        span, residual, out = chunk.slice, chunk.residual, chunk.sent
        one_bit = self.format.bits == 1
        self.backend.run(
            Compress(span, gradients, None, residual, out) if one_bit else Quantize(span, gradients, residual, out)
        )

    def decode(self, span: Span, replies: Messages, out: Pointers) -> None:
        """Write the values that a span's replies stand for."""
        self.backend.run((Decode if self.format.bits == 1 else Dequantize)(span, replies, out))

    def begin(self) -> None:
        """No chunk is compressed yet, and this rank has averaged none for all."""
        self.compressed: set[int] = set()
        self.averaged: set[int] = set()

    def agree(self, more: Mapping[str, int | str] | None = None) -> None:
        """Compare once how the ranks cut and encode, and `more`. A difference is a ValueError on all of them."""
        if not self.agreed:
            layout, form, nodes = self.layout, self.format, self.node.size > 1
            common = facts(layout, layout.chunks, form.scale, form.norm, form.bits, self.reply_option, nodes)
            agree(self.everyone, self.device, {**common, **(more or {})})
            self.agreed = True

    def live_in(self, span: Span) -> Tensor | None:
        """A span's part of `live`; None where all elements take part."""
        return None if self.live is None or self.all_live else span.of_bits(self.live)

    def slices(self) -> Iterator[tuple[Span, Messages, Residual | None]]:
        """Yield each slice of every chunk, with its replies, and its residual if it is this rank's."""
        ranks, node = self.transport.size, self.node
        for chunk in self.chunks:
            for i in range(node.size):
                residual = chunk.residual if i == node.rank else None
                yield self.layout.part(chunk.index, i, node.size), chunk.replies.slice(i * ranks, ranks), residual

    def clear_replies(self, flags: Tensor) -> None:
        """What was received stands for 0, where flags, int32 [1], is 0. `residual` has been computed anew: it does not
        depend on a tensor scale any more."""
        received = [self.replies.payload, *(chunk.own_reply.payload for chunk in self.chunks)]
        if self.arriving is not self.replies:
            received.append(self.arriving.payload)
        if self.residual.scale is not None:
            received.append(self.residual.scale)
        taken = flags == 0
        for each in received:
            each.masked_fill_(taken, 0)

    def _chunk(self, index: int, residual: Residual, server: Server | None) -> Chunk:
        layout, ranks, node = self.layout, self.transport.size, self.node
        shards = self.shards(ranks)
        return Chunk(
            index=index,
            span=layout.chunk(index),
            slice=layout.part(index, node.rank, node.size),
            residual=residual,
            sent=self.sent.slice(index * shards, shards),
            arriving=self.arriving.slice(index * ranks, ranks),
            replies=self.replies.slice(index * ranks * node.size, ranks * node.size),
            server=server,
        )

    def _count(self, form: Format) -> None:
        """One message to every other rank."""
        self.wire_bytes += (self.transport.size - 1) * form.nbytes

    def _zeros(self, form: Format, rows: int, senders: int = 1) -> Messages:
        messages = form.empty(rows, self.device, senders)
        messages.buffer.zero_()
        return messages

    def merge_residuals(self, wire_dtype: torch.dtype | None = None) -> None:
        """e = mean_j(e_j) + E on every rank, and E = 0: what compression has left out is the same on all. A collective
        call. wire_dtype: what travels, where it is narrower than fp32.

        Where an all-reduce does not end, each piece of a chunk is as it was, or merged.
        """
        self.materialize()
        for chunk in self.chunks:
            start = 0
            for e in in_pieces(chunk.residual.value):
                mean, served = e.to(torch.float32, copy=True), list(_served(chunk, start, len(e)))
                for place, server in served:
                    mean[place].add_(server, alpha=self.transport.size)
                average_([mean], self.transport, wire_dtype=wire_dtype, phase="averaging residuals (all-reduce)")
                e.copy_(mean)
                for _, server in served:
                    server.zero_()
                start += len(e)

    def gathered_residual(self) -> Tensor:
        """e of every slice, in the order of the layout: fp32 [elements]. With nodes a collective call of this one."""
        own = self.residual.left_out().float()
        if self.node.size == 1:
            return own
        slices = [self.layout.parts(place, self.node.size) for place in range(self.node.size)]
        phase = "gathering the residuals of a node (all-gather)"
        return self._in_order(slices, _gathered(self.node, own, _elements(slices), phase))

    def gathered_server_residual(self) -> Tensor | None:
        """E of every rank's shards, in the order of the layout: fp32 [elements]. A collective call."""
        if self.server_residual is None:
            return None
        ranks, phase = self.layout.ranks, "gathering the server residuals (all-gather)"
        shards = [self.layout.parts(place, ranks) for place in range(ranks)]
        sizes, own = _elements(shards), self.server_residual.left_out().float()
        of_slice = _gathered(self.transport, own, sizes, phase)  # all as long as the longest
        everyone = _gathered(self.node, of_slice.view(-1), [of_slice.numel()], phase)
        return self._in_order(shards, everyone.view(ranks, -1))

    def _in_order(self, spans: Sequence[Sequence[Span]], rows: Tensor) -> Tensor:
        """fp32 [elements] from rows that begin with what some spans have, one after the other."""
        whole = torch.zeros(self.layout.elements, dtype=torch.float32, device=self.device)
        for own, row in zip(spans, rows, strict=True):
            for span in own:
                span.of(whole).copy_(row[: span.elements])
                row = row[span.elements :]
        return whole

    @property
    def residuals(self) -> dict[str, Residual]:
        """The residuals that this rank has, by name."""
        found = {"residual": self.residual}
        return found if self.server_residual is None else {**found, "server_residual": self.server_residual}

    def materialize(self) -> None:
        """Keep residuals as what was left out, with nothing to derive: the next step computes the same."""
        for residual in self.residuals.values():
            residual.materialize()

    def load_residual(self, tensors: Sequence[Tensor], served: Sequence[Tensor] | None = None) -> None:
        """Each tensor's residual becomes e, of which this rank has its slice, and E that of `served`, or 0."""
        for residual in self.residuals.values():
            residual.value.zero_()
            if residual.scale is not None:
                residual.scale.zero_()
        for chunk in self.chunks:
            for s in chunk.slice.segments():
                chunk.residual.value[s.offset : s.offset + s.stop - s.start] = tensors[s.parameter][s.start : s.stop]
            if served is not None and chunk.server is not None:
                for s in chunk.server.shard.segments():
                    value = served[s.parameter][s.start : s.stop]
                    chunk.server.residual.value[s.offset : s.offset + s.stop - s.start] = value


def _served(chunk: Chunk, start: int, elements: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield which of some elements of a chunk's slice this rank averages for all, if it does, and their E."""
    if chunk.server is not None:
        own = chunk.server.shard.start - chunk.slice.start - start
        first, stop = max(0, own), min(elements, own + chunk.server.shard.elements)
        if first < stop:
            yield slice(first, stop), chunk.server.residual.value[first - own : stop - own]


def _one_stage_on(under_way: list[Iterator[None]]) -> list[Iterator[None]]:
    """Those that are still under way then."""
    return [each for each in under_way if next(each, each) is None]


def arrived(work: Work, messages: Messages, phase: str) -> None:
    """Wait for messages, and read what their headers say."""
    with labelled(f"wait for {phase}"):
        work.wait()
    messages.check(phase)


def _gathered(transport: Transport, own: Tensor, sizes: Sequence[int], phase: str) -> Tensor:
    """fp32 [ranks, longest]: every rank's values, which are so many, and zeros."""
    return all_gather_values(transport, pad(own, (0, max(sizes) - len(own))), phase)


def _elements(spans: Sequence[Sequence[Span]]) -> list[int]:
    return [sum(span.elements for span in own) for own in spans]

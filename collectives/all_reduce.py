"""The general form: an error-compensated all-reduce of any tensors, in place, with 1, 4 or 8 bits an element.

    x_i  ->  decode(compress(mean_i decode(compress(x_i + e_i)) + E))

What compression leaves out is kept on both sides (e on every worker, E on every server) and sent with the next call,
so that over T calls the sum of the results differs from the sum of the means by the last residuals alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from onebit import kernels
from onebit.collectives.agreement import agree
from onebit.collectives.averaging import average_slices
from onebit.collectives.chunking import Chunking, shards_of
from onebit.collectives.exchange import Chunk, Exchange, facts
from onebit.collectives.flags import read_flags, travel_in_messages
from onebit.collectives.loading import ON_HOST, check_names, checked_count, checked_residual
from onebit.collectives.reply import AskedReply, check_reply, exchange_for
from onebit.collectives.topology import Topology
from onebit.collectives.undo import Undo
from onebit.kernels.data.checks import is_one_of, is_whole
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import BLOCK_SIZE, Layout
from onebit.kernels.data.pointers import Pointers, written_by_address
from onebit.kernels.data.wire import Bits, Format, Norm, Scale
from onebit.kernels.log import to_log
from onebit.kernels.passes import Gradients, Scan


class CompressedAllReduce:
    """Averages tensors over a group of ranks with 1, 4 or 8 bits an element on the wire.

        average = CompressedAllReduce(model_gradient.numel())
        average(model_gradient)

    A tensor with inf, NaN or a value beyond 2^40 on any rank (with two levels: in any node's mean) gives NaN on every
    rank, as an uncompressed mean of inf would, and leaves the residuals as they were.

    To save it, call `synchronize()` on every rank. Then `state_dict()` is the same on all of them, and loads on any
    number of ranks.

    Args:
        numel: elements of the tensor, or of each tensor of a list.
        device: where the tensors are.
        bits: of an element in a message. With 4 or 8 every 256 elements have a scale.
        scale: of 1 bit: "block", one scale for each block, or "tensor", one for each message.
        norm: how a scale of 1 bit is made: "l1", "l2", or with block scales "unbiased".
        reply: 1, as in the papers: a rank averages a shard for all and compresses the mean once more. "direct": every
            rank's message goes to all, and nothing is compressed twice; as many bytes with two ranks, N / 2 times as
            many with N. "auto": direct with two ranks, else 1.
        block_size: elements of a block, which with 1 bit share a scale, a multiple of 32; the last of a tensor may have
            fewer.
        chunks: pipeline stages; "auto" measures a few on the group at the first call, or in `prepare`, and keeps the
            best.
        process_group: a torch.distributed group, an mpi4py communicator, or None for the default group; without any
            group, this process alone. Or a Topology, for several of the same ranks.
        node_group: two levels: the ranks of this rank's node average uncompressed, in the tensors' dtype, and each
            sends a slice to the ranks of the same place on the other nodes, so that a node sends as much as one rank
            would. A group of any kind that process_group may be, or "auto" for the ranks of a host, if every host has
            equally many; None for one level. With two levels N is the number of nodes, and building it is a collective
            call.
    """

    @torch.inference_mode(False)  # what is built under it could not be written to outside
    def __init__(
        self,
        numel: int | Sequence[int],
        *,
        device: torch.device | str = "cpu",
        bits: Bits = 1,
        scale: Scale = "block",
        norm: Norm = "l1",
        reply: AskedReply = "auto",
        block_size: int = BLOCK_SIZE,
        chunks: int | Literal["auto"] = "auto",
        process_group: Any = None,
        node_group: Any = None,
    ) -> None:
        if not is_one_of(chunks, ("auto",)) and not is_whole(chunks, least=1):
            raise ValueError(f'chunks must be a positive number or "auto", got {chunks!r}')
        numels: Any = [numel] if is_whole(numel) else numel
        if not isinstance(numels, Sequence) or not all(map(is_whole, numels)):
            raise TypeError(f"numel={numel!r:.80}: it must be a number of elements, or a list of them")
        self.numels = [int(n) for n in numels]
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        kernels.backend(self.device)
        self._block_size = block_size
        self._tensors = Layout(self.numels, block_size=self._block_size)
        Format(self._tensors, scale, norm, bits)
        check_reply(reply)
        self.topology = Topology.of(process_group, node_group, self.device)
        self.transport = self.topology.replicas
        self._exchange_class = exchange_for(reply, self.transport.size)
        self._form: tuple[Scale, Norm, Bits] = scale, norm, bits
        self._chunks = chunks
        self._flags = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._hyper = hyper_table([Hyper()], self.device)
        self._pointers: Pointers | None = None
        self._undo: Undo | None = None
        self._sent = 0  # bytes, before the state was loaded
        # Each tensor's residual where it is the same on all ranks; None where calls were made since.
        self._residual: list[Tensor] | None = self._zeros()
        # Buffers and residuals. None with chunks="auto" before the first call or `prepare`.
        self.exchange = None if chunks == "auto" else self._build(int(chunks))

    def prepare(self) -> Exchange:
        """Make buffers and residuals, as the first call does. With chunks="auto" a collective call on all ranks.

        Returns:
            What holds them.
        """
        if self.exchange is None:
            topology, exchange_class, form = self.topology, self._exchange_class, self._form
            common = facts(self._tensors, "auto", *form, exchange_class.reply_option, topology.node is not None)
            agree(topology.data_parallel, self.device, common)
            chunking = Chunking(topology, sum(self.numels), self.device, *form, self._block_size, exchange_class)
            self.exchange = self._build(chunking.choose())
            self.exchange.load_residual(self._residual or self._zeros())
        return self.exchange

    @property
    def chunks(self) -> int | None:
        """Pipeline stages; None as long as `exchange` is."""
        return None if self.exchange is None else self.exchange.layout.chunks

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank has sent in messages, with two levels those to other nodes."""
        return self._sent + (0 if self.exchange is None else self.exchange.wire_bytes)

    @property
    def synchronized(self) -> bool:
        """Tell whether no call followed the last `synchronize()` or load; True for one process alone."""
        return self._residual is not None or self.topology.everyone.size == 1

    def __call__(self, tensors: Tensor | Sequence[Tensor]) -> None:
        """Replace each rank's tensors by the compressed mean, the same bit for bit on all ranks. A collective call.

        Args:
            tensors: one of `numel` elements, or as many as `numel` has; all of one dtype, on `device`.
        """
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        x = self._bind(tensors)
        exchange = self.prepare()
        exchange.agree({"dtype": str(x.dtype)})
        self._residual = None
        backend, node = exchange.backend, self.topology.node
        if node is not None:
            whole = [t.detach() for t in x.tensors if t is not None]
            for chunk in exchange.chunks:
                average_slices(exchange.layout.slices(chunk.index, node.size), whole, whole, node)
        self._flags.zero_()
        gradients = Gradients(x, self._hyper, self._flags)
        for chunk in exchange.chunks:
            backend.run(Scan(chunk.slice, gradients))
        together = travel_in_messages([exchange]) and self.topology.shard is None
        undo = self._undo_of(exchange) if together else None
        if undo is None:
            self.topology.everyone.all_max(self._flags, "agreeing on finite values (all-reduce of one number)")

        def compress(chunk: Chunk) -> None:
            if undo is not None:
                undo.save(chunk)
            exchange.compress(chunk, gradients)

        def decode(chunk: Chunk) -> None:
            if undo is not None:
                read_flags([exchange], self._flags)
            exchange.decode(chunk.span, chunk.replies, x)

        exchange.run(compress, decode, chunks=None if undo is None else undo.chunks)
        if undo is not None:
            undo.restore(self._flags)
        written_by_address(tensors)
        x.release()

    def synchronize(self) -> None:
        """Make the residual the same on all ranks, their mean: later calls go on from it. A collective call."""
        exchange = self.exchange
        if exchange is not None and exchange.agreed:
            exchange.merge_residuals()
            self._residual = self._parts(exchange)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without communication. Call `synchronize()` on every rank before.

        Returns:
            The residual of each tensor, zero, with a warning, if calls were made since `synchronize()`; and
            `wire_bytes`.
        """
        if self._residual is None and self.synchronized:
            self.synchronize()
        if self._residual is None:
            to_log(
                logging.WARNING,
                "state_dict() of CompressedAllReduce has residuals of zero: each rank has its own since the last "
                "call. Call synchronize() on every rank before state_dict()",
            )
        residual = self._residual or self._zeros()
        return {
            "residual": [torch.empty(t.shape, **ON_HOST).copy_(t) for t in residual],
            "wire_bytes": self.wire_bytes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the residual that was saved, on any number of ranks and with any options. Every rank loads it.

        Args:
            state: what `state_dict()` returned.
        """
        check_names(state, ("residual", "wire_bytes"), "CompressedAllReduce")
        residual = state["residual"]
        if not isinstance(residual, (list, tuple)):
            raise TypeError(f"the residual is a list of tensors, not a {type(residual).__name__}: it was damaged")
        if len(residual) != len(self.numels):
            raise ValueError(
                f"the state has residuals of {len(residual)} tensors, this all-reduce has {len(self.numels)}: build it "
                f"with the numel that it was saved with"
            )
        named = enumerate(zip(residual, self.numels, strict=True))
        loaded = [checked_residual(each, [numel], f"tensor {i}") for i, (each, numel) in named]
        self._sent, self._residual = checked_count(state["wire_bytes"], "wire_bytes"), loaded
        if self.exchange is not None:
            self.exchange.wire_bytes = 0
            self.exchange.load_residual(loaded)

    def residuals(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return e and E of each tensor, for an all-reduce of the same ranks that goes on with them. A collective call.

        Returns:
            This rank's e, and E of all servers.
        """
        exchange = self.prepare()
        served = exchange.gathered_server_residual()
        return self._parts(exchange), self._zeros() if served is None else self._of_tensors(exchange, served.cpu())

    def load_residuals(self, own: Sequence[Tensor], served: Sequence[Tensor]) -> None:
        """Go on from e and E of each tensor. A collective call.

        Args:
            own, served: what `residuals` of another all-reduce returned.
        """
        self.prepare().load_residual(own, served)
        self._residual = None

    def _parts(self, exchange: Exchange) -> list[Tensor]:
        """Each tensor's residual: with one level in the exchange's memory, with two gathered on the host."""
        one_level = self.topology.node is None
        return self._of_tensors(exchange, exchange.residual.value if one_level else exchange.gathered_residual().cpu())

    def _of_tensors(self, exchange: Exchange, whole: Tensor) -> list[Tensor]:
        offsets = exchange.layout.offset.tolist()
        return [whole[offset : offset + numel] for offset, numel in zip(offsets, self.numels, strict=True)]

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros(1, **ON_HOST).expand(numel) for numel in self.numels]

    @torch.inference_mode(False)
    def _build(self, chunks: int) -> Exchange:
        shards = shards_of(self.topology, self._exchange_class)
        layout = Layout(self.numels, block_size=self._block_size, ranks=shards, chunks=chunks)
        return self._exchange_class(self.topology, layout, self.device, *self._form)

    def _undo_of(self, exchange: Exchange) -> Undo:
        if self._undo is None or self._undo.exchange is not exchange:
            self._undo = Undo(exchange)
        return self._undo

    def _bind(self, tensors: list[Tensor]) -> Pointers:
        if tensors and tensors[0].device != self.device:
            raise ValueError(
                f"the tensors are on {tensors[0].device}, this all-reduce was built for {self.device}: pass "
                f"device={str(tensors[0].device)!r} when building it"
            )
        dtype = tensors[0].dtype if tensors else torch.float32
        if self._pointers is None or self._pointers.dtype != dtype:
            self._pointers = Pointers(self._tensors, self.device, dtype)
        self._pointers.bind_tensors(tensors)
        return self._pointers

"""The general form: an error-compensated 1-bit all-reduce of any tensors, in place.

    x_i  ->  decode(compress(mean_i decode(compress(x_i + e_i)) + E))

What compression leaves out is kept on both sides (e on every worker, E on every server) and sent with the next call,
so that over T calls the sum of the results differs from the sum of the means by the last residuals alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from onebit import kernels
from onebit.collectives.agreement import agree
from onebit.collectives.chunking import choose_chunks
from onebit.collectives.exchange import Chunk, Exchange, facts
from onebit.collectives.transport import transport_for
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import BLOCK_SIZE, Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Format, Norm, Scale


class CompressedAllReduce:
    """Averages tensors over a group of ranks with 1 bit an element on the wire.

        average = CompressedAllReduce(model_gradient.numel())
        average(model_gradient)

    numel: elements of the tensor, or of each tensor of a list.
    process_group: a torch.distributed group, an mpi4py communicator, or None for the default group; without any group,
        this process alone.
    chunks: pipeline stages; "auto" measures a few on the group at the first call and remembers the best.

    A tensor with inf, NaN or a value beyond 2^40 on any rank gives NaN on every rank, as an uncompressed mean of inf
    would, and leaves the residuals as they were.
    """

    def __init__(
        self,
        numel: int | Sequence[int],
        *,
        device: torch.device | str = "cpu",
        scale: Scale = "block",
        norm: Norm = "l1",
        block_size: int = BLOCK_SIZE,
        chunks: int | Literal["auto"] = "auto",
        process_group: Any = None,
    ) -> None:
        if chunks != "auto" and (not isinstance(chunks, int) or chunks < 1):
            raise ValueError(f'chunks must be a positive number or "auto", got {chunks!r}')
        numels = [numel] if isinstance(numel, Integral) else numel
        if not isinstance(numels, Sequence) or not all(isinstance(n, Integral) for n in numels):
            raise TypeError(f"numel={numel!r:.80}: it must be a number of elements, or a list of them")
        self.numels = [int(n) for n in numels]
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        kernels.backend(self.device)
        self._tensors = Layout(self.numels, block_size=block_size)
        Format.of(self._tensors, scale, norm)
        self.transport = transport_for(process_group)
        self._scale, self._norm, self._block_size, self._chunks = scale, norm, block_size, chunks
        self._flags = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._hyper = hyper_table([Hyper()], self.device)
        self._pointers: Pointers | None = None
        self._exchange = None if chunks == "auto" else self._built(chunks)

    @property
    def exchange(self) -> Exchange:
        """Buffers and residuals. With chunks="auto" the first use measures, on all ranks together."""
        if self._exchange is None:
            common = facts(self.numels, self._block_size, "auto", self._scale, self._norm)
            agree(self.transport, self.device, common)
            chunks = choose_chunks(
                self.transport, sum(self.numels), self.device, self._scale, self._norm, self._block_size
            )
            self._exchange = self._built(chunks)
        return self._exchange

    @property
    def chunks(self) -> int:
        return self.exchange.layout.chunks

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank has sent in messages."""
        return 0 if self._exchange is None else self._exchange.wire_bytes

    def __call__(self, tensors: Tensor | Sequence[Tensor]) -> None:
        """Replace each rank's tensors by the compressed mean, the same bit for bit on all ranks."""
        x = self._point([tensors] if isinstance(tensors, Tensor) else list(tensors))
        exchange = self.exchange
        exchange.agree({"dtype": str(x.dtype)})
        backend = exchange.backend
        self._flags.zero_()
        backend.scan(exchange.layout.all(), x, self._hyper, self._flags)
        self.transport.all_max(self._flags, "agreeing on finite values (all-reduce of one number)")

        def compress(chunk: Chunk) -> None:
            backend.compress(chunk.span, x, None, chunk.residual, self._hyper, self._flags, chunk.sent)

        exchange.run(compress, lambda chunk: backend.decode(chunk.span, chunk.replies, x))
        x.release()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals; every rank saves its own. A collective before the first use with chunks="auto"."""
        exchange = self.exchange
        own = {
            "rank": self.transport.rank,
            "chunks": self.chunks,
            "format": exchange.format.fingerprint,
            "wire_bytes": exchange.wire_bytes,
        }
        return {**own, **exchange.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as if the process had never stopped: same rank, same group size, same tensors."""
        missing = {"rank", "chunks", "format", "wire_bytes", "residual", "server_residual"} - state.keys()
        if missing:
            raise ValueError(f"not a state of CompressedAllReduce: it lacks {', '.join(sorted(missing))}")
        residuals = dict(state)
        numbers = [residuals.pop(name) for name in ("rank", "chunks", "format", "wire_bytes")]
        if not all(isinstance(n, int) for n in numbers):
            raise ValueError("rank, chunks, format and wire_bytes are numbers, not {numbers}: it was damaged")
        rank, chunks, form, wire_bytes = numbers
        if rank != self.transport.rank:
            raise ValueError(
                f"the state was saved by rank {rank}, this is rank {self.transport.rank}: residuals are each rank's "
                f"own. Save on every rank, and load what the same rank saved"
            )
        exchange = self._exchange
        if exchange is None or exchange.layout.chunks != chunks:
            if self._chunks not in ("auto", chunks):
                raise ValueError(
                    f"the state was saved with chunks={chunks}, this all-reduce has chunks={self._chunks}: pass "
                    f"chunks={chunks} or chunks='auto'"
                )
            exchange = self._built(chunks)
        exchange.check_state_dict(residuals)
        if form != exchange.format.fingerprint:
            raise ValueError(
                "the state was saved for tensors of other sizes or with other options: build the all-reduce with the "
                "numel, block_size, scale, norm and number of ranks it was saved with"
            )
        exchange.load_state_dict(residuals)
        exchange.wire_bytes = wire_bytes
        self._exchange = exchange

    def _built(self, chunks: int) -> Exchange:
        layout = Layout(self.numels, block_size=self._block_size, ranks=self.transport.size, chunks=chunks)
        return Exchange(layout, self.transport, self.device, self._scale, self._norm)

    def _point(self, tensors: list[Tensor]) -> Pointers:
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

"""m = compressed_all_reduce(b1 m + (1-b1) g), for the momentum of one flat state.

What a rank leaves out is the field "residual". m is what the last exchange received, never fp32: 1 bit an element, N
with direct replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onebit.collectives.exchange import Chunk, Exchange
from onebit.collectives.undo import Undo
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages
from onebit.kernels.passes import Compress, Decode, Gradients
from onebit.optim.fields import FOLDED_MOMENTUM, RESIDUAL
from onebit.optim.flat_state import FlatState, pieces
from onebit.optim.limit import UpdateLimit
from onebit.optim.stages import AsyncReadback


class MomentumReducer:
    """Residuals and messages of one flat state, and the way they go."""

    def __init__(self, state: FlatState, exchange: Exchange, gamma: Tensor | None, keep_previous: bool) -> None:
        """exchange: whose residual is that of `state`. gamma: fp32 [parameters], what the messages of each parameter
        are multiplied by; None for 1. keep_previous: whether `previous` is wanted."""
        self.state, self.exchange, self.gamma = state, exchange, gamma
        m = exchange.replies
        self._previous = m.format.empty(m.rows, state.device, m.senders) if keep_previous else None
        self.limit: UpdateLimit | None = None  # of a step by m
        self.momentum_is_own = False  # local steps begin from a field that has m, which no message does
        self._all_live = AsyncReadback()

    @property
    def replies(self) -> Messages:
        """m of the last step."""
        return self.exchange.replies

    @property
    def previous(self) -> Tensor | Messages:
        """m of the step before: dense until a compressed step was taken."""
        dense = self.state.get(FOLDED_MOMENTUM.name)
        assert self._previous is not None
        return self._previous if dense is None else dense

    @property
    def served_spans(self) -> list[Span]:
        """What this rank averages for all."""
        layout, exchange = self.exchange.layout, self.exchange
        return [] if exchange.server_residual is None else layout.parts(exchange.own_row, layout.ranks)

    def served(self, index: int) -> list[tuple[slice, Tensor]]:
        """Which elements of a parameter this rank averages, and what it has left out of them. `materialize` first."""
        server = self.exchange.server_residual
        return [] if server is None else pieces(self.served_spans, server.value, index)

    def all_reduce(self, hyper: Tensor, flags: Tensor, undo: Undo | None = None) -> None:
        """`replies` become the new m. undo: keeps what this changes."""

        def compress(chunk: Chunk) -> None:
            if undo is not None:
                undo.save(chunk)
            self.compress(chunk, hyper, flags)

        self.keep_previous_momentum()
        self.exchange.run(compress, chunks=None if undo is None else undo.chunks)

    def clip(self, hyper: Tensor, weight: Tensor | None = None) -> Tensor | None:
        """f, fp32 [parameters], of a step by m times weight: how much of the step is taken. None for all of every
        step."""
        return None if self.limit is None else self.limit.of_messages(hyper, weight)

    def mask_was_updated(self, all_live: Tensor) -> None:
        """Note that a step has updated the mask. all_live: bool [1], whether every element takes part now; the host
        knows with the next step."""
        self.exchange.all_live = False
        self._all_live.start(all_live)

    def read_mask(self) -> None:
        """A step begins: whether its messages need a mask."""
        found = self._all_live.finish()
        if found is not None:
            self.exchange.all_live = bool(found[0])

    def momentum(self, into: Tensor | None = None) -> list[Tensor]:
        """Decode m of the last step that was taken: fp32, a tensor a parameter. into: fp32 [elements], where to."""
        state, replies = self.state, replace(self.replies, buffer=self.replies.buffer.clone())
        replies.flags.zero_()  # a flagged message has what the last step left
        flat = into
        if flat is None:
            flat = torch.zeros(state.layout.elements, dtype=torch.float32, device=state.device)
        parts = [state.elements_of(flat, i) for i in range(len(state.params))]
        state.backend.run(Decode(state.layout.all(), replies, Pointers.to(state.layout, parts)))
        return [state.cut(flat, i) for i in range(len(state.params))]

    def add_to_residual(self, values: Tensor, factors: Sequence[float]) -> None:
        """values: fp32 [elements]; each parameter's are multiplied by its factor."""
        self.exchange.materialize()
        for i, factor in enumerate(factors):
            for part, e in self.state.parts_of(RESIDUAL.name, i):
                e.add_(self.state.elements_of(values, i)[part], alpha=factor)

    def residual_share(self, index: int) -> Tensor:
        """What this rank has left out of the mean of one parameter, fp32 [elements]: e / N, and E where it averages."""
        self.exchange.materialize()
        found = torch.zeros(self.state.numels[index], dtype=torch.float32, device=self.state.device)
        for part, e in self.state.parts_of(RESIDUAL.name, index):
            found[part] = e / self.exchange.transport.size
        for part, e in self.served(index):
            found[part] += e
        return found

    def compress(self, chunk: Chunk, hyper: Tensor, flags: Tensor) -> None:
        """One chunk's messages of b1 m + (1-b1) g."""
        live = self.exchange.live_in(chunk.slice)
        self.state.backend.run(Compress(
            chunk.slice, Gradients(self.state.gradients, hyper, flags), chunk.arriving, chunk.residual, chunk.sent,
            live=live, gamma=self.gamma,
        ))  # fmt: skip

    def keep_previous_momentum(self) -> None:
        """Copy the momentum before an exchange overwrites it."""
        if self._previous is not None and FOLDED_MOMENTUM.name not in self.state:
            self._previous.buffer.copy_(self.replies.buffer)

"""overlap=True: in stage 2 the message of a chunk leaves as soon as backward has computed the chunk's gradients.

    backward   the last layers' gradients are there -> the last chunk is compressed and sent -> ... -> the first chunk
    step       waits for what is still on its way, then updates every parameter

It is the exchange of a step without overlap, in a thread and on a process group of its own, where compressing a chunk
waits for its gradients: the results are the same bit for bit. All collectives come from that one thread, the last
chunk's first, on every rank alike.

A gradient that is not finite marks its own chunk's messages alone, since others may have left. Every rank finds the
mark in the replies; then no parameter moves, and what the exchange changed is put back (`collectives.undo`).

Where gradients change after they have left, the exchange is taken back and done again with those that hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from onebit.collectives.exchange import Chunk
from onebit.collectives.transport.protocol import Transport
from onebit.collectives.undo import Undo
from onebit.kernels.data.wire import Messages
from onebit.optim.flat_state import Space
from onebit.optim.gradients import marks, same
from onebit.parallel.flight import Flight, exchange_of
from onebit.warning import warn

if TYPE_CHECKING:
    from onebit.optim.optimizer import OneBitOptimizer


class Overlap:
    """From stage 2 on, where it was asked for: the early exchange of every step."""

    def __init__(self, optimizer: OneBitOptimizer, wanted: bool) -> None:
        self._optimizer: OneBitOptimizer = weakref.proxy(optimizer)
        self._wanted, self.holding = wanted, False  # holding: backward passes accumulate
        self._spaces: list[Space] = []  # those it goes on for
        self._transport: Transport | None = None
        self._flight: Flight | None = None
        self._hooks: list[Any] = []
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None

    @property
    def on(self) -> bool:
        """The same on all ranks."""
        return bool(self._spaces)

    @property
    def under_way(self) -> bool:
        """Whether messages have left for a step that is still to come."""
        return self._flight is not None

    def follow(self, model: DistributedDataParallel) -> None:
        """Where its gradients come from: within its no_sync they accumulate."""
        self._model = weakref.ref(model)

    def begin(self) -> None:
        """Stage 2 has begun, or another state was loaded: a collective call."""
        optimizer = self._optimizer
        if not self._wanted or optimizer._transport.size == 1 or self._spaces is optimizer._spaces:
            return
        self._close()
        self._transport = self._transport or optimizer._transport.duplicate()
        self._spaces = optimizer._spaces
        for space in self._spaces:
            exchange_of(space).agree()
        self._undo = [Undo(exchange_of(space)) for space in self._spaces]
        self._place = {p: (s, i) for s, space in enumerate(self._spaces) for i, p in enumerate(space.params)}
        self._side = torch.cuda.Stream(optimizer._device) if optimizer._device.type == "cuda" else None
        arrived = partial(_arrived, weakref.ref(self))
        self._hooks = [p.register_post_accumulate_grad_hook(arrived) for p in self._place]

    @torch.no_grad()
    def arrived(self, parameter: Tensor) -> None:
        """Within a backward pass: its gradient is what it will be, or the user accumulates without saying so."""
        model = self._model()
        if self.holding or (model is not None and not model.require_backward_grad_sync):
            return
        if not self.under_way:
            self._optimizer._begin()
        if not self.on:
            return
        flight = self._flight
        if flight is None:
            flight = self._start()
            _when_backward_ends(partial(_backward_ended, weakref.ref(self), flight))
        if not flight.put([self._place[parameter]], [parameter.grad]):
            self.stop(
                "a backward pass accumulated into gradients that were being sent. Wrap all but the last one before a "
                "step in optimizer.no_sync() (or DDP's), or pass overlap=False"
            )

    def finish(self, flags: Tensor) -> None:
        """Every reply is there, and `flags` and all of them say whether the step must not be taken."""
        self._end(self._flight or self._start())
        replies = [exchange_of(space).replies.flags for space in self._spaces]
        flags.copy_(torch.stack([marked.max() for marked in replies]).max())
        for marked in replies:
            marked.copy_(flags.expand_as(marked))

    def all_reduce_momentum(
        self, space: Space, hyper: Tensor, flags: Tensor, use: Callable[[Chunk], None] | None = None
    ) -> Messages:
        """m = compressed_all_reduce(b1 m + (1-b1) g): now, or it came while backward computed."""
        if not self.on:
            return space.all_reduce_momentum(hyper, flags, use)
        exchange = exchange_of(space)
        if use is not None:
            for chunk in exchange.chunks:
                use(chunk)
        return exchange.replies

    def put_back(self, flags: Tensor | None = None) -> None:
        """Where the step was not taken, or always: all state as it was before it."""
        for undo in self._undo if self.on else ():
            undo.restore(flags)

    def take_back(self) -> None:
        """As if no message had left."""
        if self._flight is not None:
            self._end(self._flight)
            self.put_back()

    def stop(self, why: str) -> None:
        """For good, on all ranks. Others may have sent messages of this step, also where this one has not."""
        if self.on:
            self._flight = self._flight or self._start()
            self.take_back()
            self._close()
            self._wanted, self._spaces = False, []
            self._optimizer._to_tell.append(partial(warn, f"overlap is off from here on: {why}"))

    def stop_if_unfit(self) -> None:
        """Where gradients, or numbers that messages were made of, are no more what they were."""
        optimizer, flight = self._optimizer, self._flight
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            self.stop("GradScaler tells its scale only after messages have left. Pass overlap=False")
        elif flight is not None and flight.betas != self._betas:
            self.stop("betas changed between backward and step. Change them after the step")
        elif flight is not None and flight.marks is not None and not same(flight.marks, self._spaces):
            self.stop("gradients changed between backward and step. Change them in hooks, or pass overlap=False")

    def check_at_rest(self, what: str) -> None:
        if self.under_way:
            raise ValueError(
                f"{what} between backward and step: with overlap=True messages are on their way, and state is neither "
                f"the last step's nor the next one's. Call it after step()"
            )

    @property
    def _betas(self) -> list[tuple[float, float]]:
        return [tuple(group["betas"]) for group in self._optimizer.param_groups]

    def _start(self) -> Flight:
        assert self._transport is not None
        hyper = self._optimizer._write_hyper(None)
        for space in self._spaces:
            space.remember()
        self._flight = Flight(self._spaces, self._undo, self._transport, self._side, hyper, self._betas)
        return self._flight

    def _end(self, flight: Flight) -> None:
        self._flight = None
        flight.end()

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _arrived(overlap: weakref.ref[Overlap], parameter: Tensor) -> None:
    """What torch calls when a gradient has been accumulated."""
    own = overlap()
    if own is not None:
        own.arrived(parameter)


def _backward_ended(overlap: weakref.ref[Overlap], flight: Flight) -> None:
    flight.close()
    _when_backward_ends(partial(_mark, overlap, flight))  # behind DDP's own, which may still put gradients elsewhere


def _mark(overlap: weakref.ref[Overlap], flight: Flight) -> None:
    own = overlap()
    if own is not None:
        flight.marks = marks(own._spaces)


def _when_backward_ends(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)

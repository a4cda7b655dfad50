"""overlap=True: in stage 2 the message of a chunk leaves as soon as backward has computed the chunk's gradients.

    backward   the last layers' gradients are there -> the last chunk is compressed and sent -> ... -> the first chunk
    step       waits for what is still on its way, then updates every parameter

It is the exchange of a step without overlap, in a thread and on a process group of its own, where compressing a chunk
waits for its gradients: the results are the same bit for bit. All collectives come from that one thread, the last
chunk's first, on every rank alike. With two levels it averages a chunk's gradients over the node first, into a buffer
of their own: DDP may write to `.grad` until backward ends.

A gradient that is not finite marks its own chunk's messages alone, since others may have left. Every rank finds the
mark in the replies; then no parameter moves, and what the exchange changed is restored (`onebit.collectives.undo`).

Where gradients change after they have left, the exchange is taken back and done again with those that hold.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from onebit.collectives.agreement import listed
from onebit.collectives.transport.protocol import Ranks, Transport
from onebit.collectives.transport.torch import TorchTransport
from onebit.kernels import streams
from onebit.optim.gradients import unchanged
from onebit.optim.param_groups import betas_of
from onebit.optim.run import Run
from onebit.optim.steps import LocalStep, OneBitStep, SentStep, Step
from onebit.parallel.buckets import within_no_sync
from onebit.parallel.flight import Flight, node_means
from onebit.warning import warn

_WHY = (
    "",
    "gradients changed between backward and step. Change them in hooks, or pass overlap=False",
    "a backward pass accumulated into gradients that were being sent. Wrap all but the last one before a step in "
    "optimizer.no_sync() (or DDP's), or pass overlap=False",
    "betas changed between backward and step. Change them after the step",
    "GradScaler tells its scale only after messages have left. Pass overlap=False",
)
"""Messages that have left must not count, by the number that ranks compare."""


class Host(Protocol):
    """What overlap asks of its optimizer."""

    begun: bool
    after_step: list[Callable[[], None]]

    def begin_step(self) -> Step: ...


@dataclass
class _Groups:
    """The replicas and the node, for the thread."""

    replicas: Transport
    node: Transport | None
    at_rest: bool = True  # whether no message is on its way: one that nobody waits for would be taken for another's

    def close(self) -> None:
        """The optimizer is dropped: the next one takes these groups, with their threads and connections."""
        for each in (self.replicas, self.node) if self.at_rest else ():
            if isinstance(each, TorchTransport):
                each.close()


class Overlap:
    """The early exchange of every step from stage 2 on, if it was asked for."""

    def __init__(self, host: Host, wanted: bool) -> None:
        self._host: Host = weakref.proxy(host)
        self.wanted = wanted  # the same on all ranks
        self._accumulating = False
        self._coming: Step | None = None  # of `prepare`
        self._run: Run | None = None  # that it is on for
        self._groups: _Groups | None = None  # for the thread
        self._close_groups: Callable[[], object] = lambda: None  # at the latest when the optimizer is dropped
        self._asked: Ranks | None = None  # all ranks, by what their hosts can send
        self._flight: Flight | None = None
        self._means: list[list[Tensor] | None] = []
        self._hooks: list[Any] = []
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None

    @property
    def on(self) -> bool:
        """The same on all ranks."""
        return self._run is not None

    @property
    def in_flight(self) -> bool:
        """Return whether messages have left for a step that is still to come."""
        return self._flight is not None

    def set_model(self, model: DistributedDataParallel) -> None:
        """Set the model that gradients come from: within its no_sync they accumulate."""
        self._model = weakref.ref(model)

    def prepare(self, step: Step) -> None:
        """Prepare for a step: messages leave in backward in compressed steps alone, not in full ones, and after local
        ones it is set up anew. A collective call after a start, a load or a pause."""
        if not self.wanted:
            return
        self._coming = step
        if isinstance(step, LocalStep):
            self._pause()
        elif isinstance(step, OneBitStep):
            self._enable(step.run)

    def sent(self, step: Step) -> Step:
        """The same step, or as one whose messages have left in backward. A collective call where they may have."""
        if isinstance(step, OneBitStep) and self.on and self._wait_for_replies():
            return SentStep(step.run, step.gradients)
        return step

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around backward passes that accumulate into gradients that are not to be sent yet."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def _enable(self, run: Run) -> None:
        setup, state = run.setup, run.state
        if setup.topology.everyone.size == 1 or (self._run is not None and self._run.state is state):
            return
        self._remove_hooks()
        node = setup.topology.node
        if self._groups is None:
            self._groups = _Groups(setup.topology.replicas.duplicate(), node and node.duplicate())
            self._close_groups = closing = weakref.finalize(self, self._groups.close)
            closing.atexit = False
        self._asked = self._asked or setup.topology.everyone.of_hosts()
        for reducer in state.reducers:
            reducer.exchange.agree()
        self._run = run
        self._means = [node_means(each) if each.slices > 1 else None for each in state.compressed]
        self._place = {p: (s, i) for s, each in enumerate(state.compressed) for i, p in enumerate(each.params)}
        self._side = streams.new(setup.device) if streams.has_streams(setup.device) else None
        own = weakref.ref(self)

        def ready(parameter: Tensor) -> None:
            if (overlap := own()) is not None:
                overlap.gradient_ready(parameter)

        self._hooks = [p.register_post_accumulate_grad_hook(ready) for p in self._place]

    def _pause(self) -> None:
        """No message leaves in backward, until `prepare`."""
        if self._run is not None:
            self._run.state.kept_undo = []
            self._remove_hooks()
            self._run, self._means = None, []

    @torch.no_grad()
    def gradient_ready(self, parameter: Tensor) -> None:
        """Send what can leave: within a backward pass this gradient is what it will be, or the user accumulates without
        saying so."""
        model = self._model()
        if self._accumulating or (model is not None and within_no_sync(model)):
            return
        flight = self._flight
        if flight is None:
            if not self._host.begun:
                self._host.begin_step()
            if not self.on or not isinstance(self._coming, OneBitStep):
                return
            flight = self._start()
            _when_backward_ends(partial(_backward_ended, flight))
        if not flight.put([self._place[parameter]], [parameter.grad]):
            flight.accumulated = True

    def _wait_for_replies(self) -> bool:
        """Every reply is there, and says of its own chunk whether the step must not be taken. False: what was sent must
        not count, on any rank, since one of them has changed what it was made of; overlap is off from here on.

        Ranks compare while the last replies are on their way: a number of the host, for which no device is waited."""
        assert self._asked is not None
        flight, phase = self._flight or self._start(), "comparing what has changed since backward (all-gather)"
        own = torch.tensor([self._changed(flight)], device="cpu")
        found = torch.empty((self._asked.size, 8), dtype=torch.uint8, device="cpu")
        answers = self._asked.all_gather(found, own.view(torch.uint8)[None], phase)
        self._finish(flight)
        answers.wait()
        by_rank = found.view(torch.int64).view(-1).tolist()
        if not (why := max(by_rank)):
            return True
        self._take_back()
        some = [rank for rank, each in enumerate(by_rank) if each]
        self._turn_off(_WHY[why] if len(some) == len(by_rank) else f"on {listed(some, self._asked)} alone {_WHY[why]}")
        return False

    def cancel_in_flight(self) -> None:
        """Restore state as if no message had left."""
        if self._flight is not None:
            self._finish(self._flight)
            self._take_back()

    def _take_back(self) -> None:
        assert self._run is not None
        self._run.take_back_exchanges()

    def abandon(self) -> None:
        """Messages that a rank which died keeps from arriving: `State.under_way` has what takes them back."""
        if self._flight is not None:
            with contextlib.suppress(Exception):  # also of a reply that is half there
                self._finish(self._flight)

    def disable(self, why: str) -> None:
        """Turn it off for good, on all ranks. Others may have sent messages of this step, also if this one has not."""
        if self.on:
            if isinstance(self._coming, OneBitStep):
                self._flight = self._flight or self._start()
            self.cancel_in_flight()
            self._turn_off(why)

    def _turn_off(self, why: str) -> None:
        self._pause()
        self.wanted, self._coming = False, None
        self._host.after_step.append(partial(warn, f"overlap is off from here on: {why}"))

    def _changed(self, flight: Flight) -> int:
        """Return which text says what has changed of the gradients, or numbers, that messages were made of; 0 if
        nothing has."""
        host = self._host
        if getattr(host, "grad_scale", None) is not None or getattr(host, "found_inf", None) is not None:
            return 4
        if flight.betas != self._betas:
            return 3
        if flight.accumulated:
            return 2
        return int(flight.versions is not None and not unchanged(flight.versions, flight.states))

    def go_on_with_others(self, wanted: bool) -> None:
        """Other ranks from here on: groups of theirs are made when the coming step is prepared. wanted: by all."""
        self._pause()
        self._close_groups()
        self.wanted = wanted
        self._coming, self._groups, self._asked = None, None, None
        self._model = lambda: None

    def check_at_rest(self, what: str) -> None:
        if self.in_flight:
            raise ValueError(
                f"{what} between backward and step: with overlap=True messages are on their way, and state is neither "
                f"the last step's nor the next one's. Call it after step()"
            )

    @property
    def _betas(self) -> list[tuple[float, float]]:
        assert self._coming is not None
        return [betas_of(group) for group in self._coming.run.setup.groups]

    def _start(self) -> Flight:
        groups, step = self._groups, self._coming
        assert groups is not None and step is not None
        run, hyper, reducers = step.run, step.gradients.write_hyper(step.run), step.run.state.reducers
        for reducer in reducers:
            reducer.keep_previous_momentum()
        wire = run.setup.options.gradient_dtype
        groups.at_rest, over = False, (groups.replicas, groups.node)
        run.begin_exchanges(run.state.undo, by_flags=True)
        self._flight = Flight(reducers, run.state.undo, *over, self._side, hyper, self._betas, self._means, wire)
        return self._flight

    def _finish(self, flight: Flight) -> None:
        self._flight = None
        flight.finish()
        assert self._groups is not None
        self._groups.at_rest = True

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _backward_ended(flight: Flight) -> None:
    flight.close()
    _when_backward_ends(flight.keep_versions)  # after DDP's own, which may still move gradients


def _when_backward_ends(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)

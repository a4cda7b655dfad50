"""A run's state for a process that will join, while the run goes on: the state once, then what each step has added.

    1-bit step, sync    the replies: 1 bit an element, as this rank has got them
    full step           the averaged gradients, 4 bytes an element
    local step          the numbers of param groups

By these the process takes the same steps, to the same bits (`following`). Where more has piled up than two states, the
state is sent anew. While this rank is in `step`, its messages have the network: what is given waits.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint import schema
from onebit.collectives.hand_over import send_tensors
from onebit.collectives.heartbeat import own_address
from onebit.collectives.link import Link, Listener
from onebit.collectives.transport.protocol import CollectiveError
from onebit.elastic.moving import Shared, group_values
from onebit.kernels.log import to_log
from onebit.optim import facts
from onebit.optim.steps import LocalStep, Step, SyncStep
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.unwrap import own_optimizer

PHASE = "giving a state to a process that will join"
LAST = ("end", "error")
CPU = torch.device("cpu")


class Giver:
    """Gives a run's state to processes that will join, in the background. On any rank, between two steps.

        giver = onebit.Giver(optimizer)           # a rank that is there
        ...                                       # giver.address reaches the process that comes, and that process calls
        onebit.follow(optimizer, address)         # this, which returns when the process has caught up
        onebit.reform(optimizer, group)           # all of them, between two steps: next to nothing is left to send

    A step costs nothing more while nobody follows. While somebody does, this rank keeps what the steps have added until
    it is sent: two states at most for each process. A giver ends with `close`, or with its optimizer.

    Args:
        optimizer: one of onebit, wrapped or not.
        host: the address of this host that others reach; by default as `Heartbeat` finds it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, host: str | None = None) -> None:
        self._inner = own_optimizer(optimizer, "Giver")
        if self._inner.setup.topology.shard is not None:
            raise ValueError("Giver with sharded parameters (FSDP) is not possible: no rank has the whole state")
        if self._inner.giver is not None:
            raise ValueError("this optimizer has a Giver already, which can give to several: take its address")
        if self._inner.follower is not None:
            raise ValueError("this process follows a run, and can give its state after onebit.reform")
        self._arrived, self._logs = deque[Link](), list[Log]()
        self._idle = threading.Event()  # set while this rank is in no step
        self._idle.set()
        self._listener = Listener(host or own_address())
        self._end_all = weakref.finalize(self, _end_all, self._listener, self._arrived, self._logs, self._idle)
        self._inner.giver = self
        work = (self._listener, self._arrived, self._idle)
        threading.Thread(target=_accept, args=work, name="onebit giver", daemon=True).start()

    @property
    def address(self) -> str:
        """The address that `onebit.follow` takes."""
        return self._listener.address

    @property
    def followers(self) -> int:
        """How many processes follow."""
        return len(self._arrived) + sum(not log.over for log in self._logs)

    def close(self) -> None:
        """End: nobody gets anything any more."""
        if self._inner.giver is self:
            self._inner.giver = None
        self._end_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let what is given wait while this rank is in a step."""
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    def step_ended(self, step: Step, flags: Tensor) -> None:
        """What the step has added, and a state where one is due. An error is that of the process that follows."""
        try:
            self._give(step, flags)
        except Exception as error:
            to_log(logging.WARNING, "no state can be given: %s", error)
            self._end(self._those_there(), {"kind": "error", "why": str(error)})

    def _give(self, step: Step, flags: Tensor) -> None:
        logs = self._those_there()
        new = [log for log in logs if log.wants_state]
        if len(new) < len(logs):
            entry = _entry(step, flags, self._inner)
            for log in logs:
                if log not in new:
                    log.add(entry)
        if new and self._inner.synchronized:
            state = self._state()
            for log in new:
                log.start_anew(state)

    def parameters_changed(self) -> None:
        """Give a whole state with the next step, since parameters were changed between two steps."""
        for log in self._those_there():
            log.wants_state = True

    def end(self, those_without_state: bool = False) -> None:
        """Ranks change: who follows hears that no step comes any more."""
        logs = [log for log in self._those_there() if log.wants_state or not those_without_state]
        self._end(logs, {"kind": "end", "groups": group_values(self._inner)})

    def _end(self, logs: Sequence[Log], value: dict[str, Any]) -> None:
        for log in logs:
            log.add(Entry(value, []))
        self._logs[:] = [log for log in self._logs if log not in logs]

    def _those_there(self) -> list[Log]:
        while self._arrived:
            self._logs.append(Log(self._arrived.popleft()))
        self._logs[:] = [log for log in self._logs if not log.over]
        return self._logs

    def _state(self) -> Entry:
        inner = self._inner
        inner.catch_up()
        run, setup = inner.run, inner.setup
        shared = Shared.of(inner, schema.save(run, residuals=False), schema.progress(run)).clone()
        value, tensors = shared.packed()
        ranks = {"nodes": setup.topology.nodes, "slices": setup.topology.slices}
        return Entry(
            {"kind": "state", "facts": {**facts.of_model(setup), **facts.of_options(setup)}, **ranks, **value}, tensors
        )


@dataclass(frozen=True)
class Entry:
    """What is sent at once. Nobody changes its tensors."""

    value: dict[str, Any]
    tensors: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def _accept(listener: Listener, arrived: deque[Link], idle: threading.Event) -> None:
    while (link := listener.accept()) is not None:
        link.give_way(idle)
        arrived.append(link)


def _end_all(listener: Listener, arrived: deque[Link], logs: list[Log], idle: threading.Event) -> None:
    idle.set()
    listener.close()
    for link in arrived:
        link.close()
    for log in logs:
        log.close()


class Log:
    """What one process has still to get, and a thread that sends it."""

    def __init__(self, link: Link) -> None:
        self.link, self.wants_state, self.over = link, True, False
        self._left: deque[Entry] = deque()
        self._state_bytes = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._send_all, name="onebit log", daemon=True).start()

    def start_anew(self, state: Entry) -> None:
        with self._changed:
            self._left.clear()
            self.wants_state, self._state_bytes = False, state.nbytes
        self.add(state)

    def close(self) -> None:
        with self._changed:
            self.over = True
            self._changed.notify_all()
        self.link.close()

    def add(self, entry: Entry) -> None:
        with self._changed:
            self._left.append(entry)
            self.wants_state = sum(each.nbytes for each in self._left) > 2 * self._state_bytes
            self._changed.notify_all()

    def _send_all(self) -> None:
        kind, told = "", False
        try:
            while kind not in LAST:
                with self._changed:
                    self._changed.wait_for(lambda: self._left or self.over)
                    if self.over:
                        return
                    entry = self._left.popleft()
                kind = entry.value["kind"]
                send_tensors(self.link, 0, entry.value, entry.tensors, CPU, PHASE)
                if not (told or self._left or kind in LAST):
                    send_tensors(self.link, 0, {"kind": "that is all"}, [], CPU, PHASE)
                    told = True
        except CollectiveError:
            pass  # it has gone: that is its own affair
        finally:
            self.over = True
            self.link.close()


def _entry(step: Step, flags: Tensor, inner: OneBitOptimizer) -> Entry:
    """What a process that follows needs to take this step."""
    state, skipped = step.run.state, not step.alone and bool(flags.any())
    if isinstance(step, SyncStep) and not state.synchronized:  # a rank died: the new group exchanges again
        step = LocalStep(step.run, step.gradients)
    value = {
        "kind": step.kind,
        "skipped": skipped,
        "counts": state.stages.counts.tolist(),
        "groups": group_values(inner),
        "compressing": state.stages.compressing,
        "mean_norm": state.mean_norm.numbers.tolist(),
        "chunks": [each.layout.chunks for each in state.compressed],
    }
    shared = [] if skipped else step.shared()
    return Entry(value, [t.detach().to(CPU, copy=True) for t in (inner.gradients.hyper, *shared)])

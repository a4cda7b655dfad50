"""One step's exchange in a thread, each chunk as soon as its gradients are there (see `onebit.parallel.overlap`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebit.collectives.exchange import Chunk, Exchange
from onebit.collectives.transport.protocol import Transport
from onebit.collectives.undo import Undo
from onebit.optim.flat_state import Space
from onebit.optim.gradients import Mark


class Flight:
    """One step's exchange, in a thread."""

    def __init__(
        self,
        spaces: Sequence[Space],
        undo: Sequence[Undo],
        transport: Transport,
        side: Any,
        hyper: Tensor,
        betas: list[tuple[float, float]],
    ) -> None:
        """side: the stream it runs on, None on a CPU. betas: what `hyper` was made of."""
        self.betas = betas
        self.marks: list[Mark] | None = None  # of the gradients when backward ended
        self._spaces, self._exchanges, self._undo = spaces, [exchange_of(space) for space in spaces], undo
        self._transport, self._hyper, self._side = transport, hyper, side
        self._grads: list[list[Tensor | None]] = [[None] * len(space.params) for space in self._spaces]
        self._members = [[{s.parameter for s in c.span.segments()} for c in e.chunks] for e in self._exchanges]
        self._missing = [[set(members) for members in of] for of in self._members]
        self._ready = [[_Signal(self._side) for _ in e.chunks] for e in self._exchanges]
        self._flags = [
            torch.zeros(len(e.chunks), dtype=torch.int32, device=space.device)
            for e, space in zip(self._exchanges, self._spaces, strict=True)
        ]
        self._came: set[tuple[int, int]] = set()
        self._closed = False
        self._error: BaseException | None = None
        self._begun = _Signal(self._side)
        self._begun.set()
        self._thread = threading.Thread(target=self._run, name="onebit overlap", daemon=True)
        self._thread.start()

    def put(self, places: Sequence[tuple[int, int]], grads: Sequence[Tensor | None]) -> bool:
        """Gradients by space and index. False: one of them was there already."""
        if self._closed or not self._came.isdisjoint(places):
            return False
        self._came.update(places)
        for (s, i), g in zip(places, grads, strict=True):
            self._grads[s][i] = None if g is None else g.detach()
            for missing, ready in zip(self._missing[s], self._ready[s], strict=True):
                if i in missing:
                    missing.remove(i)
                    if not missing:
                        ready.set()
        return True

    def close(self) -> None:
        """No more will come: others are as they lie."""
        if not self._closed:
            everything = [(s, i, p) for s, space in enumerate(self._spaces) for i, p in enumerate(space.params)]
            left = [(s, i, p) for s, i, p in everything if (s, i) not in self._came]
            self.put([(s, i) for s, i, _ in left], [p.grad for _, _, p in left])
            self._closed = True
            for ready in (r for of in self._ready for r in of):
                ready.set()  # a chunk of padding alone waits for none

    def end(self) -> None:
        """Wait for the last reply; an error of the thread is raised here."""
        self.close()
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def _run(self) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self._side):
                self._begun.wait()
                for s in reversed(range(len(self._spaces))):
                    self._exchanges[s].run(partial(self._compress, s), backwards=True, over=self._transport)
        except BaseException as error:
            self._error = error

    def _compress(self, s: int, chunk: Chunk) -> None:
        self._ready[s][chunk.index].wait()
        self._undo[s].save(chunk)
        space, flags = self._spaces[s], self._flags[s][chunk.index : chunk.index + 1]
        members = self._members[s][chunk.index]
        space.grads.bind_tensors([g if i in members else None for i, g in enumerate(self._grads[s])])
        space.backend.scan(chunk.span, space.grads, self._hyper, flags)
        space.compress(chunk, self._hyper, flags)


class _Signal:
    """From one thread to another, and on a GPU from the stream of the one to the side stream."""

    def __init__(self, side: Any) -> None:
        self._side, self._set = side, threading.Event()
        self._event = None if side is None else torch.cuda.Event()

    def set(self) -> None:
        if not self._set.is_set():
            if self._event is not None:
                self._event.record(torch.cuda.current_stream(self._side.device))
            self._set.set()

    def wait(self) -> None:
        self._set.wait()
        if self._event is not None:
            self._side.wait_event(self._event)


def exchange_of(space: Space) -> Exchange:
    assert space.exchange is not None
    return space.exchange

"""One step's exchange in a thread, each chunk as soon as its gradients are there (see `onebit.parallel.overlap`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from onebit.collectives.averaging import average_slices
from onebit.collectives.exchange import Chunk
from onebit.collectives.transport.protocol import Transport
from onebit.collectives.undo import Undo
from onebit.collectives.waits import waiting
from onebit.kernels import streams
from onebit.kernels.passes import Gradients, Scan
from onebit.optim import masks
from onebit.optim.flat_state import FlatState
from onebit.optim.gradients import Versions, versions_of
from onebit.optim.reducer import MomentumReducer


class Flight:
    """One step's exchange, in a thread."""

    def __init__(
        self,
        reducers: Sequence[MomentumReducer],
        undo: Sequence[Undo],
        replicas: Transport,
        node: Transport | None,
        side: streams.Stream | None,
        hyper: Tensor,
        betas: list[tuple[float, float]],
        means: Sequence[list[Tensor] | None],
        wire_dtype: torch.dtype | None,
    ) -> None:
        """side: the stream it runs on, None on a CPU. betas: what `hyper` was made of. means, wire_dtype: with two
        levels, where to put gradients averaged over the node, and what they travel as."""
        self.betas = betas
        self.versions: Versions | None = None  # of the gradients when backward ended
        self.accumulated = False  # whether one of them came twice
        self.states = [reducer.state for reducer in reducers]
        self._reducers, self._exchanges, self._undo = reducers, [reducer.exchange for reducer in reducers], undo
        self._replicas, self._node, self._hyper, self._side = replicas, node, hyper, side
        self._means, self._wire_dtype = means, wire_dtype
        self._grads: list[list[Tensor | None]] = [[None] * len(state.params) for state in self.states]
        self._members = [[{s.parameter for s in c.span.segments()} for c in e.chunks] for e in self._exchanges]
        self._missing = [[set(members) for members in of] for of in self._members]
        self._ready = [[Signal(self._side) for _ in e.chunks] for e in self._exchanges]
        self._arrived: set[tuple[int, int]] = set()
        self._closed = False
        self._error: BaseException | None = None
        self._begun = Signal(self._side)
        self._begun.mark()
        self._begun.set()
        self._thread = threading.Thread(target=self._run, name="onebit overlap", daemon=True)
        self._thread.start()

    def put(self, places: Sequence[tuple[int, int]], grads: Sequence[Tensor | None]) -> bool:
        """Gradients by space and index. False: one of them was there already."""
        if self._closed or not self._arrived.isdisjoint(places):
            return False
        self._arrived.update(places)
        for (s, i), g in zip(places, grads, strict=True):
            self._grads[s][i] = None if g is None else g.detach()
            for missing, ready in zip(self._missing[s], self._ready[s], strict=True):
                if i in missing:
                    missing.remove(i)
                    ready.mark()
                    if not missing:
                        ready.set()
        return True

    def close(self) -> None:
        """No more will come: others are as they lie."""
        if not self._closed:
            everything = [(s, i, p) for s, state in enumerate(self.states) for i, p in enumerate(state.params)]
            left = [(s, i, p) for s, i, p in everything if (s, i) not in self._arrived]
            self.put([(s, i) for s, i, _ in left], [p.grad for _, _, p in left])
            self._closed = True
            for ready in (r for of in self._ready for r in of):
                ready.set()  # a chunk of padding alone waits for none

    def keep_versions(self) -> None:
        """Backward has ended."""
        self.versions = versions_of(self.states)

    def finish(self) -> None:
        """Wait for the last reply; an error of the thread is raised here."""
        self.close()
        with waiting(self.states[0].device):
            self._thread.join()
            if self._side is not None:
                streams.join(streams.current(self._side.device), self._side)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._side is not None:
                streams.choose_device(self._side)
            with torch.no_grad(), streams.within(self._side):
                self._begun.wait()
                for s in reversed(range(len(self._reducers))):
                    compress = partial(self._compress, s)
                    undo, over, node = self._undo[s], self._replicas, self._node
                    self._exchanges[s].run(compress, backwards=True, over=over, node=node, chunks=undo.chunks)
        except BaseException as error:
            self._error = error

    def _compress(self, s: int, chunk: Chunk) -> None:
        self._ready[s][chunk.index].wait()
        self._undo[s].save(chunk)
        state = self.states[s]
        flags = torch.zeros(1, dtype=torch.int32, device=state.device)
        members = self._members[s][chunk.index]
        found = [g if i in members else None for i, g in enumerate(self._grads[s])]
        grads = state.stored(masks.without(state, found))
        means = self._means[s]
        if means is not None and self._node is not None:
            whole = [None if g is None else g.contiguous() for g in grads]
            slices = state.layout.slices(chunk.index, self._node.size)
            average_slices(slices, whole, means, self._node, wire_dtype=self._wire_dtype)
            grads = means
        state.gradients.bind_tensors(grads)
        state.backend.run(Scan(chunk.slice, Gradients(state.gradients, self._hyper, flags)))
        self._reducers[s].compress(chunk, self._hyper, flags)


def node_means(state: FlatState) -> list[Tensor]:
    """Room for gradients that were averaged over the node: 4 B an element, 2 for 16-bit parameters."""
    flat = torch.zeros(state.layout.elements, dtype=state.dtype, device=state.device)
    return [state.elements_of(flat, i) for i in range(len(state.params))]


class Signal:
    """A signal from one thread to another, and on a GPU from the streams of the one to the side stream: backward runs
    in as many as the forward pass did."""

    def __init__(self, side: streams.Stream | None) -> None:
        self._side, self._set = side, threading.Event()
        self._events: dict[streams.Stream, streams.Event] = {}  # the last one

    def mark(self) -> None:
        """What the present stream has to do comes before."""
        if self._side is not None:
            device = self._side.device
            stream = streams.current(device)
            self._events[stream] = streams.mark(device, again=self._events.get(stream))

    def set(self) -> None:
        self._set.set()

    def wait(self) -> None:
        self._set.wait()
        if self._side is not None:
            for event in self._events.values():
                streams.wait_for(self._side, event)

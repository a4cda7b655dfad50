"""What a device with streams would do: who reads and writes which bytes, in which stream, after what.

A stream is a thread of a vector clock, and so is a thread of the host. A launch takes over the clock of its thread of
the host, and adds one to the clock of its stream. An event keeps the clock of a stream; to wait for the event takes
that clock over. Two accesses of the same bytes, one of them a write, must be in order: the clock of the later one has
the earlier one. So a fault is found whether or not the order of this run made it harmful.

The allocator gives memory that is freed to the next tensor of the stream that the memory was made in. So the clock of
that stream must have every use of the memory when it is freed, or the memory is kept for the stream that uses it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.streams.hosts import Clock, Hosts, Moment, take_over


@dataclass(eq=False)
class Stream:
    name: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock: Clock = field(default_factory=dict)
    launched: Moment | None = None  # by which thread of the host, the last time


@dataclass(eq=False)
class Event:
    clock: Clock = field(default_factory=dict)
    marked: Moment | None = None  # by which thread of the host

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Access(NamedTuple):
    start: int  # bytes
    stop: int
    writes: bool
    stream: Stream | None  # None: the host
    moment: Moment
    what: str

    def meets(self, other: Access) -> bool:
        return self.start < other.stop and other.start < self.stop and (self.writes or other.writes)

    def covers(self, other: Access) -> bool:
        inside = self.start <= other.start and other.stop <= self.stop
        return inside and self.moment.of == other.moment.of and (self.writes or not other.writes)

    def __str__(self) -> str:
        where = "the host" if self.stream is None else self.stream.name
        return f"{'write' if self.writes else 'read'} by {self.what} in {where}"


@dataclass(eq=False)
class Memory:
    """The memory of one storage."""

    what: str
    made_in: Stream
    pinned: bool = False
    kept_for: set[Stream] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class Part(NamedTuple):
    """Bytes."""

    memory: Memory
    start: int
    stop: int


class Recorder:
    """Clocks and memory. `faults` has what nothing orders."""

    def __init__(self) -> None:
        self.main = Stream("main")
        self.faults: dict[str, None] = {}
        self.launches = 0
        self.hosts = Hosts()
        self._lock = threading.RLock()
        self._memory: dict[int, Memory] = {}  # by the number of its storage, which torch keeps as long as the memory
        self._made = 0
        self._finalizers: list[Any] = []
        self._of_thread = threading.local()

    # ---- streams and threads ----

    @property
    def current(self) -> Stream:
        return getattr(self._of_thread, "stream", self.main)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._of_thread.stream = stream

    def mark(self, event: Event) -> None:
        with self._lock:
            event.clock, event.marked = dict(self.current.clock), self.hosts.now()

    def wait_for(self, stream: Stream, event: Event) -> None:
        if event.marked is None or not event.marked.within(self.hosts.clock):
            self.faults["an event is waited for by a thread that does not know that it was recorded"] = None
        with self._lock:
            take_over(stream.clock, event.clock)

    def join(self, stream: Stream, other: Stream) -> None:
        with self._lock:
            self._know(other, f"{stream.name} waits")
            take_over(stream.clock, other.clock)

    def _know(self, stream: Stream, what: str) -> None:
        """This thread of the host has to know of what others have launched into a stream."""
        if stream.launched is not None and not stream.launched.within(self.hosts.clock):
            self.faults[f"two threads use {stream.name} without an order: {what}"] = None

    # ---- what is done ----

    def launch(self, what: str, reads: Iterable[Part], writes: Iterable[Part], stream: Stream | None = None) -> None:
        """One piece of work of the current stream, or of another one."""
        stream = stream or self.current
        with self._lock:
            self.launches += 1
            self._know(stream, what)
            stream.launched = self.hosts.now()
            take_over(stream.clock, self.hosts.clock)
            stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
            moment = Moment(stream.name, stream.clock[stream.name])
            for parts, does in ((reads, False), (writes, True)):
                for memory, start, stop in parts:
                    self._add(memory, Access(start, stop, does, stream, moment, what), stream.clock)

    def read_on_host(self, tensor: Tensor) -> None:
        """The values of a tensor: those of the device come when the current stream has done all that it has to do."""
        with self._lock:
            part = self.part(tensor)
            if part.memory.pinned:
                access = Access(part.start, part.stop, False, None, self.hosts.now(), "the host")
                self._add(part.memory, access, self.hosts.clock)
            else:
                self.launch("a copy to the host", [part], [])
                take_over(self.hosts.clock, self.current.clock)

    def _add(self, memory: Memory, access: Access, clock: Clock) -> None:
        for before in memory.accesses:
            if before.meets(access) and not before.moment.within(clock):
                self.faults[f"{access} is not after the {before} ({memory.what} of {memory.made_in.name})"] = None
        memory.accesses = [before for before in memory.accesses if not access.covers(before)]
        memory.accesses.append(access)

    # ---- memory ----

    def part(self, tensor: Tensor) -> Part:
        """The bytes of a tensor. Memory that was not seen before was made in the current stream."""
        with self._lock:
            storage = tensor.untyped_storage()
            if id(storage) not in self._memory:
                self._made += 1
                memory = Memory(f"{str(tensor.dtype)[6:]} {list(tensor.shape)}", self.current)
                self._memory[id(storage)] = memory
                self._finalizers.append(weakref.finalize(storage, self._freed, id(storage), memory))
            memory = self._memory[id(storage)]
            size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
            reach = sum((n - 1) * abs(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            return Part(memory, start, start + (reach + 1) * size if tensor.numel() else start)

    def _freed(self, number: int, memory: Memory) -> None:
        with self._lock:
            if self._memory.get(number) is memory:
                del self._memory[number]
            for use in () if memory.pinned else memory.accesses:  # of pinned memory torch keeps account itself
                after = [memory.made_in, *memory.kept_for]
                over = any(use.moment.within(stream.clock) for stream in after)
                if use.stream is not None and use.stream not in after and not over:
                    name = f"memory of {memory.made_in.name} ({memory.what})"
                    self.faults[f"{name} is freed before the {use} is over"] = None

    def close(self) -> None:
        """No more is watched."""
        for each in self._finalizers:
            each.detach()

"""A simulated device: CPU tensors, whose operations and passes a recorder sees, with streams and events of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onebit.kernels.data.kept import Kept
from onebit.kernels.passes import LambWarmup, Pass
from tests.streams import passes
from tests.streams.hosts import Clock, take_over
from tests.streams.recorder import Event, Recorder, Stream

TORCH = str(Path(torch.__file__).parent)
ROOT = Path(__file__).resolve().parent.parent.parent
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("onebit", "collectives", "kernels"))
MAKE_ALONE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # operations that write nothing
WAIT = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")  # for whose result the host waits


class Site(NamedTuple):
    """A call in the product."""

    path: str
    line: int


NOWHERE = Site("", 0)


real = cache(os.path.realpath)  # folders of the product may be links


def site_of(frame: FrameType) -> Site:
    return Site(real(frame.f_code.co_filename), frame.f_lineno)


class Device:
    """Stands in for `onebit.kernels.streams`. left_out: a call that has no effect."""

    def __init__(self, left_out: Site = NOWHERE) -> None:
        self.recorder, self.left_out = Recorder(), left_out
        self.reached: set[Site] = set()
        self.capturing = False
        self._made = 0
        self._own = threading.local()  # of each thread: whether it is watched, is within a pass, has chosen its device

    def counts(self, depth: int = 2) -> bool:
        """Return whether the call of the product that has led here is not left out."""
        site = site_of(sys._getframe(depth))
        self.reached.add(site)
        return site != self.left_out and not getattr(self._own, "blind", False)

    @contextlib.contextmanager
    def without_effect(self) -> Iterator[None]:
        """What this thread does in here orders nothing."""
        self._own.blind = True
        try:
            yield
        finally:
            self._own.blind = False

    # ---- onebit.kernels.streams ----

    def has_streams(self, device: torch.device) -> bool:
        return True

    def current(self, device: torch.device) -> Stream:
        return self.recorder.current

    def new(self, device: torch.device | None = None, name: str = "side") -> Stream:
        self._made += 1
        return Stream(f"{name} {self._made}")

    @contextlib.contextmanager
    def within(self, stream: Stream | None) -> Iterator[None]:
        before = self.recorder.current
        self.recorder.current = stream or before
        if not self.watched and not getattr(self._own, "has_chosen", False):
            self.recorder.faults["a thread works in a stream of a device that it has not chosen"] = None
        try:
            with contextlib.nullcontext() if self.watched else self.watch():
                yield
        finally:
            self.recorder.current = before

    def choose_device(self, stream: Stream) -> None:
        self._own.has_chosen = self.counts()

    def mark(self, device: torch.device, again: Event | None = None, timing: bool = False) -> Event:
        event = again or Event()
        counts = self.counts()
        self.recorder.mark(event)
        if not counts:  # too early: before all that the stream has to do
            event.clock = {}
        return event

    def wait_for(self, stream: Stream, event: Event) -> None:
        if self.counts():
            self.recorder.wait_for(stream, event)

    def join(self, stream: Stream, other: Stream) -> None:
        if self.counts():
            self.recorder.join(stream, other)

    def wait_on_host(self, passed: Stream | Event) -> None:
        self.host_waits("for an event or a stream")
        if self.counts():
            take_over(self.recorder.hosts.clock, passed.clock)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        if self.counts():
            self.recorder.part(tensor).memory.kept_for.add(stream)

    def keep_all(self, tensors: Iterable[Tensor], stream: Stream) -> None:
        for tensor in tensors:
            self.recorder.part(tensor).memory.kept_for.add(stream)

    def future(self, device: torch.device) -> Future[Tensor]:
        return Result(self)

    def host_waits(self, what: str) -> None:
        if self.capturing:
            self.recorder.faults[f"the host waits in a capture: {what}"] = None

    def pinned(self, like: Tensor) -> Tensor:
        made = torch.empty_like(like)
        self.recorder.part(made).memory.pinned = True
        return made

    # ---- what torch and passes do ----

    @property
    def watched(self) -> bool:
        return getattr(self._own, "watched", False)

    @property
    def unseen(self) -> bool:
        """Return whether what this thread does now is known otherwise."""
        return getattr(self._own, "unseen", False)

    @contextlib.contextmanager
    def see(self, unseen: bool) -> Iterator[None]:
        before, self._own.unseen = self.unseen, unseen
        try:
            yield
        finally:
            self._own.unseen = before

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """This thread's operations."""
        self._own.watched = True
        try:
            with _Operations(self), _HostReads(self):
                yield
        finally:
            self._own.watched = False

    def operation(self, operator: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        name = operator.overloadpacket.__name__
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        schema = operator._schema
        given = [*zip(schema.arguments, arguments, strict=False), *((a, options.get(a.name)) for a in schema.arguments)]
        for argument, value in given:
            changes = argument.alias_info is not None and argument.alias_info.is_write
            (writes if changes else reads).extend(_tensors(value))
        known = {id(t.untyped_storage()) for t in [*reads, *writes]}
        made = [t for t in _tensors(result) if id(t.untyped_storage()) not in known]
        if name in MAKE_ALONE:
            for tensor in made:
                self.recorder.part(tensor)
        elif writes or made or name in WAIT:  # others are views
            self.launch(name, reads, [*writes, *made])
        if name in WAIT:
            self.host_waits(name)
            take_over(self.recorder.hosts.clock, self.recorder.current.clock)

    def launch(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor], stream: Any = None) -> None:
        parts = ([self.recorder.part(t) for t in of] for of in (reads, writes))
        self.recorder.launch(what, *parts, stream)

    def run_pass(self, run: Callable[[Pass], None], work: Pass) -> None:
        reads, writes = passes.accesses(work)
        self.launch(work.name, reads, writes)
        if isinstance(work, LambWarmup) and (between := work.between) is not None:

            def outside() -> None:
                with self.see(unseen=False):
                    between()
                    self.launch(work.name, reads, writes)

            work = replace(work, between=outside)
        with self.see(unseen=True):
            run(work)

    def restore(self, run: Callable[[Kept, Tensor], None], kept: Kept, flags: Tensor) -> None:
        self.launch("restore", [flags, kept.table, *(copy for _, copy in kept.pairs)], [now for now, _ in kept.pairs])
        with self.see(unseen=True):
            run(kept, flags)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Operations(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its parts come here
        same = _ddp_copies_back(operator, arguments)
        result = operator(*arguments, **(options or {}))
        if not self._device.unseen and not same:
            self._device.operation(operator, arguments, options or {}, result)
        return result


def _ddp_copies_back(operator: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether DDP writes to a gradient, at the end of a backward pass, the bits that the gradient has: nobody
    who reads it meanwhile reads others."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, __file__)):
        frame = frame.f_back
    ours = frame is not None and frame.f_code.co_filename.startswith(PRODUCT)
    return operator is torch.ops.aten.copy_.default and not ours and _same_bits(*arguments[:2])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (one, other)))


class _HostReads(TorchFunctionMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function in (Tensor.tolist, Tensor.numpy) and not self._device.unseen:
            self._device.host_waits(function.__name__)
            self._device.recorder.read_on_host(arguments[0])
        return function(*arguments, **(options or {}))


class Result(Future):  # type: ignore[type-arg]
    """A future of a device: it says what was in the current stream when its result was set."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.clock: Clock = {}

    def set_result(self, result: Any) -> None:
        self.clock = dict(self._device.recorder.current.clock)
        super().set_result(result)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Call back in a stream of its own, for which torch keeps the memory of the result."""
        stream, after = self._device.new(name="callback"), Result(self._device)
        take_over(stream.clock, self.clock)
        self._device.keep_all(_tensors(self.value()), stream)
        with self._device.within(stream):
            after.set_result(callback(self))
        return after

    def wait(self) -> Any:
        if self._device.counts():
            take_over(self._device.recorder.current.clock, self.clock)
        return super().wait()

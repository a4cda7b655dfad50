"""What NCCL asks of a run's collectives, looked at while the run takes place over Gloo.

The ranks of a group must start the same collectives, of the same sizes, in the same order; tensors are contiguous and
begin at 16 bytes; and of two threads that use the same group one knows that the other has started its collectives, and
has none under way.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest import mock

from torch import Tensor

from onebit.collectives.transport import TorchTransport
from tests.streams.hosts import Hosts, Moment

STARTS = ("all_to_all", "all_gather", "all_max", "all_sum")
ALIGNED = 16  # bytes


@dataclass
class Seen:
    """What one rank has seen."""

    started: dict[str, list[str]] = field(default_factory=dict)  # by group
    faults: list[str] = field(default_factory=list)


class _Recorder:
    def __init__(self) -> None:
        self.seen = Seen()
        self._within = threading.local()  # a collective that is made of others counts once
        self._under_way: dict[int, list[int]] = {}  # by group, the threads that have started one and not waited
        self._last: dict[int, Moment] = {}  # by group
        self.hosts = Hosts()

    def start(self, name: str, run: Callable[..., Any], transport: TorchTransport, *arguments: Any) -> Any:
        """Run one collective."""
        if getattr(self._within, "any", False):
            return run(transport, *arguments)
        *tensors, phase = arguments
        own = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        self.seen.started.setdefault(_name_of(transport), []).append(
            f"{name} {' '.join(f'{tensor.dtype} {list(tensor.shape)}' for tensor in own)}, {phase}"
        )
        self.seen.faults += [f"{phase}: {fault}" for tensor in own for fault in _faults_of(tensor)]
        threads, here = self._under_way.setdefault(id(transport.group), []), threading.get_ident()
        if any(thread != here for thread in threads):
            self.seen.faults.append(f"{phase}: another thread has a collective of this group under way")
        if (before := self._last.get(id(transport.group))) is not None and not before.within(self.hosts.clock):
            self.seen.faults.append(f"{phase}: another thread used this group before, and nothing orders the two")
        self._last[id(transport.group)] = self.hosts.now()
        self._within.any = True
        try:
            work = run(transport, *arguments)
        finally:
            self._within.any = False
        return work if work is None else _Watched(work, threads, here)


class _Watched:
    """Work that says when it has been waited for."""

    def __init__(self, work: Any, threads: list[int], thread: int) -> None:
        self._work, self._threads, self._thread = work, threads, thread
        threads.append(thread)

    def wait(self) -> None:
        self._work.wait()
        if self._thread in self._threads:
            self._threads.remove(self._thread)


def _name_of(transport: TorchTransport) -> str:
    """The same on each of its members: torch names a group alike on all."""
    return f"{transport.members} {transport.group.group_name}"


def _faults_of(tensor: Tensor) -> Iterator[str]:
    if not tensor.is_contiguous():
        yield f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} is not contiguous"
    if tensor.numel() and tensor.data_ptr() % ALIGNED:
        yield f"a tensor of shape {list(tensor.shape)} begins {tensor.data_ptr() % ALIGNED} bytes off"


@contextlib.contextmanager
def recorded() -> Iterator[Seen]:
    recorder = _Recorder()
    with contextlib.ExitStack() as patches:
        for name in STARTS:
            run = getattr(TorchTransport, name)

            def start(transport: TorchTransport, *arguments: Any, name: str = name, run: Any = run) -> Any:
                return recorder.start(name, run, transport, *arguments)

            patches.enter_context(mock.patch.object(TorchTransport, name, functools.wraps(run)(start)))
        patches.enter_context(recorder.hosts.watched())
        yield recorder.seen


def faults(of_ranks: Sequence[Seen]) -> list[str]:
    """Each rank's, and where ranks of one group part."""
    found = [f"rank {rank}: {fault}" for rank, seen in enumerate(of_ranks) for fault in seen.faults]
    for group in {group: None for seen in of_ranks for group in seen.started}:
        first, *others = [(rank, seen.started[group]) for rank, seen in enumerate(of_ranks) if group in seen.started]
        for rank, own in others:
            if own != first[1]:
                at = next(i for i in count() if _at(own, i) != _at(first[1], i))
                texts = f"{_at(first[1], at)} on rank {first[0]}, {_at(own, at)} on rank {rank}"
                found.append(f"collective {at} of group {group}: {texts}")
    return found


def _at(started: Sequence[str], index: int) -> str:
    return started[index] if index < len(started) else "none"

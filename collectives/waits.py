"""How long a thread waits for other ranks, where somebody counts it.

    with counted(waits):     what this thread waits for in here is added to `waits`
    with waiting(device):    around a wait for messages

A host that waits is timed on the host. On a GPU the stream waits and the host goes on: an event before and one after
are left in the stream, to be read when they have passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onebit.kernels import streams
from onebit.kernels.streams import capturing

_thread = threading.local()


class Waits:
    """Seconds of the host, and pairs of events of a stream."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.events: list[tuple[Any, Any]] = []

    @property
    def passed(self) -> bool:
        """Return whether all that is counted here is over."""
        return all(last.query() for _, last in self.events)

    def total(self) -> float:
        """Seconds; all of it must have passed."""
        return self.seconds + sum(first.elapsed_time(last) for first, last in self.events) / 1e3


@contextmanager
def counted(into: Waits) -> Iterator[None]:
    before = getattr(_thread, "waits", None)
    _thread.waits = into
    try:
        yield
    finally:
        _thread.waits = before


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    waits: Waits | None = getattr(_thread, "waits", None)
    if waits is None or capturing(device):
        yield
    elif streams.has_streams(device):
        before = streams.mark(device, timing=True)
        yield
        waits.events.append((before, streams.mark(device, timing=True)))
    else:
        since = time.perf_counter()
        yield
        waits.seconds += time.perf_counter() - since

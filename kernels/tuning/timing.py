"""The time that a function takes on a device: the median of many runs, each timed by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onebit.kernels import streams

_FLUSH_BYTES = 2**28  # more than any GPU's cache holds


@dataclass(frozen=True)
class Timing:
    """The median of many runs, and half the distance between their quartiles."""

    seconds: float
    spread: float = 0.0


def timing(run: Callable[[], object], device: torch.device, repeats: int = 20, warmup: int = 3) -> Timing:
    """Time `run`, after `warmup` runs that are not timed."""
    for _ in range(warmup):
        run()
    times = _device_seconds(run, device, repeats) if streams.has_streams(device) else _host_seconds(run, repeats)
    if repeats == 1:
        return Timing(times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, (high - low) / 2)


def _host_seconds(run: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def _device_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Device time between two events. The write before each run empties the cache of what the last run left
    there, and keeps the device busy while the host is still launching, so that no launch time is counted.
    """
    with torch.cuda.device(device):
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        marks: list[tuple[streams.Event, streams.Event]] = []
        for _ in range(repeats):
            flush.zero_()
            start = streams.mark(device, timing=True)
            run()
            marks.append((start, streams.mark(device, timing=True)))
        streams.wait_on_host(streams.current(device))
    return [start.elapsed_time(stop) / 1000 for start, stop in marks]

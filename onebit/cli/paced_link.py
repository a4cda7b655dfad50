"""A link of a given rate between two processes of one machine: TCP paces their sockets, without root.

Linux sends what is written to a socket no faster than SO_MAX_PACING_RATE, on loopback too. The rate is a connection's:
two ranks of one process group have a link by it. A second group, or a third rank, would have a link of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import struct
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

SO_MAX_PACING_RATE = 47  # Linux's number, which `socket` does not name; bytes a second
PAYLOAD = 0.956  # of a link's rate: 1448 bytes of a frame of 1514
TOLERANCE = 0.15  # of the rate that was asked for
SLOWEST, FASTEST = 1e6, 100e9  # bits a second
WATCH_SECONDS = 0.05  # between looks for new connections
MEASURE_SECONDS = 0.25  # of one all-reduce that measures
MEASURE_MOST = 2**26  # elements of such an all-reduce
MEASURE_CALLS, MEASURE_TRIES = 3, 3
OPEN_FILES = Path("/proc/self/fd")


def why_not() -> str | None:
    """Say why this process can't pace its sockets, if so."""
    if sys.platform != "linux":
        return f"only Linux paces sockets, not {sys.platform}"
    return None if OPEN_FILES.is_dir() else f"{OPEN_FILES} is hidden here, and the sockets with it"


class PacedLink:
    """Paces this process's TCP connections, those that are made later too, until it is closed."""

    def __init__(self, bits: float) -> None:
        """bits: a second, headers included, as links are sold."""
        if why := why_not():
            raise OSError(why)
        self.bits = bits
        self._known: set[str] = set()
        self._ended = threading.Event()
        self.pace()
        self._watcher = threading.Thread(target=self._watch, name="onebit paced link", daemon=True)
        self._watcher.start()

    def __enter__(self) -> PacedLink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def pace(self) -> None:
        """Pace the connections that are new since the last call."""
        found = {}
        for number in os.listdir(OPEN_FILES):
            with contextlib.suppress(OSError):  # closed since it was listed
                found[os.readlink(OPEN_FILES / number)] = int(number)
        names = {name for name in found if name.startswith("socket:")}
        for name in names - self._known:
            if not self._pace_socket(found[name]):
                names.discard(name)
        self._known = names

    def close(self) -> None:
        """Leave the connections as they are; new ones are not paced."""
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            self.pace()

    def _pace_socket(self, number: int) -> bool:
        """Pace one socket; False where it may become a connection later."""
        try:
            copy = os.dup(number)
        except OSError:
            return True
        try:
            own = socket.socket(fileno=copy)
        except OSError:  # the number is another file's by now
            os.close(copy)
            return True
        with own:
            if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
                return True
            try:
                own.getpeername()
            except OSError:
                return False
            rate = struct.pack("Q", round(PAYLOAD * self.bits / 8))
            for level, option, value in (
                (socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno"),  # which every kernel has, whatever its default
                (socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate),
            ):
                with contextlib.suppress(OSError):  # where it is refused, the measured rate tells
                    own.setsockopt(level, option, value)
            return True


def measured_rate(bits: float, device: torch.device) -> float:
    """Measure the rate of the link between the ranks of the default group, headers included: by all-reduces in fp32.

    Measure again where it is not the `bits` that were asked for, a few times. A collective call, with one result.
    """
    ranks = dist.get_world_size()
    count = min(MEASURE_MOST, round(MEASURE_SECONDS * PAYLOAD * bits / 32))
    values = torch.zeros(max(ranks, count), device=device)
    payload = 2 * (ranks - 1) / ranks * 32 * values.numel()  # of a ring, a rank
    for _ in range(MEASURE_TRIES):
        dist.all_reduce(values)
        rate = payload / PAYLOAD / statistics.median(slowest_seconds(values) for _ in range(MEASURE_CALLS))
        if is_kept(bits, rate):
            break
    return rate


def is_kept(bits: float, rate: float) -> bool:
    """Tell whether a measured rate is near enough to the one that was asked for."""
    return abs(rate - bits) <= TOLERANCE * bits


def refusal(bits: float, rates: list[float]) -> str:
    """Say what was asked for, what was measured, and what to do."""
    found = " and ".join(map(rate_title, rates))
    if max(rates) > (1 + TOLERANCE) * bits:
        why = "sockets are not paced here, as in some containers and sandboxes: pacing is of no use"
    else:
        why = "this machine is busy, or can't send as fast: measure when it is quiet, or at a lower rate"
    return f"a link of {rate_title(bits)} was asked for, and {found} measured, more than {TOLERANCE:.0%} away: {why}"


def rate_title(bits: float) -> str:
    """Write a rate with three digits and no power of ten: 1 Gbit/s, 99.2 Mbit/s."""
    three = float(f"{bits:.3g}")
    unit, size = ("Gbit/s", 1e9) if three >= 1e9 else ("Mbit/s", 1e6)
    return f"{three / size:,.15g} {unit}"


def slowest_seconds(values: torch.Tensor) -> float:
    """Time an all-reduce: what the slowest rank took."""
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(values)
    values[:1].cpu()  # a device has done it
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=values.device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()

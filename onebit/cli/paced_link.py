"""A link of a given rate between two processes of one machine: TCP paces their sockets, without root.

Linux sends what is written to a socket no faster than SO_MAX_PACING_RATE, on loopback too. The rate is a connection's:
two ranks have a link by it; of more, each would have a link to every other.
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

import torch
import torch.distributed as dist

SO_MAX_PACING_RATE = 47  # Linux's number, which `socket` does not name; bytes a second
PAYLOAD = 0.956  # of a link's rate: 1448 bytes of a frame of 1514
TOLERANCE = 0.15  # of the rate that was asked for
EVERY = 0.05  # seconds between looks for new connections
MEASURING = 0.25  # seconds of one all-reduce that measures
TIMED = 3
TRIES = 3


class PacedLink:
    """Paces this process's TCP connections, those that are made later too, until it is closed."""

    def __init__(self, bits: float) -> None:
        """bits: a second, headers included, as links are sold."""
        if sys.platform != "linux":
            raise OSError(f"only Linux paces sockets, not {sys.platform}")
        self.bits = bits
        self._paced: set[str] = set()
        self._ended = threading.Event()
        self.pace()
        self._watcher = threading.Thread(target=self._watch, name="onebit paced link", daemon=True)
        self._watcher.start()

    def pace(self) -> None:
        """Pace the connections that are new since the last call."""
        found = {}
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed since it was listed
                found[os.readlink(f"/proc/self/fd/{number}")] = int(number)
        names = {name for name in found if name.startswith("socket:")}
        for name in names - self._paced:
            if not self._pace(found[name]):
                names.discard(name)
        self._paced = names

    def close(self) -> None:
        """Leave the connections as they are; new ones are not paced."""
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY):
            self.pace()

    def _pace(self, number: int) -> bool:
        """Pace one socket; False where it may become a connection later."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
                return True
            own.getpeername()
            with contextlib.suppress(OSError):  # reno, which every kernel has, whatever the machine's default
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            rate = struct.pack("Q", round(PAYLOAD * self.bits / 8))
            own.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
            return True
        return False


def measured_rate(bits: float, device: torch.device) -> float:
    """The rate of the link between the ranks of the default group, headers included: of fp32 all-reduces of known size.

    Measure again where it is not the `bits` that were asked for, a few times. A collective call, with one result.
    """
    ranks = dist.get_world_size()
    values = torch.zeros(max(ranks, round(MEASURING * PAYLOAD * bits / 32)), device=device)
    payload = 2 * (ranks - 1) / ranks * 32 * values.numel()  # of a ring, a rank
    rate = 0.0
    for _ in range(TRIES):
        dist.all_reduce(values)
        rate = payload / PAYLOAD / statistics.median(_seconds(values) for _ in range(TIMED))
        if is_kept(bits, rate):
            break
    return rate


def is_kept(bits: float, rate: float) -> bool:
    """Whether a measured rate is near enough to what was asked for."""
    return abs(rate - bits) <= TOLERANCE * bits


def rate_title(bits: float) -> str:
    """1 Gbit/s, 99.2 Mbit/s"""
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _seconds(values: torch.Tensor) -> float:
    """Of an all-reduce, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(values)
    values[:1].cpu()  # a device has done it
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=values.device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()

"""What the links of a lab are: round trips by UDP echo, rates by TCP, from each host to the next.

This process opens sockets in the hosts' namespaces and plays all hosts itself, so that a round trip has no switch
between processes in it but the router's.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

CLONE_NEWNET = 0x40000000
LOST_AFTER = 2.0  # seconds without an answer
T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """A host: how it is reached from here, and from the others."""

    namespace: str
    address: str


def inside(namespace: str, make: Callable[[], T]) -> T:
    """`make()`, by a thread that is in this network namespace: its sockets stay there."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_enter_and, make, namespace).result()


def _enter_and(make: Callable[[], T], namespace: str) -> T:
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(place, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", namespace)
    finally:
        os.close(place)
    return make()


def _next_of(hosts: Sequence[Host]) -> Iterator[tuple[Host, Host]]:
    return zip(hosts, [*hosts[1:], hosts[0]], strict=True)


def round_trips(hosts: Sequence[Host], pings: int) -> list[float]:
    """Seconds from each host to the next and back: the median of so many, after one that does not count."""
    return [_round_trip(here, there, pings) for here, there in _next_of(hosts)]


def _round_trip(here: Host, there: Host, pings: int) -> float:
    with ExitStack() as opened:
        own, other = (opened.enter_context(inside(h.namespace, lambda h=h: _datagrams(h))) for h in (here, there))
        seconds = []
        for number in range(pings + 1):
            sent = time.perf_counter()
            own.sendto(bytes([number]), other.getsockname())
            other.sendto(other.recv(16), own.getsockname())
            own.recv(16)
            seconds.append(time.perf_counter() - sent)
    return statistics.median(seconds[1:])


def _datagrams(host: Host) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.settimeout(LOST_AFTER)
    opened.bind((host.address, 0))
    return opened


def rates(hosts: Sequence[Host], warmup: float, seconds: float) -> list[float]:
    """Bits a second that each host gets by TCP while every host sends to the next; after `warmup` seconds."""
    with ExitStack() as opened:
        senders, receivers = zip(*(opened.enter_context(_connection(*pair)) for pair in _next_of(hosts)), strict=True)
        block, landing = bytes(1 << 18), bytearray(1 << 20)
        arrived = {each: Arrived() for each in receivers}
        began = time.perf_counter()
        while (now := time.perf_counter() - began) < warmup + seconds:
            readable, writable, _ = select.select(receivers, senders, [], 0.05)
            for each in writable:
                each.send(block)
            for each in readable:
                arrived[each].add(each.recv_into(landing), now, counts=now >= warmup)
        return [each.rate for each in arrived.values()]


class Arrived:
    """Bytes between two times at which some arrived."""

    def __init__(self) -> None:
        self._bytes, self._first, self._last = 0, 0.0, 0.0

    def add(self, count: int, now: float, counts: bool) -> None:
        if not counts:
            return
        if self._first:
            self._bytes, self._last = self._bytes + count, now
        else:
            self._first = now

    @property
    def rate(self) -> float:
        return 8 * self._bytes / (self._last - self._first) if self._last > self._first else 0.0


@contextmanager
def _connection(sender: Host, receiver: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends; what is not sent when it is closed is dropped."""
    with ExitStack() as opened:
        server = opened.enter_context(inside(receiver.namespace, lambda: socket.create_server((receiver.address, 0))))
        own = opened.enter_context(inside(sender.namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)))
        for each in (server, own):
            each.settimeout(LOST_AFTER)
        own.connect(server.getsockname())
        other = opened.enter_context(server.accept()[0])
        for each in (own, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            each.setblocking(False)
        yield own, other

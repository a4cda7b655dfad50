"""A connection between two processes, one of which belongs to no process group yet: TCP.

Both are trusted with each other's state, as ranks of a process group are. The address holds a word without which nobody
is listened to.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from typing import Any

from torch import Tensor

from onebit.collectives.transport.protocol import CollectiveError, Done, Work

SILENT_AFTER = 10  # seconds after which a host is given up that answers nothing
STUCK_AFTER = 120  # and one that reads nothing
PIECE = 2**16  # bytes
MOST_UNSENT = 2**14  # bytes that the operating system holds and has not sent
MOST_QUEUED = 0.01  # seconds that a byte waits in the network for those before it
MOST_FOR_QUEUE = 0.1  # seconds that a piece waits for this: others fill the network, too
MOST_WAITING = 9.0  # times as long as sending takes, a link that gives way waits at most
MOST_AT_ONCE = 1.0  # and so many seconds
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # sockets of this process


class Link:
    """Sends to, and receives from, the one process at the other end: a `Sender`, whose rank numbers say nothing."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self.received = connection, 0
        _open.add(connection)
        self.heard = time.monotonic()  # when the last bytes came, or left
        self._idle: threading.Event | None = None
        self._may_wait = 0.0  # seconds
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_AFTER // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_AFTER - SILENT_AFTER // 2)

    def give_way(self, idle: threading.Event) -> None:
        """Give way to messages of this host: nothing is sent while `idle` is not set. But a tenth of the time is for
        sending. Whoever sends is the one that can be stuck: this timeout takes the place of SILENT_AFTER."""
        self._idle = idle
        if sys.platform == "linux":
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_AFTER * 1000)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MOST_UNSENT)

    def send(self, values: Tensor, to: int, phase: str) -> Work:
        left = values.cpu().numpy().data
        try:
            while left:
                begun = self._wait_until_idle()
                count = self._socket.send(left[:PIECE])
                left, self.heard = left[count:], time.monotonic()
                self._may_wait = min(self._may_wait + MOST_WAITING * (self.heard - begun), MOST_AT_ONCE)
        except OSError as error:
            raise CollectiveError(f"{phase}: the connection ended ({error})") from error
        return Done()

    def _wait_until_idle(self) -> float:
        """Wait until this host sends nothing, and the network holds little of what was sent, which would delay
        messages. Returns when this host had become idle."""
        waited = 0.0
        while self._idle is not None and waited < MOST_FOR_QUEUE and self._queued() > MOST_QUEUED:
            time.sleep(MOST_QUEUED / 4)
            waited += MOST_QUEUED / 4
        begun = time.monotonic()
        if self._idle is None or self._idle.is_set():
            return begun
        self._idle.wait(self._may_wait)
        now = time.monotonic()
        self._may_wait = max(0.0, self._may_wait - (now - begun))
        return now

    def _queued(self) -> float:
        """Seconds by which round trips take longer than the shortest did, and half as long again as it: some are, by
        chance. 0 where no byte is on its way, or nobody knows."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 152) if sys.platform == "linux" else b""
        if len(info) < 152:
            return 0.0
        (unacknowledged,), (usual,), (shortest,) = (struct.unpack_from("I", info, at) for at in (24, 68, 148))
        return (usual - 1.5 * shortest) / 1e6 if unacknowledged else 0.0

    def receive(self, out: Tensor, source: int, phase: str) -> Work:
        host = out.cpu()  # `out` itself where that is there
        left = host.numpy().data
        try:
            while left:
                count = self._socket.recv_into(left, min(PIECE, len(left)))
                if not count:
                    raise CollectiveError(
                        f"{phase}: the other process has closed the connection: it has ended, or its address is another"
                    )
                left, self.received, self.heard = left[count:], self.received + count, time.monotonic()
        except OSError as error:
            raise CollectiveError(f"{phase}: the connection ended ({error})") from error
        out.copy_(host)
        return Done()

    def close(self) -> None:
        _close(self._socket)


class Listener:
    """A listener that others connect to. host: a name, or an address of IPv4 or IPv6. `address` is for `connect`."""

    def __init__(self, host: str) -> None:
        family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket, self._word = socket.create_server(place, family=family), secrets.token_hex(8)
        _open.add(self._socket)
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self._socket.getsockname()[1]}/{self._word}"

    def accept(self) -> Link | None:
        """The next one that knows the word; None once the listener is closed."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return None
                time.sleep(0.1)  # too many open files, say
                continue
            connection.settimeout(1)
            try:
                word = connection.recv(len(self._word), socket.MSG_WAITALL)
            except OSError:
                word = b""
            if secrets.compare_digest(word, self._word.encode()):
                return Link(connection)
            connection.close()

    def close(self) -> None:
        _close(self._socket)


def connect(address: Any) -> Link:
    """Connect to a Listener."""
    try:
        place, word = address.split("/")
        host, port = place.rsplit(":", 1)
        number = int(port)
    except (AttributeError, ValueError):
        raise ValueError(f"{address!r:.80} is no address of a Giver: give its `address`, host:port/word") from None
    try:
        connection = socket.create_connection((host.strip("[]"), number), SILENT_AFTER)
        connection.sendall(word.encode())
    except OSError as error:
        raise CollectiveError(f"nobody gives a state at {place} ({error}): is its process alive?") from error
    return Link(connection)


def _close(open_socket: socket.socket) -> None:
    """Whoever waits for it wakes."""
    with contextlib.suppress(OSError):
        open_socket.shutdown(socket.SHUT_RDWR)
    open_socket.close()


def _close_all() -> None:
    """Close a forked child's sockets. It would keep connections open when its parent has ended, or end those of its
    parent."""
    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_close_all)

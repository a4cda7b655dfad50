"""The delaying router of a network lab: frames between the hosts' ports, each handed on after the same delay.

    python router.py PORT ...      in the namespace of the ports

Standard input has a delay in seconds a line, and the router ends when it does. "ready" on standard output: all ports
are open. A frame goes to the port behind which its destination was last seen, or to all others. Frames are the
kernel's, up to 64 KiB with segmentation and checksums left to be done (virtio_net_hdr), so that few are to be handled:
some 1,200 a second at 300 Mbit/s. They keep their order. Beyond 256 MiB under way the next are dropped.

It runs ahead of everything else on the machine where it may (SCHED_FIFO), for a frame that is sent late is delay that
nobody asked for. It imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator

ALL_PROTOCOLS = 3  # ETH_P_ALL
PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 15, 23  # of SOL_PACKET, which are not in `socket`
SOL_PACKET = 263
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER = 64 << 20  # bytes a port's socket may hold
MOST_WAITING = 256 << 20
FRAME = 10 + 14 + 65536  # virtio_net_hdr, Ethernet, the largest packet
DESTINATION, SOURCE = slice(10, 16), slice(16, 22)
BATCH = 32  # frames read of one port before others have their turn


def open_port(name: str) -> socket.socket:
    """All frames that arrive at an interface, and a way out of it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for force, within_limits in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            port.setsockopt(socket.SOL_SOCKET, force, BUFFER)
        except PermissionError:  # root of a user namespace alone: the rates that are measured tell if it is enough
            port.setsockopt(socket.SOL_SOCKET, within_limits, BUFFER)
    port.setblocking(False)
    port.bind((name, ALL_PROTOCOLS))
    return port


class Router:
    """Ports, where hosts were seen, and the frames under way, in the order in which they leave."""

    def __init__(self, names: list[str]) -> None:
        self.ports = [open_port(name) for name in names]
        self.delay = 0.0
        self._seen: dict[bytes, socket.socket] = {}
        self._waiting: deque[tuple[float, list[socket.socket], bytes]] = deque()
        self._bytes = 0

    def run(self, commands: int) -> None:
        """Run until `commands`, a file descriptor, ends."""
        text = b""
        watched = [commands, *self.ports]
        while True:
            pause = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            ready = select.select(watched, [], [], pause)[0]
            if commands in ready:
                came = os.read(commands, 4096)
                if not came:
                    return
                *lines, text = (text + came).split(b"\n")
                for line in lines:
                    self.delay = float(line)
            for port in self.ports:
                if port in ready:
                    self._read(port)
            self._send_due()

    def _read(self, port: socket.socket) -> None:
        for frame in _frames(port):
            self._seen[frame[SOURCE]] = port
            known = self._seen.get(frame[DESTINATION])
            out = [other for other in self.ports if other is not port] if known is None else [known]
            if self._bytes + len(frame) <= MOST_WAITING:
                self._bytes += len(frame)
                self._waiting.append((time.monotonic() + self.delay, out, frame))

    def _send_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, ports, frame = self._waiting.popleft()
            self._bytes -= len(frame)
            for port in ports:
                with contextlib.suppress(OSError):  # the shaper's queue is full, or the cable pulled: a lost frame
                    port.send(frame)


def _frames(port: socket.socket) -> Iterator[bytes]:
    """What has arrived."""
    with contextlib.suppress(OSError):  # nothing more, or the cable is pulled
        for _ in range(BATCH):
            yield port.recv(FRAME)


def main(names: list[str]) -> None:
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    router = Router(names)
    print("ready", flush=True)
    router.run(sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])

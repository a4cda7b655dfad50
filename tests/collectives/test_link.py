"""A connection that gives way leaves the network to messages: little of what it has sent waits there."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from onebit.collectives import link
from onebit.collectives.link import Link, Listener, connect
from onebit.collectives.transport.protocol import CollectiveError

BASE, RATE = 0.003, 2.5e6  # seconds of a round trip, bytes a second
# struct tcp_info of linux/tcp.h, in its order
FIELDS = (
    "rto", "ato", "snd_mss", "rcv_mss", "unacked", "sacked", "lost", "retrans", "fackets", "last_data_sent",
    "last_ack_sent", "last_data_recv", "last_ack_recv", "pmtu", "rcv_ssthresh", "rtt", "rttvar", "snd_ssthresh",
    "snd_cwnd", "advmss", "reordering", "rcv_rtt", "rcv_space", "total_retrans", "pacing_rate", "max_pacing_rate",
    "bytes_acked", "bytes_received", "segs_out", "segs_in", "notsent_bytes", "min_rtt",
)  # fmt: skip
LAYOUT = "=8x24I4Q4I"


class Network:
    """A socket whose bytes leave one after the other, at RATE. Time passes while the sender sleeps. busy: others' bytes
    are in the network, and none of the sender's."""

    def __init__(self, busy: bool = False) -> None:
        self.left, self.most, self.sent, self.busy = 0.0, 0.0, 0, busy
        self.options: dict[int, int] = {}

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.options[option] = value

    def settimeout(self, seconds: float | None) -> None:
        pass

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        values = dict.fromkeys(FIELDS, 10**6)
        rtt = int(1e6 * (BASE + self.left / RATE))
        values |= {"unacked": 0 if self.busy else -(-int(self.left) // 1448), "rtt": rtt, "min_rtt": int(1e6 * BASE)}
        return struct.pack(LAYOUT, *(values[name] for name in FIELDS))[:size]

    def send(self, data: memoryview) -> int:
        self.left, self.sent = self.left + len(data), self.sent + len(data)
        self.most = max(self.most, self.left)
        return len(data)

    def sleep(self, seconds: float) -> None:
        self.left = max(0.0, self.left - seconds * RATE)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize(
    ("gives_way", "busy", "waits"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_only_a_link_that_gives_way_waits_until_the_network_holds_little_of_it(
    gives_way: bool, busy: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, idle, values = Network(busy), threading.Event(), torch.zeros(2**20, dtype=torch.uint8)
    monkeypatch.setattr(link, "time", SimpleNamespace(sleep=network.sleep, monotonic=lambda: 0.0))
    sender = Link(network)  # type: ignore[arg-type]
    idle.set()
    if gives_way:
        sender.give_way(idle)
    sender.send(values, 0, "test")
    assert network.sent == len(values)
    few = link.PIECE + (link.MOST_QUEUED + BASE) * RATE
    assert network.most <= few if waits else network.most == len(values)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_network_that_others_fill_holds_a_piece_up_for_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old system, which does not tell, holds nothing up."""
    network, idle, slept = Network(), threading.Event(), list[float]()
    monkeypatch.setattr(link, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: 0.0))
    network.left = 1e9
    sender = Link(network)  # type: ignore[arg-type]
    idle.set()
    sender.give_way(idle)
    sender.send(torch.zeros(2 * link.PIECE, dtype=torch.uint8), 0, "test")
    assert sum(slept) == pytest.approx(2 * link.MOST_FOR_QUEUE, rel=0.1)
    network.getsockopt = lambda *_: bytes(104)  # type: ignore[method-assign]
    sender.send(torch.zeros(2 * link.PIECE, dtype=torch.uint8), 0, "test")
    assert sum(slept) == pytest.approx(2 * link.MOST_FOR_QUEUE, rel=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_host_that_answers_nothing_is_given_up_before_one_that_reads_nothing() -> None:
    """Linux does not count what is unanswered where a user timeout is set."""
    network = Network()
    receiver, options = Link(network), network.options  # type: ignore[arg-type]
    silent = options[socket.TCP_KEEPIDLE] + options[socket.TCP_KEEPCNT] * options[socket.TCP_KEEPINTVL]
    assert silent == link.SILENT_AFTER and socket.TCP_USER_TIMEOUT not in options
    receiver.give_way(threading.Event())
    assert options[socket.TCP_USER_TIMEOUT] == 1000 * link.STUCK_AFTER


def test_a_forked_child_neither_ends_a_connection_nor_keeps_it_open() -> None:
    listener = Listener("127.0.0.1")
    if (child := os.fork()) == 0:
        listener.close()  # as it is at an exit
        os._exit(0)
    os.waitpid(child, 0)
    connect(listener.address).close()
    reader, writer = os.pipe()
    if (owner := os.fork()) == 0:
        address = Listener("127.0.0.1").address
        if (child := os.fork()) == 0:
            signal.pause()
        os.write(writer, f"{child} {address}".encode())
        os._exit(0)
    os.waitpid(owner, 0)
    number, address = os.read(reader, 1000).decode().split()
    try:
        with pytest.raises(CollectiveError, match="is its process alive"):
            connect(address)
    finally:
        os.kill(int(number), signal.SIGKILL)
        os.close(reader)
        os.close(writer)
        listener.close()

"""Paced sockets: which get the rate, and what is taken for the rate that a link has."""

import contextlib
import socket
import struct
import sys
import time

import pytest
import torch
import torch.distributed as dist

from onebit.cli import paced_link
from onebit.cli.paced_link import PAYLOAD, SO_MAX_PACING_RATE, PacedLink, is_kept, measured_rate, rate_title
from tests.limits import HUNG

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces sockets")


def rate_of(made):
    """Bytes a second, as the kernel has it."""
    return struct.unpack("Q", made.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0]


@contextlib.contextmanager
def connection():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield server, one, other


@linux
def test_connections_are_paced_those_made_later_too_and_nothing_else():
    paced = round(PAYLOAD * 20e6 / 8)
    with connection() as (server, *ends), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        unpaced = rate_of(ends[0])
        with contextlib.closing(PacedLink(20e6)):
            assert [rate_of(each) for each in ends] == [paced, paced]
            assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)[:5] == b"reno\0" for each in ends)
            assert rate_of(server) == rate_of(datagrams) == unpaced
            with connection() as (_, *later):
                until = time.monotonic() + HUNG
                while [rate_of(each) for each in later] != [paced, paced]:
                    assert time.monotonic() < until
                    time.sleep(0.01)
        with connection() as (_, *after):
            time.sleep(3 * paced_link.WATCH_SECONDS)
            assert [rate_of(each) for each in after] == [unpaced, unpaced]


@linux
def test_a_socket_that_connects_after_it_was_seen_is_paced():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket() as own,
        contextlib.closing(PacedLink(20e6)) as link,
    ):
        unpaced = rate_of(own)
        own.connect(server.getsockname())
        link.pace()
        assert rate_of(own) == round(PAYLOAD * 20e6 / 8) != unpaced


def test_elsewhere_it_says_that_it_needs_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="only Linux paces sockets, not darwin"):
        PacedLink(1e8)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rate_is_that_of_the_bytes_of_a_ring_and_of_their_headers(ranks, monkeypatch):
    """Measured again while it is not what was asked for; the median of three all-reduces."""
    has = iter([5e7, 6e7, 7e7, 9e7, 3e8, 8.7e7])

    def seconds(values):
        return values.nbytes * 8 * 2 * (ranks - 1) / ranks / PAYLOAD / next(has)

    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(paced_link, "slowest_seconds", seconds)
    assert measured_rate(1e8, torch.device("cpu")) == pytest.approx(9e7)
    assert next(has, None) is None
    has = iter([5e7] * 9)
    assert measured_rate(1e8, torch.device("cpu")) == pytest.approx(5e7)
    assert next(has, None) is None


def test_the_slowest_rank_decides_for_all(monkeypatch):
    """Each would else try again by a time of its own, and wait for the other for ever."""

    def all_reduce(values, op=None):
        if op == dist.ReduceOp.MAX:
            values.clamp_(min=12.5)  # what another rank took

    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert paced_link.slowest_seconds(torch.zeros(4)) == 12.5


def test_a_fast_rate_is_measured_with_as_much_as_memory_has(monkeypatch):
    sizes = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda values, *_: sizes.append(values.numel()))
    monkeypatch.setattr(paced_link, "slowest_seconds", lambda values: 1.0)
    monkeypatch.setattr(paced_link, "MEASURE_MOST", 1000)
    measured_rate(1e11, torch.device("cpu"))
    assert set(sizes) == {1000}


def test_a_rate_is_kept_within_fifteen_percent():
    assert [is_kept(1e9, rate) for rate in (8.49e8, 8.51e8, 1.149e9, 1.151e9)] == [False, True, True, False]
    assert [rate_title(rate) for rate in (1e9, 2.5e9, 99.24e6, 1e8)] == [
        "1 Gbit/s",
        "2.5 Gbit/s",
        "99.2 Mbit/s",
        "100 Mbit/s",
    ]

"""What tests of the network lab run on its hosts, and what they ask the system about it.

`python -m tests.perf.hosts` is `python -m perf.lab`, whose links may be those of a busy machine.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from onebit.cli.paced_link import PAYLOAD
from perf.lab import network
from perf.lab.command import main
from perf.lab.delay import TRIES, WrongLink, check_rates, reach_round_trip
from perf.lab.network import INTERFACE, NetworkLab
from tests.limits import HUNG

PREAMBLE = """
import os, socket, sys, threading, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
others = [k for k in range(size) if k != rank]
def connect(k):
    end = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection((f"10.77.0.{k + 1}", 7000), timeout=120)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
def send(k, size):
    with connect(k) as s:
        s.sendall(bytes(size))
def listen():
    return socket.create_server(("", 7000))
def count(server, senders):  # bytes of all senders
    total, threads = [0], []
    def read(s):
        while data := s.recv(1 << 20):
            total[0] += len(data)
    for _ in range(senders):
        threads.append(threading.Thread(target=read, args=(server.accept()[0],)))
        threads[-1].start()
    [t.join() for t in threads]
    return total[0]
"""
SLEEP = "print('ready', flush=True)\ntime.sleep(3600)"


def left_behind(pid: int) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.startswith(f"onebit-{pid}-")]


def pids_on(names: list[str]) -> list[int]:
    out = [subprocess.run(["ip", "netns", "pids", n], capture_output=True, text=True).stdout for n in names]
    return [int(pid) for pid in " ".join(out).split()]


def until(condition: Callable[[], object], seconds: float = HUNG) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"still not so after {seconds} s")
        time.sleep(0.02)


def outgoing(lab: NetworkLab, host: int) -> dict[str, Any]:
    """What shapes the packets that this host sends: kind, rate in bytes per second, bytes, packets held back."""
    return _qdisc(lab.namespaces[host], INTERFACE)


def incoming(lab: NetworkLab, host: int) -> dict[str, Any]:
    """The same of the packets that it gets."""
    return _qdisc(lab.bridge, f"host{host}")


def _qdisc(namespace: str, device: str) -> dict[str, Any]:
    show = ["tc", "-s", "-j", "-n", namespace, "qdisc", "show", "dev", device]
    (found,) = json.loads(subprocess.run(show, capture_output=True, text=True, check=True).stdout)
    return {"rate": found["options"].get("rate"), **{key: found[key] for key in ("kind", "bytes", "overlimits")}}


@contextlib.contextmanager
def links_of_a_busy_machine() -> Iterator[None]:
    """Let labs have links that a busy machine makes slower, where they are not what was asked: no figure needs them."""
    with mock.patch.multiple(network, reach_round_trip=_reach_round_trip, check_rates=_check_rates):
        yield


def _reach_round_trip(rtt: float, set_delay: Callable[[float], object], measure: Callable[[], list[float]]) -> float:
    """The shortest of many round trips must be about what was asked."""
    try:
        return reach_round_trip(rtt, set_delay, measure)
    except WrongLink:
        set_delay(rtt / 2)
        if not 0.9 * rtt < min(min(measure()) for _ in range(TRIES)) < 2 * rtt:
            raise
        return rtt / 2


def _check_rates(bits: int, measure: Callable[[], list[float]]) -> None:
    """No rate may be above what was asked."""
    try:
        check_rates(bits, measure)
    except WrongLink:
        if not 0 < max(measure()) < 1.1 * PAYLOAD * bits:
            raise


if __name__ == "__main__":
    with links_of_a_busy_machine():
        raise SystemExit(main())

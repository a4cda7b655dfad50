"""Delay between a lab's hosts: the router that makes it, and that links are refused which are not what was asked."""

from __future__ import annotations

import contextlib
import select
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from onebit.cli.paced_link import PAYLOAD
from perf.lab.namespaces import LabUnavailable

ROUTER = str(Path(__file__).with_name("router.py"))
TOLERANCE = 0.1  # of what was asked
GOOD = 0.03  # of the round trip: no further try
TRIES = 8


class WrongLink(LabUnavailable):
    """The links are not what was asked: nothing is to be measured on them."""


class DelayingRouter:
    """The process that hands on the frames between some interfaces of a namespace."""

    def __init__(self, namespace: str, ports: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-I", ROUTER, *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], 20)[0] or self._process.stdout.readline() != b"ready\n":
            said = self.stop()
            raise LabUnavailable(f"the delaying router did not start: {said or 'it said nothing for 20 s'}")

    def set_delay(self, seconds: float) -> None:
        """One way, of frames that arrive from now on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `ended` tells
            self._process.stdin.write(b"%.9f\n" % seconds)
            self._process.stdin.flush()

    @property
    def ended(self) -> int | None:
        """Its exit status, where it does not run any more."""
        return self._process.poll()

    def stop(self) -> str:
        """End it; what it said last."""
        if self._process.poll() is None:
            self._process.kill()
        output = self._process.communicate(timeout=10)[0]
        return output.decode(errors="replace").strip()[-2000:]


def reach_round_trip(rtt: float, set_delay: Callable[[float], object], measure: Callable[[], list[float]]) -> float:
    """The delay of one way with which round trips are `rtt` seconds; what hosts and shapers take is part of them.

    That part is the median over the tries, for one that was disturbed must not decide about the next.
    """
    delay, taken, good_enough = rtt / 2, [], None
    found: list[float] = []
    for _ in range(TRIES):
        set_delay(delay)
        found = measure()
        if _within(GOOD, found, rtt):
            return delay
        if _within(TOLERANCE, found, rtt):
            good_enough = delay
        taken.append(statistics.median(found) - 2 * delay)
        delay = max(0.0, (rtt - statistics.median_low(taken)) / 2)
    if good_enough is not None:
        set_delay(good_enough)
        return good_enough
    shown = ", ".join(f"{1e3 * each:.3g}" for each in found)
    raise WrongLink(
        f"round trips between the lab's hosts take {shown} ms where {1e3 * rtt:g} ms were asked for: this machine is "
        "too busy to keep them. Measure when it is quiet, or with longer ones"
    )


def check_rates(bits: int, measure: Callable[[], list[float]]) -> None:
    """WrongLink unless TCP gets what is payload of such a link, everywhere at once."""
    found: list[float] = []
    for _ in range(TRIES):
        found = measure()
        if _within(TOLERANCE, found, PAYLOAD * bits):
            return
    shown = ", ".join(f"{1e-6 * each:.4g}" for each in found)
    raise WrongLink(
        f"TCP carries {shown} Mbit/s between the lab's hosts where {1e-6 * PAYLOAD * bits:.4g} are the payload of what "
        "was asked for: this machine cannot hand on so much with a delay. Ask for a lower rate or fewer hosts, or "
        "measure when it is quiet"
    )


def _within(tolerance: float, found: Sequence[float], wanted: float) -> bool:
    return all(abs(each - wanted) <= tolerance * wanted for each in found)

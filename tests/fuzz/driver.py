"""Cases of every target, each from (seed, number) alone, so that any of them can be run again."""

from __future__ import annotations

import faulthandler
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from tests.fuzz.command_line import CommandLine
from tests.fuzz.files import Files
from tests.fuzz.options import Arguments
from tests.fuzz.states import States
from tests.fuzz.wire import Wire

TARGETS: dict[str, Callable[[], Any]] = {  # a target's `case(source)` returns what came of one case, or raises
    "wire": Wire,
    "options": Arguments,
    "states": States,
    "command_line": CommandLine,
    "files": Files,
}
SHARES = {"wire": 40, "options": 22, "states": 16, "command_line": 20, "files": 2}  # of 100 cases
LONGEST = 60.0  # seconds that a case may take before it counts as a hang
_TURNS = [name for turn in range(50) for name, share in SHARES.items() if turn * share // 50 != (turn + 1) * share // 50
          for _ in range((turn + 1) * share // 50 - turn * share // 50)]  # fmt: skip


class Hang(Exception):
    """A case took too long."""


def turn(number: int, only: str | None = None) -> str:
    """Which target case `number` is of."""
    return only or _TURNS[number % len(_TURNS)]


class Fuzzer:
    """Runs cases one by one and keeps what came of them."""

    def __init__(self, seed: int, only: str | None = None) -> None:
        self.seed, self.only = seed, only
        self.targets: dict[str, Any] = {}
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def case(self, number: int) -> str | None:
        """None, or what is wrong: a traceback."""
        name = turn(number, self.only)
        if name not in self.targets:
            self.targets[name] = TARGETS[name]()
        source = np.random.default_rng([self.seed, number])
        torch.manual_seed(number)
        try:
            with limited(LONGEST), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = self.targets[name].case(source)
        except Exception:
            return (
                f"case {number} of {name} (python -m tests.fuzz --only {name} --seed {self.seed} --first {number} "
                f"--cases 1):\n{traceback.format_exc()}"
            )
        self.outcomes[name, outcome] += 1
        return None

    def run(
        self, numbers: Iterator[int], until: float, on_case: Callable[[int], None] = lambda number: None
    ) -> list[str]:
        """What was wrong, at most a few."""
        found: list[str] = []
        for number in numbers:
            if time.monotonic() > until or len(found) >= 5:
                break
            on_case(number)
            if (wrong := self.case(number)) is not None:
                found.append(wrong)
        return found


def work(job: int, jobs: int, given: dict[str, Any], at: Any, pipe: Connection) -> None:
    """Every `jobs`-th case."""
    faulthandler.enable()
    torch.set_num_threads(1)
    fuzzer = Fuzzer(given["seed"], given["only"])
    numbers = iter(range(given["first"] + job, given["first"] + given["cases"], jobs))
    places = at.get_obj()

    def on_case(number: int) -> None:
        places[job] = number

    found = fuzzer.run(numbers, time.monotonic() + given["seconds"], on_case)
    pipe.send((fuzzer.outcomes, found))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A Hang in the midst of what takes longer. What never comes back to Python is ended by the driver's parent."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: Any) -> None:
        raise Hang(f"took over {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""Cases of every target, each from (seed, number) alone, so that any of them can be run again."""

from __future__ import annotations

import faulthandler
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
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
LONGEST = 120.0  # seconds after which a case counts as a hang
_TURNS = [name for name, share in SHARES.items() for _ in range(share)]


def turn(number: int, only: str | None = None) -> str:
    """Which target case `number` is of."""
    return only or _TURNS[37 * number % len(_TURNS)]


class Fuzzer:
    """Runs cases one by one and keeps what came of them."""

    def __init__(self, seed: int, only: str | None = None, targets: dict[str, Callable[[], Any]] = TARGETS) -> None:
        self.seed, self.only, self.targets = seed, only, targets
        self.made: dict[str, Any] = {}
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def case(self, number: int) -> str | None:
        """None, or what is wrong: a traceback."""
        name = turn(number, self.only)
        if name not in self.made:
            self.made[name] = self.targets[name]()
        torch.manual_seed(number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = self.made[name].case(np.random.default_rng([self.seed, number]))
        except Exception:
            return f"{again(number, name, self.seed)}:\n{traceback.format_exc()}"
        self.outcomes[name, outcome] += 1
        return None

    def run(self, numbers: Iterable[int], until: float = float("inf")) -> list[str]:
        """What was wrong, at most a few."""
        found: list[str] = []
        for number in numbers:
            if time.monotonic() > until or len(found) >= 5:
                break
            if (wrong := self.case(number)) is not None:
                found.append(wrong)
        return found


def again(number: int, name: str, seed: int) -> str:
    return f"case {number} of {name} (python -m tests.fuzz --only {name} --seed {seed} --first {number} --cases 1)"


def work(numbers: range, fuzzer: Fuzzer, seconds: float, at: Any, place: int, pipe: Connection) -> None:
    """Some cases, in a process of its own, which ends where one of them hangs."""
    torch.set_num_threads(1)
    faulthandler.enable()

    def counted() -> Iterable[int]:
        for number in numbers:
            at[place] = number
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            yield number
        faulthandler.cancel_dump_traceback_later()

    found = fuzzer.run(counted(), time.monotonic() + seconds)
    pipe.send((fuzzer.outcomes, found))

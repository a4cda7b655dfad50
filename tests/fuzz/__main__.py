"""python -m tests.fuzz --cases 100000
python -m tests.fuzz --only runs --cases 1000 --jobs 1

Random and mutated input for what reads bytes of others: messages, states, checkpoints, arguments, command lines; and
random runs of several ranks. Each case follows from (seed, number) alone. Each process takes its part of the cases; one
that crashes or hangs is found with the case that it was at. The exit status is 1 where anything but a documented error
came of a case.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from tests.fuzz.arguments import Arguments, CommandLine
from tests.fuzz.runs import Runs
from tests.fuzz.states import Files, States
from tests.fuzz.wire import Wire

TARGETS: dict[str, Callable[[], Any]] = {  # a target's `case(source)` returns what came of one case, or raises
    "wire": Wire,
    "options": Arguments,
    "states": States,
    "command_line": CommandLine,
    "files": Files,
    "runs": Runs,
}
SHARES = {"wire": 40, "options": 22, "states": 16, "command_line": 20, "files": 2}  # of 100 cases; runs come alone
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

    def run(self, numbers: Iterable[int]) -> list[str]:
        """What was wrong, at most a few."""
        return list(itertools.islice(filter(None, map(self.case, numbers)), 5))


def again(number: int, name: str, seed: int) -> str:
    return f"case {number} of {name} (python -m tests.fuzz --only {name} --seed {seed} --first {number} --cases 1)"


def work(numbers: range, fuzzer: Fuzzer, at: Any, place: int, pipe: Connection) -> None:
    """Some cases, in a process of its own, which ends where one of them hangs."""
    torch.set_num_threads(1)
    faulthandler.enable()

    def counted() -> Iterable[int]:
        for number in numbers:
            at[place] = number
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            yield number
        faulthandler.cancel_dump_traceback_later()

    found = fuzzer.run(counted())
    pipe.send((fuzzer.outcomes, found))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to run one again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--only", choices=TARGETS, help="one target alone")
    given = parser.parse_args()
    jobs, start = max(1, min(given.jobs, given.cases)), time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
    at = context.Array("q", [-1] * jobs, lock=False)
    running = []
    for job in range(jobs):
        ours, theirs = context.Pipe()
        numbers = range(given.first + job, given.first + given.cases, jobs)
        fuzzer = Fuzzer(given.seed, given.only, TARGETS)
        process = context.Process(target=work, args=(numbers, fuzzer, at, job, theirs))
        process.start()
        theirs.close()
        running.append((process, ours))
    outcomes: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    for job, (process, pipe) in enumerate(running):
        try:
            own, found = pipe.recv()
            outcomes += own
            wrong += found
        except EOFError:
            process.join()
            name = turn(at[job], given.only)
            wrong.append(f"{again(at[job], name, given.seed)} ended the process, exit code {process.exitcode}")
    for text in wrong:
        print(f"\n{text}", file=sys.stderr)
    for (target, outcome), count in sorted(outcomes.items()):
        print(f"  {target:<14}{outcome:<34}{count:>9,}")
    verdict = "only documented errors" if not wrong else f"{len(wrong)} WRONG"
    print(f"{outcomes.total():,} cases in {time.monotonic() - start:.0f} s (seed {given.seed}): {verdict}")
    return 1 if wrong or not outcomes else 0


if __name__ == "__main__":
    from tests.fuzz import __main__ as command  # processes look for `work` under this name

    sys.exit(command.main())

"""python -m tests.fuzz --cases 100000

Random and mutated input for what reads bytes of others: messages, states, checkpoints, arguments, command lines. Each
process takes its part of the cases; one that crashes or hangs is found with the case that it was at. The exit status is
1 where anything but a documented error came of a case.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.fuzz.driver import LONGEST, TARGETS, turn, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then (default: when all is done)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to run one again")
    parser.add_argument("--only", choices=TARGETS, help="one target alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    arguments = parser.parse_args()
    jobs = max(1, min(arguments.jobs, arguments.cases))
    context = multiprocessing.get_context("spawn")
    at, start = context.Array("q", [-1] * jobs), time.monotonic()
    pipes: dict[Connection, Any] = {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for job in range(jobs):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(job, jobs, vars(arguments), at, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes[ours] = (job, process)
    outcomes, wrong = watch(pipes, at, arguments, start)
    for text in wrong:
        print(f"\n{text}", file=sys.stderr)
    print(summary(outcomes, len(wrong), arguments.seed, time.monotonic() - start))
    return 1 if wrong or not outcomes else 0


def watch(
    pipes: dict[Connection, Any], at: Any, arguments: argparse.Namespace, start: float
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Until every process has answered, died, or been at one case for too long."""
    outcomes: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    moved = {job: (time.monotonic(), -1) for job, _ in pipes.values()}
    while pipes:
        for pipe in wait(list(pipes), 1.0):
            job, process = pipes.pop(pipe)  # type: ignore[call-overload]
            try:
                own, found = pipe.recv()  # type: ignore[union-attr]
                outcomes += own
                wrong += found
            except EOFError:
                process.join()
                wrong.append(_lost(at[job], arguments, f"ended the process (exit code {process.exitcode})"))
        for pipe, (job, process) in list(pipes.items()):
            since, number = moved[job]
            if at[job] != number:
                moved[job] = (time.monotonic(), at[job])
            elif number >= 0 and time.monotonic() - since > 2 * LONGEST:
                process.kill()
                del pipes[pipe]
                wrong.append(_lost(number, arguments, f"did not end in {2 * LONGEST:g} s"))
        if sys.stderr.isatty():
            done = max(0, max(at) - arguments.first + 1)
            print(f"\r{done:,} of {arguments.cases:,}, {time.monotonic() - start:.0f} s ", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return outcomes, wrong


def _lost(number: int, arguments: argparse.Namespace, what: str) -> str:
    name = turn(number, arguments.only)
    return (
        f"case {number} of {name} {what}. Again: python -m tests.fuzz --only {name} --seed {arguments.seed} --first "
        f"{number} --cases 1"
    )


def summary(outcomes: Counter[tuple[str, str]], wrong: int, seed: int, seconds: float) -> str:
    lines = [f"  {target:<14}{outcome:<34}{count:>9,}" for (target, outcome), count in sorted(outcomes.items())]
    total = outcomes.total()
    verdict = "only documented errors" if not wrong else f"{wrong} WRONG"
    lines.append(f"{total:,} cases in {seconds:.0f} s (seed {seed}): {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

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

from tests.fuzz.driver import TARGETS, Fuzzer, again, turn, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then (default: when all is done)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to run one again")
    parser.add_argument("--only", choices=TARGETS, help="one target alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
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
        process = context.Process(target=work, args=(numbers, fuzzer, given.seconds, at, job, theirs), daemon=True)
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
    sys.exit(main())

"""Every kill point, phase and stage: a line each, and a summary. Minutes; the lab needs root on Linux.

python -m tests.faults
python -m tests.faults --launchers ranks,torchrun --repeat 3
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from perf.lab.network import LabUnavailable, NetworkLab
from tests.faults.matrix import Outcome, combinations, strike

LAUNCHERS = "ranks,torchrun,lab"


def phases_named(outcome: Outcome) -> str:
    """The phase that each survivor named, and after how long."""
    parts = []
    for rank, raised in outcome.survivors.items():
        phase = raised.error.partition(" did not end")[0] if raised is not None else "nothing"
        parts.append(f"{rank}: {phase}" + (f", {raised.seconds:.1f} s" if raised is not None else ""))
    return "; ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults", description="Kill, stop and cut off ranks.")
    parser.add_argument("--launchers", default=LAUNCHERS, help=f"some of {LAUNCHERS} (default: all)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--only", default="", help="a text that a combination's line has, such as spread")
    options = parser.parse_args()
    launchers = tuple(options.launchers.split(","))
    began, failed, struck = time.monotonic(), 0, 0
    with contextlib.ExitStack() as stack:
        lab = None
        if "lab" in launchers:
            try:
                lab = stack.enter_context(NetworkLab(3))
            except LabUnavailable as why:
                print(f"skipped what needs the lab: {why}")
                launchers = tuple(name for name in launchers if name != "lab")
        everything = [c for c in combinations(launchers) if options.only in str(c)] * options.repeat
        for combination in everything:
            outcome = strike(combination, lab)
            problems = outcome.problems(combination.fault)
            struck, failed = struck + 1, failed + bool(problems)
            verdict = "bit-exact" if not problems else "FAILED: " + "; ".join(problems)
            print(f"{struck:3}/{len(everything)} {combination}\n        {phases_named(outcome)}; {verdict}", flush=True)
    good, minutes = struck - failed, (time.monotonic() - began) / 60
    print(f"{good} of {struck} combinations: survivors raised in time, restarts bit-exact ({minutes:.1f} minutes)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

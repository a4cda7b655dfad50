"""Every kill point, phase and stage, each followed by a restart from the last checkpoint: python -m tests.faults

Ranks are those of `tests.ranks`; of torchrun, which sees them fail and starts all of them again; or on hosts of the
network lab (root on Linux), for faults of the network: a link goes down, and the ranks are started again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

from perf.lab.network import NetworkLab
from tests.faults.striking import POINTS, Fault, cut_off, lab_of
from tests.faults.training import Raised, struck, undisturbed
from tests.limits import HUNG
from tests.onebit.runs import OPTIMIZERS
from tests.ranks import run_ranks, run_ranks_once

ROOT = Path(__file__).parents[2]
LAUNCHERS = "ranks,torchrun,lab"
LATER = 30.0  # seconds after the timeout in which a survivor raises, or another timeout is at work


@dataclass(frozen=True)
class Combination:
    launcher: str
    kind: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.launcher:9}{self.kind:12}{self.fault}"


@dataclass(frozen=True)
class Outcome:
    survivors: dict[int, Raised | None]
    same: bool  # whether the restarted run ended as one that was left alone

    def problems(self, fault: Fault) -> list[str]:
        found = [] if self.same else ["the restarted run does not end as an undisturbed one"]
        for rank, raised in self.survivors.items():
            if raised is None or not raised.error:
                found.append(f"rank {rank} raised nothing")
            elif not raised.error.startswith(fault.at.survivors):
                found.append(f"rank {rank} names another phase: {raised.error}")
            elif raised.seconds > fault.timeout + LATER:
                found.append(f"rank {rank} waited {raised.seconds:.1f} s")
        return found

    def __str__(self) -> str:
        """The phase that each survivor named, and after how long."""
        named = {k: (r.error.partition(" did not end")[0], r.seconds) if r else None for k, r in self.survivors.items()}
        return "; ".join(f"{rank}: {of[0]}, {of[1]:.1f} s" if of else f"{rank}: nothing" for rank, of in named.items())


def combinations(launchers: tuple[str, ...]) -> Iterator[Combination]:
    """Every point of both stages, for each way to fail and each optimizer; torchrun gets four of them, the lab those of
    one level."""
    victims = itertools.cycle(range(3))
    of_one_level = [i for i, at in enumerate(POINTS) if at.each == 1]
    plans = {
        "ranks": itertools.product(("kill", "stop"), OPTIMIZERS, range(len(POINTS))),
        "torchrun": ((how, OPTIMIZERS[point % 2], point) for how in ("kill", "stop") for point in (1, 5)),
        "lab": (("cut", OPTIMIZERS[point % 2], point) for point in of_one_level),
    }
    for launcher in (name for name in plans if name in launchers):
        for how, kind, point in plans[launcher]:
            yield Combination(launcher, kind, Fault(how, point, next(victims)))


@functools.cache
def left_alone(kind: str, reply: str | int, each: int) -> list[str]:
    """What a run ends with that nothing disturbs."""
    with tempfile.TemporaryDirectory(prefix="onebit-faults-") as folder:
        return run_ranks(3 if each == 1 else 2 * each, undisturbed, kind, reply, each, folder)


def strike(combination: Combination, lab: NetworkLab | None = None, python: Path | str = sys.executable) -> Outcome:
    """The fault, the restart, and how it ended. python: of torchrun and its ranks."""
    kind, fault, at = combination.kind, combination.fault, combination.fault.at
    expected = left_alone(kind, at.reply, at.each)
    with tempfile.TemporaryDirectory(prefix="onebit-faults-") as folder:
        if combination.launcher == "ranks":
            work = (kind, folder, fault)
            raised = run_ranks_once(at.ranks, struck, work, group_timeout=fault.timeout, expect_dead=[fault.victim])
            ended = run_ranks(at.ranks, undisturbed, kind, at.reply, at.each, folder)
            return Outcome({r: raised[r] for r in range(at.ranks) if r != fault.victim}, ended == expected)
        if combination.launcher == "torchrun":
            _under_torchrun(kind, fault, folder, str(python))
        else:
            assert lab is not None
            _in_the_lab(lab, kind, fault, Path(folder))
        return _written(fault, Path(folder), expected)


def _arguments(kind: str, folder: str | Path, fault: Fault, strikes: bool = True) -> list[str]:
    given = ["--fault", f"{fault.how},{fault.point},{fault.victim}"] if strikes else []
    replies = ["--reply", "direct"] if fault.at.reply == "direct" else []
    return ["-m", "tests.faults.training", str(folder), kind, *replies, *given]


def _under_torchrun(kind: str, fault: Fault, folder: str, python: str) -> None:
    """It ends all ranks when it sees that one has failed, three seconds later: the others still write their errors."""
    options = ["--standalone", f"--nproc-per-node={fault.at.ranks}", "--max-restarts=1", "--monitor-interval=3"]
    if "--shutdown-timeout" in get_args_parser().format_help():
        options.append("--shutdown-timeout=1")  # for a stopped rank, which SIGTERM does not end
    ranks = ["--no-python", python, *_arguments(kind, folder, fault)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [python, "-m", "torch.distributed.run", *options, *ranks]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HUNG)
    if done.returncode:
        raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr[-4000:]}")


def _in_the_lab(lab: NetworkLab, kind: str, fault: Fault, folder: Path) -> None:
    cut_off(lab, lab.start(_arguments(kind, folder, fault)), folder, fault.victim)
    lab.run(_arguments(kind, folder, fault, strikes=False), timeout=HUNG)


def _written(fault: Fault, folder: Path, expected: list[str]) -> Outcome:
    """Read what the ranks of `tests.faults.training` wrote. One that is cut off lives, and must raise as well."""

    def read(name: str, rank: int) -> str:
        return file.read_text() if (file := folder / f"{name}-{rank}").exists() else ""

    alive = [rank for rank in range(fault.at.ranks) if rank != fault.victim or fault.how == "cut"]
    raised = {rank: Raised(**json.loads(text)) if (text := read("raised", rank)) else None for rank in alive}
    return Outcome(raised, [read("end", rank) for rank in range(fault.at.ranks)] == expected)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults", description="Kill, stop and cut off ranks.")
    parser.add_argument("--launchers", default=LAUNCHERS, help=f"some of {LAUNCHERS} (default: all)")
    parser.add_argument("--only", default="", help="a text that a combination's line has, such as spread")
    options = parser.parse_args()
    launchers = tuple(options.launchers.split(","))
    began, failed = time.monotonic(), 0
    with contextlib.ExitStack() as stack:
        lab = lab_of(3, stack) if "lab" in launchers else None
        chosen = tuple(name for name in launchers if name != "lab" or lab)
        everything = [c for c in combinations(chosen) if options.only in str(c)]
        for number, combination in enumerate(everything, 1):
            outcome = strike(combination, lab)
            problems = outcome.problems(combination.fault)
            failed += bool(problems)
            verdict = "bit-exact" if not problems else "FAILED: " + "; ".join(problems)
            print(f"{number:3}/{len(everything)} {combination}\n        {outcome}; {verdict}", flush=True)
    good, minutes = len(everything) - failed, (time.monotonic() - began) / 60
    print(f"{good} of {len(everything)}: survivors raised in time, restarts bit-exact ({minutes:.1f} minutes)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

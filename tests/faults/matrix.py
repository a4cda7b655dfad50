"""Faults struck one after the other, each followed by a restart from the last checkpoint.

ranks       processes of `tests.ranks`, forked from a server that has imported all there is: a second or two each
torchrun    one torchrun for both: it sees the ranks fail, and starts all of them again
lab         hosts of the network lab, for faults of the network: a link goes down, the ranks are started again
"""

from __future__ import annotations

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
from tests.faults.striking import POINTS, Fault
from tests.faults.training import TIMEOUT, Raised, struck, undisturbed
from tests.limits import HUNG
from tests.onebit.runs import OPTIMIZERS
from tests.ranks import run_ranks_once

ROOT = Path(__file__).parents[2]
SLACK = 4.0


@dataclass(frozen=True)
class Combination:
    launcher: str
    kind: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.launcher:9}{self.kind:11}{self.fault}"


@dataclass(frozen=True)
class Outcome:
    survivors: dict[int, Raised | None]
    same: bool  # whether the restarted run ended as one that was left alone

    def problems(self, fault: Fault) -> list[str]:
        found = [] if self.same else ["the restarted run does not end as an undisturbed one"]
        for rank, raised in self.survivors.items():
            if raised is None or not raised.error:
                found.append(f"rank {rank} raised nothing")
                continue
            if not any(raised.error.startswith(phase) for phase in fault.at.survivors):
                found.append(f"rank {rank} names another phase: {raised.error}")
            if raised.seconds > TIMEOUT + SLACK:
                found.append(f"rank {rank} waited {raised.seconds:.1f} s")
        return found


def combinations(launchers: tuple[str, ...] = ("ranks", "torchrun", "lab")) -> Iterator[Combination]:
    """Every point of both stages, for each way to fail and each optimizer; torchrun gets four of them, the lab those of
    one level."""
    everywhere = list(itertools.product(OPTIMIZERS, range(len(POINTS))))
    victims = itertools.cycle(range(3))
    if "ranks" in launchers:
        for how, (kind, point) in itertools.product(("kill", "stop"), everywhere):
            yield Combination("ranks", kind, Fault(how, point, next(victims)))
    if "torchrun" in launchers:
        for how, point in itertools.product(("kill", "stop"), (1, 5)):
            yield Combination("torchrun", OPTIMIZERS[point % 2], Fault(how, point, next(victims)))
    if "lab" in launchers:
        for point in (i for i, at in enumerate(POINTS) if at.each == 1):
            yield Combination("lab", OPTIMIZERS[point % 2], Fault("cut", point, next(victims)))


@functools.cache
def left_alone(kind: str, reply: str | int, each: int) -> list[str]:
    """What a run ends with that nothing disturbs."""
    with tempfile.TemporaryDirectory(prefix="onebit-faults-") as folder:
        return run_ranks_once(3 if each == 1 else 2 * each, undisturbed, (kind, reply, each, folder))


def strike(combination: Combination, lab: NetworkLab | None = None) -> Outcome:
    """The fault, the restart, and how it ended."""
    kind, fault = combination.kind, combination.fault
    at, ranks = fault.at, fault.at.ranks
    expected = left_alone(kind, at.reply, at.each)
    with tempfile.TemporaryDirectory(prefix="onebit-faults-") as folder:
        if combination.launcher == "ranks":
            raised_by = run_ranks_once(
                ranks, struck, (kind, folder, fault), group_timeout=TIMEOUT, expect_dead=[fault.victim]
            )
            ended = run_ranks_once(ranks, undisturbed, (kind, at.reply, at.each, folder))
            return Outcome({r: raised_by[r] for r in range(ranks) if r != fault.victim}, ended == expected)
        if combination.launcher == "torchrun":
            _under_torchrun(kind, fault, folder)
        else:
            assert lab is not None
            _in_the_lab(lab, kind, fault, Path(folder))
        return _written(fault, Path(folder), expected)


def _arguments(kind: str, folder: str | Path, fault: Fault, strikes: bool = True) -> list[str]:
    given = ["--fault", f"{fault.how},{fault.point},{fault.victim}"] if strikes else []
    replies = ["--reply", "direct"] if fault.at.reply == "direct" else []
    return ["-m", "tests.faults.training", str(folder), kind, *replies, *given]


def _under_torchrun(kind: str, fault: Fault, folder: str) -> None:
    """It ends all ranks as soon as it sees that one has failed. It checks every three seconds, so that the others can
    still write their errors."""
    options = ["--standalone", f"--nproc-per-node={fault.at.ranks}", "--max-restarts=1", "--monitor-interval=3"]
    if "--shutdown-timeout" in get_args_parser().format_help():
        options.append("--shutdown-timeout=1")  # for a stopped rank, which SIGTERM does not end
    command = [sys.executable, "-m", "torch.distributed.run", *options, *_arguments(kind, folder, fault)]
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else the restarted ranks find the addresses of the dead ones
    environment = {**os.environ, **fresh, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HUNG)
    if done.returncode:
        raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr[-4000:]}")


def _in_the_lab(lab: NetworkLab, kind: str, fault: Fault, folder: Path) -> None:
    run = lab.start(_arguments(kind, folder, fault), launcher="env")
    try:
        stop = time.monotonic() + HUNG
        while not (folder / "struck").exists():
            if time.monotonic() > stop or not run.running():
                raise RuntimeError("\n".join(rank.report() for rank in run.ranks))
            time.sleep(0.02)
        lab.link_down(fault.victim)
        (folder / "cut").touch()
        run.wait(60, check=False)
    finally:
        run.stop()
        lab.link_up(fault.victim)
    lab.run(_arguments(kind, folder, fault, strikes=False), timeout=HUNG, launcher="env")


def _written(fault: Fault, folder: Path, expected: list[str]) -> Outcome:
    """By the ranks of `tests.faults.training`. One that is cut off lives, and must raise as well."""
    raised_by: dict[int, Raised | None] = {}
    for rank in range(fault.at.ranks):
        file = folder / f"raised-{rank}"
        if rank != fault.victim or fault.how == "cut":
            raised_by[rank] = Raised(**json.loads(file.read_text())) if file.exists() else None
    ended = [file.read_text() if (file := folder / f"end-{rank}").exists() else "" for rank in range(fault.at.ranks)]
    return Outcome(raised_by, ended == expected)

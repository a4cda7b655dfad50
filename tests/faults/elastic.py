"""A rank is lost at every kill point, and the others go on without a restart: python -m tests.faults.elastic

By SIGKILL and by SIGSTOP, whichever rank it is, the first one too; and, with root on Linux, on hosts of the network lab
whose link goes down. The others must name the rank, and end with the same bits. The seconds are those from the fault to
the end of the next step; a silent rank counts as gone after SILENT of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onebit
from onebit.collectives import CollectiveError
from onebit.collectives.topology import Topology
from perf.lab.network import NetworkLab
from tests.faults.striking import POINTS, Fault, Striking, cut_off, lab_of, strike_of
from tests.faults.training import STRUCK, case_of, digest
from tests.limits import HUNG
from tests.onebit.runs import OPTIMIZERS, take
from tests.ranks import group, run_ranks_once

SILENT = 2.0
HOSTS = 3


@dataclass(frozen=True)
class Survived:
    """What one of the others has to tell."""

    said: str  # its error
    gone: dict[str, str]
    seconds: float
    end: str  # a digest of all that it holds

    def problems(self, fault: Fault) -> list[str]:
        fate = "its process has ended" if fault.how in ("kill", "orphan") else "no sign of life"
        named = f"gone: rank {fault.victim}: {fate}"
        found = [] if named in self.said else [f"an error does not say so: {self.said or 'there is none'}"]
        return found + ([] if list(self.gone) == [str(fault.victim)] else [f"these are gone: {self.gone}"])


def lose_one(ranks: Any, kind: str, fault: Fault, folder: Path, silent: float) -> Survived:
    """Train with `ranks`, which is the whole world, lose one of them, and train to the end."""
    case = case_of(kind, fault.at.reply, fault.at.each)
    case, rank = case.but(options={**case.options, "elastic": True}), dist.get_rank()
    said, gone, seconds, due = "", {}, 0.0, STRUCK[fault.at.stage]
    strike = strike_of(fault.how, folder)

    def note_and_strike() -> None:
        (folder / "when").write_text(str(time.monotonic()))
        strike()

    transport: Any = Striking(ranks)
    if rank == fault.victim:
        transport = Striking(ranks, fault.at, due, note_and_strike)
    params = case.parameters()
    optimizer = case.build(params, transport)
    with onebit.Heartbeat(silent_after=silent) as heart:
        while (step := optimizer.steps + 1) <= case.steps:
            transport.begin(step)
            try:
                take(case, rank, optimizer, params, step=step)
            except CollectiveError as error:
                said = str(error)
                heart.left()
                gone = {str(each): fate for each, fate in heart.gone().items()}
                onebit.reform(optimizer, Topology.of(heart.regroup()))
                step = 0
            if said and step and not seconds:
                seconds = time.monotonic() - float((folder / "when").read_text())
        return Survived(said, gone, seconds, digest({"params": params, "counts": optimizer.steps}))


def of_ranks(rank: int, size: int, kind: str, fault: Fault, folder: str, silent: float) -> Survived:
    return lose_one(group(), kind, fault, Path(folder), silent)


def strike_ranks(kind: str, fault: Fault, silent: float = SILENT) -> list[Survived]:
    with tempfile.TemporaryDirectory(prefix="onebit-faults-") as folder:
        work = (kind, fault, folder, silent)
        found = run_ranks_once(fault.at.ranks, of_ranks, work, group_timeout=HUNG, expect_dead=[fault.victim])
    return [each for each in found if each is not None]


def strike_host(lab: NetworkLab, kind: str, fault: Fault) -> list[Survived]:
    """The link of a host goes down. The host lives, finds itself alone, and does not go on."""
    with tempfile.TemporaryDirectory(prefix="onebit-faults-") as name:
        folder = Path(name)
        rank = ["--rank", str(folder), kind, str(fault.point), str(fault.victim)]
        run = lab.start(["-m", "tests.faults.elastic", *rank])
        cut_off(lab, run, folder, fault.victim)
        files = [folder / f"survived-{rank}" for rank in range(HOSTS)]
        found = {rank: Survived(**json.loads(file.read_text())) for rank, file in enumerate(files) if file.exists()}
        if fault.victim in found:
            raise RuntimeError("the host that was cut off has gone on alone")
        if len(found) < HOSTS - 1:
            raise RuntimeError("\n".join(rank.report() for rank in run.ranks))
        return list(found.values())


def be_rank(folder: Path, kind: str, point: int, victim: int) -> int:
    """Be a rank on a host of the lab."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=HUNG))
    rank = dist.get_rank()
    found = lose_one(dist.group.WORLD, kind, Fault("cut", point, victim), folder, SILENT)
    (folder / f"survived-{rank}").write_text(json.dumps(asdict(found)))
    os._exit(0)


def problems_of(found: list[Survived], fault: Fault) -> list[str]:
    ends = {each.end for each in found}
    differ = ["the others do not end with the same bits"] if len(ends) > 1 else []
    return sorted({problem for each in found for problem in each.problems(fault)}) + differ


def faults(hows: list[str]) -> Iterator[tuple[str, Fault]]:
    kinds = itertools.cycle(OPTIMIZERS)
    for how in hows:
        for point, at in enumerate(POINTS):
            if how == "cut" and at.each > 1:
                continue
            for victim in range(at.ranks):
                yield next(kinds), Fault(how, point, victim)  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.elastic", description=__doc__.partition("\n")[0])
    parser.add_argument("--hows", default="kill,stop,cut", help="some of kill,stop,cut (default: all)")
    parser.add_argument("--rank", nargs=4, metavar=("FOLDER", "KIND", "POINT", "VICTIM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        folder, kind, point, victim = options.rank
        return be_rank(Path(folder), kind, int(point), int(victim))
    hows, failed, seconds = options.hows.split(","), 0, defaultdict[str, list[float]](list)
    with contextlib.ExitStack() as stack:
        lab = lab_of(HOSTS, stack) if "cut" in hows else None
        everything = list(faults([how for how in hows if how != "cut" or lab]))
        for number, (kind, fault) in enumerate(everything, 1):
            found = strike_host(lab, kind, fault) if fault.how == "cut" and lab else strike_ranks(kind, fault)
            problems = problems_of(found, fault)
            failed += bool(problems)
            took = [each.seconds for each in found]
            seconds[fault.how] += took
            verdict = "FAILED: " + "; ".join(problems) if problems else "the same bits"
            place = f"{number:3}/{len(everything)} {kind:12}{fault}"
            print(f"{place}: next step after {max(took):.2f} s; {verdict}", flush=True)
    for how, took in seconds.items():
        print(f"{how}: next step after {sorted(took)[len(took) // 2]:.2f} s (median), {max(took):.2f} s at most")
    print(f"{len(everything) - failed} of {len(everything)}: the others named the rank and went on")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The convergence study: 1-bit Adam against Adam and 1-bit LAMB against LAMB, on real data, several seeds, real ranks.

    python -m perf.convergence [--tasks lm,images] [--sweeps main,freeze,workers,batch,lr] [--seeds 3] [--data PATH]
    python -m perf.convergence --quick       a small language model on Python's own documentation, a minute or two
    python -m perf.convergence --report      tables and figures of what is there, nothing is run

The optimizers of a task share data, order, schedule and, within a family, the learning rate. Every run is a JSON file
under --out; those there are skipped, so that a study that was interrupted goes on where it was when started again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from onebit.cli import main as cli
from onebit.kernels.tuning.machine import device_name, provenance
from perf.convergence.data import DataMissing
from perf.convergence.plan import MAIN, SWEEPS, TASKS, VARIANTS, Run, plan
from perf.convergence.records import load, record_path
from perf.convergence.report import report
from perf.convergence.runs import RunFailed, launch

QUICK = {"tasks": ["quick"], "sweeps": [MAIN], "seeds": 2, "out": Path("build/convergence")}
STANDARD = {"tasks": ["lm", "images"], "sweeps": [MAIN, *SWEEPS], "seeds": 3, "out": Path("perf/results/convergence")}


class Study:
    """Runs what is not there yet, one after the other."""

    def __init__(self, out: Path, given: Path | None, progress: cli.Progress) -> None:
        self.out, self.given, self.progress = out, given, progress
        self._folder = tempfile.TemporaryDirectory(prefix="onebit-convergence-data-")

    def run(self, runs: Sequence[Run]) -> int:
        """How many were run."""
        left = [run for run in runs if load(record_path(self.out, run), run) is None]
        if left:
            self.progress.show(f"{len(runs)} runs, {len(runs) - len(left)} are there")
        start = time.monotonic()
        for i, run in enumerate(left):
            to_go = f", {(len(left) - i) * (time.monotonic() - start) / i / 60:.0f} min to go" if i else ""
            self._one(run, f"{i + 1} of {len(left)}{to_go}: {run.task} {run.name}")
        self.progress.clear()
        return len(left)

    def _one(self, run: Run, title: str) -> None:
        data = self._prepared(run.task)
        start = time.monotonic()

        def say(step: int, loss: float) -> None:
            if step * 10 % run.steps == 0:
                spent = time.monotonic() - start
                self.progress.show(f"{title}: step {step} of {run.steps}, loss {loss:.3f}, {spent:.0f} s")

        load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        found = launch(run, data, say)
        record = {
            "config": asdict(run),
            **found,
            "cpu": device_name(torch.device("cpu")),
            "cpu_count": os.cpu_count(),
            "load_before": load_before,
            **provenance(),
        }
        path = record_path(self.out, run)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(record) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def _prepared(self, task: str) -> Path:
        path = Path(self._folder.name, f"{task}.pt")
        if not path.exists():
            self.progress.show(f"{task}: preparing its data")
            prepared = TASKS[task].prepare(self.given)
            torch.save(vars(prepared), path)
        return path


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: a run failed. 2: data or an argument are not right."""
    arguments = _arguments(argv)
    progress = cli.Progress()
    try:
        runs = list(plan(arguments.tasks, arguments.sweeps, arguments.seeds, arguments.ranks, arguments.variants))
        if not arguments.report:
            arguments.out.mkdir(parents=True, exist_ok=True)
            count = Study(arguments.out, arguments.data, progress).run(runs)
            print(f"{count} runs made, {len(runs) - count} were there: {arguments.out}")
        print(report(arguments.out, arguments.docs, arguments.ranks))
    except (DataMissing, OSError, ValueError) as error:
        print(f"perf.convergence: error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"perf.convergence: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _list_of(known: Sequence[str]) -> Any:
    def parsed(text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",")]
        if wrong := [part for part in parts if part not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
        return parts

    return parsed


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.convergence", description="1-bit Adam and 1-bit LAMB against their uncompressed originals."
    )
    parser.add_argument("--tasks", type=_list_of(list(TASKS)), help="of " + ", ".join(TASKS))
    parser.add_argument("--sweeps", type=_list_of([MAIN, *SWEEPS]), help="of " + ", ".join([MAIN, *SWEEPS]))
    parser.add_argument(
        "--variants", type=_list_of(list(VARIANTS)), default=list(VARIANTS), help="of " + ", ".join(VARIANTS)
    )
    parser.add_argument("--seeds", type=cli.whole_number, help="how many: 0, 1, ... (default: 3)")
    parser.add_argument(
        "--ranks", type=cli.whole_number, default=2, help="where a sweep does not set them (default: 2)"
    )
    parser.add_argument("--data", type=Path, help="a folder of packages, or of *.txt for lm (see docs/convergence.md)")
    parser.add_argument("--out", type=Path, help=f"folder of the runs (default: {STANDARD['out']})")
    parser.add_argument("--docs", type=Path, help="the page to write (default: docs/convergence.md)")
    parser.add_argument("--report", action="store_true", help="only tables and figures of the runs that are there")
    parser.add_argument("--quick", action="store_true", help=f"the task quick, 2 seeds, --out {QUICK['out']}")
    arguments = parser.parse_args(argv)
    for name, value in (QUICK if arguments.quick else STANDARD).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.docs is None:
        standard = arguments.out == STANDARD["out"]
        arguments.docs = Path("docs/convergence.md") if standard else arguments.out / "convergence.md"
    return arguments

"""The convergence study: 1-bit Adam against Adam and 1-bit LAMB against LAMB, on real data, several seeds.

    python -m perf.convergence [--tasks lm,images] [--sweeps main,reply,ranks,event,freeze] [--seeds 3] [--data PATH]
    python -m perf.convergence --quick       a small language model on Python's own documentation, a minute or two
    python -m perf.convergence --report      tables and figures of what is there, nothing is run

The optimizers of a task share data, order, schedule and, within a family, the learning rate. Every run is a JSON file
under --out; those there are skipped, so that a study that was interrupted goes on where it was when started again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from onebit.cli.arguments import whole_number
from onebit.cli.progress import Progress
from perf.command import exit_status, list_of, make_folder, one_of, set_defaults
from perf.convergence.plan import MAIN, SWEEPS, TASKS, VARIANTS, Run, plan
from perf.convergence.records import load, record_path
from perf.convergence.report import report
from perf.convergence.runs import Show, train
from perf.convergence.tasks import Prepared
from perf.convergence.virtual import one_thread_a_rank, run_ranks
from perf.records import RESULTS, load_average, machine, provenance, write_record

QUICK = {"tasks": ["quick"], "sweeps": [MAIN], "seeds": 2, "out": Path("build/convergence")}
KEPT = Path("build/convergence/kept")  # runs that are saved on their way
STANDARD = {"tasks": ["lm", "images"], "sweeps": [MAIN, *SWEEPS], "seeds": 3, "out": RESULTS / "convergence"}


class Study:
    """Runs what is not there yet, one after the other."""

    def __init__(self, out: Path, given: Path | None, progress: Progress) -> None:
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
            self._run(run, f"{i + 1} of {len(left)}{to_go}: {run.task} {run.name}")
        self.progress.clear()
        return len(left)

    def _run(self, run: Run, title: str) -> None:
        data = self.prepared_data(run.task)
        start = time.monotonic()

        def show(step: int, loss: float) -> None:
            if step * 10 % run.steps == 0:
                spent = time.monotonic() - start
                self.progress.show(f"{title}: step {step} of {run.steps}, loss {loss:.3f}, {spent:.0f} s")

        load = load_average()
        kept = KEPT / run.task / f"{run.name}.pt"
        found = launch(run, data, show, kept)
        record = {"config": run.config, **found, **machine(), "load_before": load, **provenance()}
        path = record_path(self.out, run)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, record, indent=None)
        kept.unlink(missing_ok=True)

    def prepared_data(self, task: str) -> Path:
        """A file of what torch.save makes of Prepared's fields."""
        path = Path(self._folder.name, f"{task}.pt")
        if not path.exists():
            self.progress.show(f"{task}: preparing its data")
            prepared = TASKS[task].prepare(self.given)
            torch.save(vars(prepared), path)
        return path


def launch(run: Run, data: Path, show: Show, kept: Path) -> Mapping[str, Any]:
    """Rank 0's record; `data` is a file that torch.save made of Prepared's fields, `kept` one that the run may have
    been saved in."""
    with one_thread_a_rank():
        prepared = Prepared(**torch.load(data, mmap=True, weights_only=True))
        torch.manual_seed(run.seed)
        model = TASKS[run.task].model(prepared).train()
        return run_ranks(run.ranks, lambda rank: train(run, prepared, deepcopy(model), rank, show, kept))[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: a run failed. 2: data or an argument are not right."""
    arguments = parse_arguments(argv)
    return exit_status("perf.convergence", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    runs = list(plan(arguments.tasks, arguments.sweeps, arguments.seeds, arguments.variants))
    if not arguments.report:
        make_folder(arguments.out)
        count = Study(arguments.out, arguments.data, Progress()).run(runs)
        print(f"{count} runs made, {len(runs) - count} were there: {arguments.out}")
    standard = arguments.out == STANDARD["out"]
    print(report(arguments.out, Path("docs/convergence.md") if standard else arguments.out / "convergence.md"))


def _names(what: str, known: Sequence[str]) -> dict[str, Any]:
    """Arguments of an option that is a list of these."""
    return {"type": list_of(one_of(what, known)), "help": f"of {', '.join(known)}"}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.convergence", description="1-bit Adam and 1-bit LAMB against their uncompressed originals."
    )
    parser.add_argument("--tasks", **_names("task", list(TASKS)))
    parser.add_argument("--sweeps", **_names("sweep", [MAIN, *SWEEPS]))
    parser.add_argument("--variants", **_names("variant", list(VARIANTS)), default=list(VARIANTS))
    parser.add_argument("--seeds", type=whole_number, help="how many: 0, 1, ... (default: 3)")
    parser.add_argument("--data", type=Path, help="a folder of packages, or of *.txt for lm (see docs/convergence.md)")
    parser.add_argument("--out", type=Path, help=f"folder of the runs (default: {STANDARD['out']})")
    parser.add_argument("--report", action="store_true", help="only tables and figures of the runs that are there")
    parser.add_argument("--quick", action="store_true", help=f"the task quick, 2 seeds, --out {QUICK['out']}")
    arguments = parser.parse_args(argv)
    set_defaults(arguments, QUICK if arguments.quick else STANDARD)
    return arguments

"""Every method that people would use, on links between racks and sites: which has trained a model first?

    python -m perf.methods
    python -m perf.methods --report      tables and plots of what is there, nothing is run

Needs Linux, and root or user namespaces: networks are made on this machine (perf.lab). Steps are timed on each of the
links, and models are trained on links without a limit, since links decide only how long a step takes: the time of a run
is its steps of each kind times what they took. Each method has the best of three learning rates, by the first seed.
torchft's DiLoCo is timed where torchft is installed (Python 3.11).

All that was found is kept as it comes, and what is there is not measured again, so that a comparison that was
interrupted goes on where it was. The report is written to docs/methods.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onebit.cli.progress import Progress
from perf.command import add_out, exit_status, make_folder
from perf.lab.namespaces import enter_user_namespace
from perf.lab.network import NetworkLab
from perf.lab.rates import UNSHAPED
from perf.methods.plan import (
    CLIP,
    FREEZE,
    HOSTS,
    LINKS,
    METHODS,
    MODELS,
    REPEATS,
    SEEDS,
    STEPS,
    rows_to_measure,
    to_train,
)
from perf.methods.report import record_path, write_report
from perf.records import RESULTS, load_average, machine, provenance
from perf.train_step import benchmark
from perf.train_step.record import Record

AT_ONCE = 4  # runs of the same ranks: it takes seconds to start these
OUT, PAGE = RESULTS / "methods", Path("docs/methods.md")


class Comparison:
    """One model on so many hosts."""

    def __init__(self, arguments: argparse.Namespace, model: str, hosts: int, progress: Progress) -> None:
        self.record = Record(record_path(arguments.out, model, hosts))
        self._progress = progress
        mine = (STEPS, FREEZE, CLIP)  # runs of other settings leave the record
        self.record.runs = [run for run in self.record.runs if (run.steps, run.freeze, run.clip) == mine]
        shape = MODELS[model]
        options = {"width": shape.width, "layers": shape.layers, "batch": shape.batch, "repeats": REPEATS}
        options |= {"steps": STEPS, "freeze": FREEZE, "clip": CLIP}
        lab = ["--lab", f"--hosts={hosts}", *(f"--{name}={value}" for name, value in options.items())]
        self._arguments = benchmark.parse_arguments(lab)
        self._about = {"lab": True, **machine(), **options, **provenance()}

    def measure_times(self, lab: NetworkLab) -> None:
        for link in LINKS:
            if left := rows_to_measure(self.record.rows, link):
                lab.set_link(link)
                self.record.add({**self._about, "load_before": load_average()})
                self._run(lab, variants=left)

    def train(self, lab: NetworkLab) -> None:
        lab.set_link(UNSHAPED)
        while left := next(to_train(self.record.runs, METHODS, SEEDS), None):
            self.record.add(self._about)
            self._run(lab, train=True, runs=left.runs[:AT_ONCE], lr=left.lr)

    def _run(self, lab: NetworkLab, **what: Any) -> None:
        benchmark.on_lab(lab, self._arguments, self._progress, self.record.add, **what)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: a failure (what was found is kept). 2: impossible here."""
    arguments = parse_arguments(argv)
    return exit_status("perf.methods", lambda: run(arguments), lost="no more figures")


def run(arguments: argparse.Namespace) -> None:
    make_folder(arguments.out)
    if not arguments.report:
        enter_user_namespace()
        progress = Progress()
        for model in MODELS:
            for hosts in HOSTS:
                comparison = Comparison(arguments, model, hosts, progress)
                with NetworkLab(hosts) as lab:
                    comparison.measure_times(lab)
                    comparison.train(lab)
        progress.clear()
    print(write_report(arguments.out, PAGE if arguments.out == OUT else arguments.out / PAGE.name))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.methods", description="Which method has trained first?")
    parser.add_argument("--report", action="store_true", help="only tables and plots of what is there")
    add_out(parser, "records, plots and, where it is another than this, the page", OUT)
    return parser.parse_args(argv)

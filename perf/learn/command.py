"""GPT-2 small learns from scratch on 8 ranks of one GPU: Adam, 0/1 Adam, 1-bit Adam, LAMB and 1-bit LAMB.

    python -m perf.learn --prepare           text from Debian's packages, a tokenizer, build/learn/tokens.xz: minutes
    python -m perf.learn [--seconds 500]     the runs that are not there yet, one after the other
    python -m perf.learn --rehearse          the same, small, on a CPU, on Python's documentation
    python -m perf.learn --report            table and plot of what is there

Every run is a record under --out. A run in progress has a checkpoint under --work, written every five minutes, on
SIGTERM, and when --seconds are over: the command then ends with exit status 0, and started again it goes on from there,
on a CPU with the same numbers bit for bit; on a GPU the backward pass of attention adds in no fixed order.

Ranks are threads that share the device: what is compared is losses and bytes. How long steps took says nothing about
ranks on a network.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onebit.cli.arguments import pick_device, whole_number, whole_number_from
from onebit.cli.progress import Progress
from onebit.kernels.tuning.machine import device_name
from perf.command import exit_status, make_folder, set_defaults
from perf.convergence.plan import Run
from perf.learn.checkpoint import Checkpoint
from perf.learn.plan import GPT2_SMALL, REHEARSAL, Setting, config, plan, title
from perf.learn.prepare import prepare
from perf.learn.report import record_path, there, write_report
from perf.learn.tokens import FILE, read_tokens, write_rehearsal
from perf.learn.train import GO_ON, SAVE, STOP, Learner
from perf.records import RESULTS, machine, provenance, write_record

SAVE_EVERY = 300.0  # seconds
WORK = Path("build/learn")
STANDARD = {"out": RESULTS / "learn", "work": WORK, "device": "auto"}
IN_REHEARSAL = {"out": WORK / "rehearsal", "work": WORK / "rehearsal", "device": "cpu"}


class Due:
    """Says what is due after a step: to stop when so many seconds are over, or after SIGTERM."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._next_save = time.monotonic() + SAVE_EVERY
        self._asked_to_stop = threading.Event()

    @contextmanager
    def at_sigterm(self) -> Iterator[None]:
        former = signal.signal(signal.SIGTERM, lambda *_: self._asked_to_stop.set())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, former)

    def __call__(self) -> int:
        now = time.monotonic()
        if self._asked_to_stop.is_set() or (self._end is not None and now >= self._end):
            return STOP
        if now < self._next_save:
            return GO_ON
        self._next_save = now + SAVE_EVERY
        return SAVE


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: a run failed. 2: data or an argument are not right."""
    words = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(words)
    return exit_status("perf.learn", lambda: run(arguments, f"python -m perf.learn {shlex.join(words)}".strip()))


def run(arguments: argparse.Namespace, command: str) -> None:
    """Do what the arguments ask. command: what a user types to go on where this has stopped."""
    setting = REHEARSAL if arguments.rehearse else GPT2_SMALL
    setting = replace(setting, steps=arguments.steps or setting.steps)
    make_folder(arguments.work)
    if arguments.prepare:
        print(prepare(arguments.work, setting))
        return
    make_folder(arguments.out)
    if not arguments.report:
        if arguments.rehearse and not (arguments.work / FILE).exists():
            write_rehearsal(arguments.work / FILE)
        if stopped := learn_all(arguments, setting):
            print(f"{stopped}. Go on with:  {command}")
            return
    print(write_report(arguments.out, setting))


def learn_all(arguments: argparse.Namespace, setting: Setting) -> str:
    """Run what is not there yet. Returns where it has stopped, or nothing when all is there."""
    due, progress = Due(arguments.seconds), Progress()
    comparison = Comparison(arguments.out, arguments.work, setting, pick_device(arguments.device))
    runs = list(plan(setting, arguments.seeds))
    left = [run for run in runs if not there(arguments.out, run, comparison.config(run))]
    with due.at_sigterm():
        for i, run in enumerate(left):
            stopped = f"Stopped before {title(run)}" if i and due() == STOP else comparison.learn(run, due, progress)
            if stopped:
                return f"{stopped}: {len(left) - i} of {len(runs)} runs are left"
    progress.clear()
    return ""


class Comparison:
    """Makes runs on one text and one device."""

    def __init__(self, out: Path, work: Path, setting: Setting, device: torch.device) -> None:
        self._out, self._work, self._setting, self._device = out, work, setting, device
        self._tokens = read_tokens(work / FILE)

    def config(self, run: Run) -> dict[str, Any]:
        return config(run, self._setting, self._tokens.about)

    def learn(self, run: Run, due: Due, progress: Progress) -> str:
        """Write the run's record. Returns where it has stopped, if it has."""

        def show(step: int, loss: float) -> None:
            progress.tick(f"{title(run)}: step {step:,} of {run.steps:,}, held-out loss {loss:.3f}")

        path = record_path(self._out, run)
        checkpoint = Checkpoint((self._work / path.name).with_suffix(".pt"), self.config(run), run.ranks)
        found = Learner(self._setting, self._tokens, self._device, due, show).learn(run, checkpoint)
        if isinstance(found, int):
            return f"Stopped after step {found:,} of {run.steps:,} of {title(run)}"
        about = {"device": device_name(self._device), **machine(), **provenance()}
        write_record(path, {"config": self.config(run), "text": self._tokens.about, **found, **about}, indent=None)
        checkpoint.remove()
        return ""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.learn", description="GPT-2 small, learned on 8 ranks.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prepare", action="store_true", help=f"make {FILE} in --work")
    what.add_argument("--report", action="store_true", help="only table and plot of the runs that are there")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on 2 ranks and Python's documentation")
    parser.add_argument("--seeds", type=whole_number, default=1, help="how many: 0, 1, ... (default: 1)")
    parser.add_argument("--steps", type=whole_number, help=f"of each run (default: {GPT2_SMALL.steps:,})")
    parser.add_argument("--seconds", type=whole_number_from(0, 10**6), help="when to stop, with a checkpoint")
    parser.add_argument("--device", help="auto, cpu or cuda (default: auto; rehearsal: cpu)")
    parser.add_argument("--out", type=Path, help=f"folder of records and plot (default: {STANDARD['out']})")
    parser.add_argument("--work", type=Path, help=f"folder of {FILE} and checkpoints (default: {STANDARD['work']})")
    arguments = parser.parse_args(argv)
    set_defaults(arguments, IN_REHEARSAL if arguments.rehearse else STANDARD)
    return arguments

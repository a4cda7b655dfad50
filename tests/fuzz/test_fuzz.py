"""A short run of `python -m tests.fuzz`, and what the command says of what is wrong."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onebit.collectives.transport import TorchTransport
from tests import forked
from tests.fuzz import __main__ as command
from tests.fuzz import collectives, runs
from tests.fuzz.__main__ import TARGETS, Fuzzer
from tests.fuzz.mutate import Source
from tests.limits import HUNG
from tests.ranks import group, run_ranks

CASES = {"wire": 1200, "options": 1200, "states": 800, "command_line": 600, "files": 400, "runs": 16}


@pytest.mark.parametrize("target", TARGETS)
def test_only_documented_errors_come_of_it(target: str) -> None:
    fuzzer = Fuzzer(1, target)
    assert fuzzer.run(range(CASES[target])) == []
    assert fuzzer.outcomes.total() == CASES[target]
    assert target != "runs" or fuzzer.outcomes["runs", "goes on, compressing"] > 8


def test_a_random_run_that_goes_on_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = {**runs.drawn(np.random.default_rng(0)), "wrapper": "none", "ranks": 1, "way": "state_dict", "saved": 6}
    train, calls = runs.Run.train, []

    def one_off(self: runs.Run, rank: int, first: int, last: int) -> None:
        calls.append(1)
        train(self, rank, first + (len(calls) == 3), last)

    monkeypatch.setattr(runs.Run, "train", one_off)
    monkeypatch.setattr(runs, "group", lambda: None)
    with pytest.raises(AssertionError, match="ends elsewhere"):
        runs.resumed(0, case, str(tmp_path))


@pytest.mark.parametrize(("ends", "says"), [
    (["goes on", "goes on"], ""), (["WRONG x", "WRONG x"], "WRONG x"), (["goes on", "refused: y"], "refused: y")
])  # fmt: skip
def test_a_case_of_ranks_that_are_wrong_or_part_is_found(monkeypatch: pytest.MonkeyPatch, ends: Any, says: str) -> None:
    for name in ("run_ranks", "run_ranks_once"):
        monkeypatch.setattr(runs, name, lambda *_: [(end, collectives.Seen()) for end in ends])
    with pytest.raises(AssertionError, match=says) if says else contextlib.nullcontext():
        assert runs.Runs().case(np.random.default_rng(0)) == "goes on"


def collectives_of(rank: int, size: int, fault: str) -> collectives.Seen:
    transport, works = TorchTransport(group()), []
    with collectives.recorded() as seen:
        values = {"strides": torch.zeros(4, 4).t(), "alignment": torch.zeros(9)[1:]}.get(fault, torch.zeros(8))
        with contextlib.suppress(ValueError, RuntimeError):
            works.append(transport.all_sum(values, f"phase {rank if fault == 'order' else 0}"))
        other = threading.Thread(target=lambda: transport.all_sum(torch.zeros(8), "of a thread").wait())
        if fault == "threads":
            other.start()
            other.join()
        if fault == "no order":
            works.pop().wait()
            other.start()
            while other.is_alive():
                time.sleep(0.001)
            transport.all_sum(torch.zeros(8), "of this thread").wait()
        for work in works:
            work.wait()
    return seen


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("none", ""),
        ("order", "phase 0 on rank 0, all_sum torch.float32 [8], phase 1 on rank 1"),
        ("strides", "is not contiguous"),
        ("alignment", "begins 4 bytes off"),
        ("no order", "another thread used this group before, and nothing orders the two"),
        ("threads", "another thread has a collective of this group under way"),
    ],
)
def test_what_nccl_would_not_take_is_found(fault: str, text: str) -> None:
    found = collectives.faults(run_ranks(2, collectives_of, fault))
    assert bool(found) == bool(text) and all(text in each for each in found)


def test_the_command_runs_in_processes_of_its_own() -> None:
    with forked.python() as python:
        command = [python, "-m", "tests.fuzz", "--cases", "40", "--jobs", "2", "--only", "wire"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0 and "40 cases in " in done.stdout, done.stderr


class Bad:
    """A target: it goes well, is wrong, or ends the process."""

    def case(self, source: Source) -> str:
        draw = source.random()
        if draw < 0.01:
            os._exit(9)
        assert draw < 0.95, "a bug"
        return "well"


def test_the_command_names_what_was_wrong_and_where_a_process_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in TARGETS:
        monkeypatch.setitem(TARGETS, name, Bad)
    for given, status, text in (
        ("--cases 9 --jobs 2", 0, "9 cases in "),
        ("--cases 29 --jobs 1 --only wire", 1, "--only wire --seed 0 --first 26 --cases 1):\nTrace"),
        ("--first 29 --cases 1 --only wire", 1, "--first 29 --cases 1) ended the process, exit code 9"),
    ):
        monkeypatch.setattr(sys, "argv", ["fuzz", *given.split()])
        assert command.main() == status
        assert text in "".join(capsys.readouterr())

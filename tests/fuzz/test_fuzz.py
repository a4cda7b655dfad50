"""A short run of `python -m tests.fuzz`, and that it finds what is wrong."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from onebit.checkpoint import checks, restore
from onebit.checkpoint.files import Manifest
from onebit.cli.arguments import CommandError
from onebit.kernels.data.wire import Messages
from onebit.optim import options
from tests.fuzz import __main__ as command
from tests.fuzz.driver import SHARES, TARGETS, Fuzzer, Hang, limited, turn

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_run_meets_only_documented_errors() -> None:
    """100 cases, and as many of the next 3,000 as 15 seconds allow; the command runs 100,000."""
    fuzzer = Fuzzer(seed=1)
    assert fuzzer.run(iter(range(100)), float("inf")) == []
    assert fuzzer.run(iter(range(100, 3000)), time.monotonic() + 15) == []
    assert {target for target, _ in fuzzer.outcomes} == TARGETS.keys()
    assert fuzzer.outcomes.total() >= 100


def test_every_target_gets_its_share() -> None:
    assert SHARES.keys() == TARGETS.keys()
    assert Counter(turn(number) for number in range(200)) == {name: 2 * share for name, share in SHARES.items()}


@pytest.mark.parametrize("target", TARGETS)
def test_a_case_can_be_run_again(target: str) -> None:
    """With the same outcome, whatever ran before it."""
    after_others, alone = Fuzzer(3, target), Fuzzer(3, target)
    assert after_others.run(iter(range(12)), time.monotonic() + 60) == []
    before = after_others.outcomes.copy()
    after_others.case(11)
    alone.case(11)
    assert after_others.outcomes - before == alone.outcomes


def plant_header(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Messages, "check", lambda self, phase: None)


def plant_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Manifest, "check_files", lambda self, rank, ranks: None)


def plant_values(patch: pytest.MonkeyPatch) -> None:
    for module in (checks, restore):
        patch.setattr(module, "shaped", lambda own, what, shape, name, kind: own[what])


def plant_half_load(patch: pytest.MonkeyPatch) -> None:
    """Groups are changed before all is known to fit."""
    whole = restore.merged_options

    def merged(setup: Any, groups: Any) -> Any:
        made = whole(setup, groups)
        setup.groups[0]["lr"] = 7.0
        return made

    patch.setattr(restore, "merged_options", merged)


def plant_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(options, "is_finite", lambda value, largest=0.0: True)


def plant_exit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CommandError, "code", 3)


PLANTED = {
    "a header that is not read": ("wire", plant_header),
    "bytes that are not checked": ("files", plant_bytes),
    "values that are not checked": ("states", plant_values),
    "a load that changes before it fails": ("states", plant_half_load),
    "a number that is none": ("options", plant_number),
    "another exit status": ("command_line", plant_exit),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, plant = PLANTED[bug]
    plant(monkeypatch)
    fuzzer = Fuzzer(0, target)
    found = next((wrong for wrong in map(fuzzer.case, range(1000)) if wrong), None)
    assert found is not None
    assert f"--only {target} --seed 0 --first" in found
    assert "Traceback" in found


def test_a_hang_is_an_error() -> None:
    with pytest.raises(Hang), limited(0.05):
        while True:
            pass


def test_the_command_counts_its_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "--cases", "40", "--jobs", "1", "--only", "command_line"])
    assert command.main() == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("40 cases in ")
    assert last.endswith("only documented errors")


def test_the_command_fails_where_a_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by a crash: the case it was at is named."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.fuzz import driver\n"
        "driver.CommandLine.case = lambda self, source: os._exit(9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["fuzz", "--cases", "9", "--jobs", "1", "--only", "command_line"])
    assert command.main() == 1
    assert "case 0 of command_line ended the process (exit code 9)" in capsys.readouterr().err

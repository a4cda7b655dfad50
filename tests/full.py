"""What is too long for every run: named commands, and a record of how each ended last.

    python -m tests.full            the commands, and how each ended last
    python -m tests.full fuzz aot   runs some, one after the other, and writes tests/full.json

A line at the end of every run of the tests names those whose record is missing or older than the code it covers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "tests" / "full.json"
PRODUCT = ("kernels", "collectives", "onebit")


@dataclass(frozen=True)
class Command:
    module: str  # for python -m, with its options
    covers: tuple[str, ...]  # paths of the repository
    about: str


COMMANDS = {
    "mutations": Command("tests.mutations", (*PRODUCT, "tests"), "300 faults in the product, one at a time"),
    "aot": Command("onebit.kernels.gpu.aot", ("kernels",), "every variant of every kernel, compiled for all targets"),
    "static": Command("perf.kernels.static_account --check", ("kernels",), "no kernel's machine code is worse"),
    "ptx": Command("tests.ptx", ("kernels", "tests/ptx"), "every variant of every kernel, compiled, run on the CPU"),
    "ptx-faults": Command("tests.ptx --mutations", ("kernels", "tests/ptx"), "faults in the compiled kernels"),
    "streams": Command("tests.streams", (*PRODUCT, "tests/streams"), "what waits for what on a simulated device"),
    "faults": Command("tests.faults", ("collectives", "onebit/optim"), "ranks killed and stopped at every point"),
    "elastic-faults": Command("tests.faults.elastic", (*PRODUCT, "tests/faults"), "a rank lost at every point"),
    "many-faults": Command("tests.faults.many", (*PRODUCT, "tests/faults"), "200 faults in a run of 2,000 steps"),
    "torchft-faults": Command("tests.faults.torchft", PRODUCT, "a replica killed: torchft's pattern and ours"),
    "poisoned": Command("tests.faults.poisoned", ("collectives", "onebit/optim"), "gradients that are not finite"),
    "soak": Command("tests.faults.soak", PRODUCT, "thousands of steps with saves, loads and skips"),
    "fuzz": Command("tests.fuzz", PRODUCT, "100,000 random and damaged inputs"),
    "study": Command("perf.convergence --quick", ("perf/convergence", "onebit/optim"), "each task of the study, short"),
}


@dataclass(frozen=True)
class Record:
    date: str
    commit: str
    machine: str
    seconds: int
    result: str


def records() -> dict[str, Record]:
    if not RECORDS.exists():
        return {}
    return {name: Record(**each) for name, each in json.loads(RECORDS.read_text(encoding="utf-8")).items()}


def run(name: str) -> bool:
    from perf.records import cpu_name  # imports torch and Triton, which conftest.py must prepare first

    print(f"== {name}: {COMMANDS[name].about}", flush=True)
    began = time.monotonic()
    status = subprocess.run([sys.executable, "-m", *COMMANDS[name].module.split()], cwd=ROOT).returncode
    record = Record(
        datetime.date.today().isoformat(),
        _git("rev-parse", "--short=12", "HEAD"),
        cpu_name(),
        round(time.monotonic() - began),
        "passed" if status == 0 else f"failed with {status}",
    )
    rows = {each: asdict(one) for each, one in sorted({**records(), name: record}.items())}
    RECORDS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return status == 0


def outdated() -> dict[str, str]:
    """Why a command is due, by its name: its last run failed or was of other code than there is now."""
    known = records()
    found = {name: _why_again(known.get(name), command) for name, command in COMMANDS.items()}
    return {name: why for name, why in found.items() if why}


def summary() -> str:
    """One line that names all that are due; empty if none is."""
    due = ", ".join(outdated())
    return due and f"not passed on this code: {due} (why: python -m tests.full; to run: python -m tests.full NAME)"


def _why_again(record: Record | None, command: Command) -> str:
    if record is None:
        return "has not been run"
    if record.result != "passed":
        return f"{record.result} on {record.date}"
    changes = _git("rev-list", "--count", f"{record.commit}..HEAD", "--", *command.covers)
    return "" if changes in ("", "0") else f"was run on {record.date}, {changes} commits of what it covers ago"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.full", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(COMMANDS)}")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(COMMANDS)):
        parser.error(f"no command is called {', '.join(unknown)}: there are {', '.join(COMMANDS)}")
    if not names:
        for name, command in COMMANDS.items():
            record = records().get(name)
            last = f"{record.result} on {record.date}, {record.commit}, {record.seconds} s" if record else "never run"
            print(f"{name:10} {command.about}: {last}")
        for name, why in outdated().items():
            print(f"{name} {why}: python -m tests.full {name}")
    passed = [run(name) for name in names]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())

"""Every benchmark in one go, and what they say of the targets: `make bench`.

    python -m perf.bench [--only kernels,network] [--out perf/results] [--check]

Each section is a benchmark of its own, run in a process of its own, that leaves a record and a plot in the folder.
Here they are started one after the other, so that none disturbs another, and their records are read for targets. A
section that cannot be measured here (the network needs root on Linux) says so, and has no targets in the table.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from onebit.kernels.tuning.machine import device_name, provenance

ROOT = Path(__file__).resolve().parents[1]
CANNOT_MEASURE = 2  # a benchmark's exit status where it can't run at all
Record = dict[str, Any]


@dataclass(frozen=True)
class Target:
    section: str
    what: str
    needed: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured >= self.needed


@dataclass(frozen=True)
class Section:
    """A benchmark: how to run it, how long it takes at most, and what its record says of targets."""

    name: str
    title: str
    command: tuple[str, ...]  # after `python -m`
    seconds: int  # more than it takes on two cores; then it is stopped
    read: Callable[[Record], list[tuple[str, float, float]]]  # what, needed, measured


def of_kernels(record: Record) -> list[tuple[str, float, float]]:
    found = [
        (f"{row['name']}: percent of a copy's bytes a second", row["target_percent"], row["percent_of_copy"])
        for row in record["passes"]
        if row["target_percent"] is not None
    ]
    step = record.get("bert_large_step")
    if step is not None:
        found.append(("step of BERT-Large: times AdamW(fused)'s speed", 1.0, step["times_faster_than_adamw_fused"]))
        found.append(("step of BERT-Large: times the eager operations' speed", 8.0, step["times_faster_than_eager"]))
    return found


def of_targets(record: Record) -> list[tuple[str, float, float]]:
    """Of a record that has its targets worked out."""
    return [(f"times {each['what']}", each["needed"], each["reached"]) for each in record["targets"]]


STEP = ("--name=bench", "--rates=1gbit", "--variants=fp32,fp16,adam-2,adam-2-overlap")  # what the targets need
# A benchmark that joins `make bench` is one more line here.
SECTIONS = (
    Section("kernels", "Every pass against a plain copy", ("perf.kernels",), 180, of_kernels),
    Section(
        "network",
        "The all-reduce in the network lab",
        ("perf.all_reduce", "--lab", "--repeats=3"),
        480,
        of_targets,
    ),
    Section("step", "A training step in the network lab", ("perf.train_step", "--lab", *STEP), 600, of_targets),
)


def run(section: Section, out: Path) -> tuple[list[Target], str]:
    """A section's targets, and why there are none if there are none."""
    before = _written(out)
    command = [sys.executable, "-m", *section.command, f"--out={out}"]
    started = subprocess.Popen(command, cwd=ROOT)
    try:
        status = started.wait(section.seconds)
    except subprocess.TimeoutExpired:
        return [], f"stopped after {section.seconds} s"
    finally:
        _end(started)
    if status:
        return [], "it cannot run here" if status == CANNOT_MEASURE else f"it failed (exit status {status})"
    fresh = [path for path, at in _written(out).items() if before.get(path) != at]
    found = [reached for path in sorted(fresh) for reached in section.read(json.loads(path.read_text("utf-8")))]
    return [Target(section.name, *each) for each in found], "" if found else "its record speaks of no target"


def _end(started: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does: a network lab removes its hosts."""
    if started.poll() is None:
        started.send_signal(signal.SIGINT)
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()


def table(targets: Sequence[Target], missing: dict[str, str]) -> str:
    width = max((len(t.what) for t in targets), default=20)
    lines = [f"{'section':<10} {'target':<{width}} {'needed':>8} {'measured':>9}"]
    for t in targets:
        verdict = "met" if t.met else "missed"
        lines.append(f"{t.section:<10} {t.what:<{width}} {t.needed:>8g} {t.measured:>9.1f}  {verdict}")
    return "\n".join([*lines, *(f"{name:<10} not measured: {why}" for name, why in missing.items())])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: a section failed, or with --check a target was missed or a section not measured."""
    arguments = _parser().parse_args(argv)
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    sections = [section for section in SECTIONS if section.name in arguments.only]
    targets: list[Target] = []
    missing: dict[str, str] = {}
    for i, section in enumerate(sections, start=1):
        print(f"[{i}/{len(sections)}] {section.title}: at most {section.seconds // 60} minutes\n", flush=True)
        start = time.monotonic()
        found, why = run(section, out)
        targets += found
        missing |= {section.name: why} if why else {}
        print(f"\n{section.name}: {time.monotonic() - start:.0f} s\n", flush=True)
    print(table(targets, missing))
    path = out / "bench.json"
    about = {"cpu": device_name(torch.device("cpu")), **provenance()}
    day = about.pop("measured")
    others = _kept(path, about, [section.name for section in sections])
    found = [{**asdict(t), "met": t.met, "measured_on": day} for t in targets]
    record = {**about, "missing": missing, "targets": found + others}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path}")
    failed = any("failed" in why or "stopped" in why for why in missing.values())
    short = bool(missing) or not all(t.met for t in targets)
    return int(failed or (arguments.check and short))


def _kept(path: Path, about: Record, run: Sequence[str]) -> list[Record]:
    """Targets of the sections that were not run now, if the same machine and versions have measured them before."""
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if {name: before.get(name) for name in about} != about:
        return []
    return [target for target in before["targets"] if target["section"] not in run]


def _written(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.glob("*.json")}


def _sections(text: str) -> list[str]:
    names = [section.name for section in SECTIONS]
    unknown = [name for name in text.split(",") if name not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no section {unknown[0]!r}: choose among {', '.join(names)}")
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.bench", description="Every benchmark, and the targets.")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", type=_sections, default=names, help=f"of {','.join(names)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("perf/results"), help="folder of the records and plots")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 unless every section was measured and every target met"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

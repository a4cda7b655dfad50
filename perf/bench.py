"""Every benchmark in one go, and which targets are met: `make bench`.

    python -m perf.bench [--only kernels,network] [--out perf/results]

Each section is a benchmark of its own, run in a process of its own, that leaves a record and a plot in the folder.
Here they are started one after the other, so that none disturbs another, and targets are read from their records. A
section that cannot be measured here (the network needs Linux) has no targets in the table but a reason. Networks are
made of namespaces, as root or within a user namespace; where neither may be, two hosts are joined by paced sockets.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.command import CANNOT_MEASURE, add_out, list_of, make_folder, one_of
from perf.lab.paced import best_network
from perf.records import cpu_name, provenance, read_record, write_record
from perf.targets import Target, targets_of

ROOT = Path(__file__).resolve().parents[1]


NETWORK = "--network"


@dataclass(frozen=True)
class Section:
    """A benchmark: how to run it, and how long it takes at most."""

    name: str
    title: str
    command: tuple[str, ...]  # after `python -m`; NETWORK stands for the option that makes a network here
    seconds: int  # more than it takes on two cores; then it is stopped


STEP = ("--name=bench", "--rates=1gbit", "--variants=fp32,fp16,adam-2,adam-2-overlap")  # what the targets need
# A benchmark of `make bench` is one line here.
SECTIONS = (
    Section("kernels", "Every pass against a plain copy", ("perf.kernels",), 120),
    Section("optimizer", "A whole step on one rank beside AdamW's", ("perf.optimizer_step",), 120),
    Section("network", "The all-reduce over links of known rates", ("perf.all_reduce", NETWORK, "--repeats=3"), 540),
    Section("step", "A training step over such a link", ("perf.train_step", NETWORK, *STEP), 480),
)


def run(section: Section, out: Path) -> tuple[list[Target], str]:
    """A section's targets, and why there are none if there are none."""
    before = _written(out)
    words = list(section.command)
    if NETWORK in words:
        words[words.index(NETWORK)], how = best_network()
        print(f"The network: {how}\n", flush=True)
    command = [sys.executable, "-m", *words, f"--out={out}"]
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
    found = [target for path in sorted(fresh) for target in targets_of(read_record(path))]
    return found, "" if found else "its record has no target"


def _end(started: subprocess.Popen[bytes]) -> None:
    """End a process as Ctrl-C does: a network lab removes its hosts."""
    if started.poll() is None:
        started.send_signal(signal.SIGINT)
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()


def table(targets: Sequence[tuple[str, Target]], missing: dict[str, str]) -> str:
    """Write pairs of a section's name and its target as a table."""
    width = max((len(t.title) for _, t in targets), default=20)
    lines = [f"{'section':<10} {'target':<{width}} {'needed':>8} {'measured':>9}"]
    for name, t in targets:
        verdict = "met" if t.met else "missed"
        lines.append(f"{name:<10} {t.title:<{width}} {t.needed:>8.3g} {t.shown:>9}  {verdict}")
    return "\n".join([*lines, *(f"{name:<10} not measured: {why}" for name, why in missing.items())])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: a section failed."""
    parser = argparse.ArgumentParser(prog="python -m perf.bench", description="Every benchmark, and the targets.")
    names = [section.name for section in SECTIONS]
    only = list_of(one_of("section", names))
    parser.add_argument("--only", type=only, default=names, help=f"of {','.join(names)} (default: all)")
    add_out(parser, "the records and plots")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out.resolve()
    make_folder(out)
    sections = [section for section in SECTIONS if section.name in arguments.only]
    targets: list[tuple[str, Target]] = []
    missing: dict[str, str] = {}
    for i, section in enumerate(sections, start=1):
        print(f"[{i}/{len(sections)}] {section.title}: at most {section.seconds // 60} minutes\n", flush=True)
        start = time.monotonic()
        found, why = run(section, out)
        targets += [(section.name, target) for target in found]
        missing |= {section.name: why} if why else {}
        print(f"\n{section.name}: {time.monotonic() - start:.0f} s\n", flush=True)
    print(table(targets, missing))
    path = out / "bench.json"
    save(path, targets, missing, [section.name for section in sections])
    print(f"\n{path}")
    return int(any("failed" in why or "stopped" in why for why in missing.values()))


def save(path: Path, targets: Sequence[tuple[str, Target]], missing: dict[str, str], run: Sequence[str]) -> None:
    """Save the targets, and those of sections that were not run now, if this machine and these versions have measured
    them."""
    about = {"cpu": cpu_name(), **provenance()}
    day = about.pop("measured")
    before = read_record(path) if path.exists() else {}
    same = {name: before.get(name) for name in about} == about
    kept = [target for target in before["targets"] if target["section"] not in run] if same else []
    found = [
        {"section": name, "what": t.title, "needed": t.needed, "measured": t.reached, "met": t.met, "measured_on": day}
        for name, t in targets
    ]
    write_record(path, {**about, "missing": missing, "targets": found + kept})


def _written(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.glob("*.json")}


if __name__ == "__main__":
    sys.exit(main())

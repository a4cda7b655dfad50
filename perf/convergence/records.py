"""The records of the convergence study: a JSON file for each run, grouped by variant, seed and sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from perf.convergence.plan import REPLIES, REPLY, SWEPT, TASKS, VARIANTS, Run, family_of, points, reply_variants
from perf.records import read_record

Record = Mapping[str, Any]
Records = dict[int, Record]  # by seed
SEEDS = range(100)


def record_path(out: Path, run: Run) -> Path:
    return out / run.task / f"{run.name}.json"


def load(path: Path, run: Run) -> Record | None:
    """A run's record, if it is there and was made with these settings."""
    try:
        record = read_record(path)
    except (OSError, ValueError):
        return None
    return record if record.get("config") == asdict(run) else None


def found(out: Path, run: Run) -> Records:
    """The records of a run, by seed."""
    runs = [replace(run, seed=seed) for seed in SEEDS]
    records = {run.seed: load(record_path(out, run), run) for run in runs}
    return {seed: record for seed, record in records.items() if record}


def main_runs(out: Path, task: str, ranks: int) -> dict[str, Records]:
    runs = {variant: found(out, Run.standard(task, variant, 0, ranks)) for variant in _known(task, VARIANTS)}
    return {variant: records for variant, records in runs.items() if records}


def _known(task: str, variants: Iterable[str]) -> list[str]:
    """Those of the task's families."""
    return [variant for variant in variants if family_of(variant) in TASKS[task].families]


def sweep_runs(out: Path, task: str, sweep: str, ranks: int) -> dict[str, dict[str, Records]]:
    """By point, then by variant, of the seeds that all have; none where nothing but the main comparison was run."""
    table, beyond = {}, False
    for label, point in points(TASKS[task], sweep).items():
        runs = {}
        for variant in _known(task, SWEPT):
            standard = Run.standard(task, variant, 0, ranks)
            if records := found(out, standard.at(point)):
                runs[variant] = records
                beyond |= standard.at(point) != standard
        table[label] = runs
    every = [records for runs in table.values() for records in runs.values()]
    common = sorted(set.intersection(*map(set, every))) if beyond else []
    if not common:
        return {}
    return {
        label: {variant: {seed: records[seed] for seed in common} for variant, records in runs.items()}
        for label, runs in table.items()
        if runs
    }


def reply_runs(out: Path, task: str) -> dict[str, dict[str, Records]]:
    """By number of ranks, then by variant: what messages get back. None if kinds of it were compared at one number."""
    table = {
        label: {
            v: records for v in reply_variants(TASKS[task].families) if (records := found(out, _at(task, v, point)))
        }
        for label, point in points(TASKS[task], REPLY).items()
    }
    return {label: runs for label, runs in table.items() if runs} if sum(map(_compares, table.values())) > 1 else {}


def _compares(runs: Mapping[str, Records]) -> bool:
    """Whether an optimizer was run with more than one kind of reply."""
    return any(sum(name.format(family=f) in runs for name in REPLIES.values()) > 1 for f in ("adam", "lamb"))


def _at(task: str, variant: str, point: Mapping[str, Any]) -> Run:
    return Run.standard(task, variant, 0).at(point)


def bits_sent(record: Record) -> float:
    """Bits that a rank sends for each element and compressed step."""
    steps = record["config"]["steps"] - record["uncompressed_steps"]
    return 8 * record["compressed_bytes"] / record["padded"] / steps


def differences(records: Records, baseline: Records) -> list[float]:
    """Of losses, over the seeds that both have."""
    return [records[seed]["loss"] - baseline[seed]["loss"] for seed in sorted(records.keys() & baseline.keys())]


def losses(records: Records) -> list[float]:
    return [record["loss"] for record in records.values()]


def every_record(out: Path) -> list[Record]:
    paths = sorted(path for task in TASKS for path in (out / task).glob("*.json"))
    return [read_record(path) for path in paths]

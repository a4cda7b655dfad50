"""The records of the convergence study: a JSON file for each run, grouped by variant, seed and sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from perf.convergence.plan import FAMILIES, TASKS, VARIANTS, Run, cases, family_of, points
from perf.convergence.runs import full_step_bytes
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
    return record if record.get("config") == run.config else None


def found(out: Path, run: Run) -> Records:
    """The records of a run, by seed."""
    runs = [replace(run, seed=seed) for seed in SEEDS]
    records = {run.seed: load(record_path(out, run), run) for run in runs}
    return {seed: record for seed, record in records.items() if record}


def main_runs(out: Path, task: str) -> dict[str, Records]:
    known = [variant for variant in VARIANTS if family_of(variant) in TASKS[task].families]
    runs = {variant: found(out, Run.standard(task, variant, 0)) for variant in known}
    return {variant: records for variant, records in runs.items() if records}


def sweep_runs(out: Path, task: str, sweep: str) -> dict[str, dict[str, Records]]:
    """Find a sweep's records by point, then by variant: not those of the main comparison, nor originals alone."""
    points_of = points(TASKS[task], sweep)
    table: dict[str, dict[str, Records]] = {label: {} for label in points_of}
    for variant, label in cases(TASKS[task], sweep):
        standard = Run.standard(task, variant, 0)
        run = standard.at(points_of[label])
        if run != standard and (records := found(out, run)):
            table[label][variant] = records
    return {label: runs for label, runs in table.items() if not runs.keys() <= set(FAMILIES)}


def bytes_sent(record: Record, uncompressed: int, of_others: float) -> float:
    """Bytes that a rank has sent in so many uncompressed steps and, `of_others`, in compressed ones: padding left
    out."""
    numel = record["elements"]
    full = full_step_bytes(numel, record["config"]["ranks"])
    return full * uncompressed + of_others * numel / record["padded"]


def bits_sent(record: Record) -> float:
    """Bits that a rank sends for each element and compressed step."""
    steps = record["config"]["steps"] - record["uncompressed_steps"]
    return 8 * record["compressed_bytes"] / record["padded"] / steps


def differences(records: Records, baseline: Records) -> list[float]:
    """Differences of losses, over the seeds that both have."""
    return [records[seed]["loss"] - baseline[seed]["loss"] for seed in sorted(records.keys() & baseline.keys())]


def losses(records: Records) -> list[float]:
    return [record["loss"] for record in records.values()]


def every_record(out: Path) -> list[Record]:
    paths = sorted(path for task in TASKS for path in (out / task).glob("*.json"))
    return [read_record(path) for path in paths]

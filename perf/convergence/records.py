"""The records of the convergence study: a JSON file for each run, grouped by variant, seed and sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from perf.convergence.plan import SWEPT, TASKS, VARIANTS, Run, points
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
    runs = {variant: found(out, Run.standard(task, variant, 0, ranks)) for variant in VARIANTS}
    return {variant: records for variant, records in runs.items() if records}


def sweep_runs(out: Path, task: str, sweep: str, ranks: int) -> dict[str, dict[str, Records]]:
    """By point, then by variant, of the seeds that all have; none where nothing but the main comparison was run."""
    table, beyond = {}, False
    for label, point in points(TASKS[task], sweep).items():
        runs = {}
        for variant in SWEPT:
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


def losses(records: Records) -> list[float]:
    return [record["loss"] for record in records.values()]


def every_record(out: Path) -> list[Record]:
    paths = sorted(path for task in TASKS for path in (out / task).glob("*.json"))
    return [read_record(path) for path in paths]

"""What was measured of a model on so many hosts: one file, written after each addition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perf.records import read_record, write_record
from perf.train_step.measure import Row, Run


class Record:
    """Rows and runs of perf.train_step. A row that is measured again replaces the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.runs: list[Run] = []
        if path.exists():
            before = read_record(path)
            self.rows = [Row.of(row) for row in before.pop("rows")]
            self.runs = [Run.of(run) for run in before.pop("runs")]
            self.about = before

    def add(self, found: Row | Run | Mapping[str, Any]) -> None:
        if isinstance(found, Row):
            self.rows = [row for row in self.rows if (row.rate, row.variant) != (found.rate, found.variant)]
            self.rows.append(found)
        elif isinstance(found, Run):
            self.runs.append(found)
        else:
            self.about.update(found)
        rows, runs = ([asdict(each) for each in these] for these in (self.rows, self.runs))
        write_record(self.path, {**self.about, "rows": rows, "runs": runs}, indent=None)


def record_path(out: Path, model: str, hosts: int) -> Path:
    return out / f"{model}-{hosts}-hosts.json"

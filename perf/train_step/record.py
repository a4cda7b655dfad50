"""Rows and runs in one file, which is written after each addition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perf.records import read_record, write_record
from perf.targets import as_json
from perf.train_step.measure import Row, Run
from perf.train_step.report import targets


class Record:
    """A row that is measured again replaces the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.runs: list[Run] = []
        if path.exists():
            self.about = read_record(path)
            self.rows = [Row.of(row) for row in self.about.pop("rows")]
            self.runs = [Run.of(run) for run in self.about.pop("runs")]

    def add(self, found: Row | Run | Mapping[str, Any]) -> None:
        if isinstance(found, Row):
            self.rows = [row for row in self.rows if (row.rate, row.variant) != (found.rate, found.variant)]
            self.rows.append(found)
        elif isinstance(found, Run):
            self.runs.append(found)
        else:
            self.about.update(found)
        self.save()

    def forget(self, rate: str) -> None:
        """Leave out what was measured on links of this rate."""
        self.rows = [row for row in self.rows if row.rate != rate]
        self.save()

    def save(self) -> None:
        rows, runs = ([asdict(each) for each in these] for these in (self.rows, self.runs))
        write_record(self.path, {**self.about, "rows": rows, "runs": runs}, indent=None)


class StepRecord(Record):
    """The record of one command, whose rows are measured together: the first takes the place of all of an earlier
    command.

    Training runs of an earlier command stay.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        super().__init__(path)
        self.changed, self._of_rows = False, about
        self.about = {**about, **self.about}

    def add(self, found: Row | Run | Mapping[str, Any]) -> None:
        if isinstance(found, Row) and self._of_rows:
            self.rows = []
            self.about.update(self._of_rows)
            self._of_rows = {}
        self.changed = True
        super().add(found)

    def save(self) -> None:
        self.about["targets"] = as_json(targets(self.rows, self.runs))
        super().save()

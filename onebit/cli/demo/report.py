"""What the demo shows: the progress line and the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from onebit.cli.demo.model import LENGTH
from onebit.cli.demo.train import BATCH, NAMES, End, Settings, Start, Step

NOTE = (
    "The ranks of one machine exchange data at the speed of its memory, so that times say little here: what fewer\n"
    "bytes save shows on a network."
)


@dataclass
class Record:
    """What the ranks have printed so far."""

    settings: Settings
    start: Start | None = None
    steps: list[Step] = field(default_factory=list)
    end: End | None = None

    def add(self, what: Start | Step | End | None) -> None:
        if isinstance(what, Start):
            self.start = what
        elif isinstance(what, Step):
            self.steps.append(what)
        elif isinstance(what, End):
            self.end = what

    @property
    def freeze(self) -> int | None:
        """The first step of 1-bit Adam's stage 2."""
        return next((s.step for s in self.steps if s.compressing), None)

    def sent(self) -> list[list[int]]:
        """By each optimizer: in all, and from the step on in which stage 2 of 1-bit Adam begins."""
        total = self.steps[-1].sent
        before = self.steps[self.freeze - 2].sent if self.freeze else total
        return [[all_of_it, all_of_it - b] for all_of_it, b in zip(total, before, strict=True)]


def progress_line(record: Record) -> str:
    """Fits into 80 columns."""
    recent, last = record.steps[-10:], record.steps[-1]
    means = [statistics.fmean(losses) for losses in zip(*(s.losses for s in recent), strict=True)]
    losses = ", ".join(f"{name.split()[0]} {mean:.3f}" for name, mean in zip(NAMES, means, strict=True))
    sent = ", ".join(f"{each / 1e6:.0f}" for each in last.sent)
    stage, rate = 2 if last.compressing else 1, len(recent) / sum(sum(s.seconds) for s in recent)
    return f"{last.step}/{record.settings.steps} stage {stage}  {losses}  {sent} MB sent  {rate:.1f}/s"


def describe(record: Record) -> str:
    assert record.start is not None and record.end is not None
    settings, start = record.settings, record.start
    rows = [("", list(NAMES), ""), ("validation loss", [f"{loss:.3f}" for loss in record.end.losses], "")]
    for what, sent in zip(("sent by each rank", "  of it in stage 2"), zip(*record.sent(), strict=True), strict=True):
        rows.append((what, [f"{each / 1e6:.1f} MB" for each in sent], f"{_factors(sent)} times less"))
    seconds = [statistics.median(s) for s in zip(*(s.seconds for s in record.steps if s.compressing), strict=True)]
    note = "" if seconds[0] <= 1.1 * min(seconds[1:]) else f"{_factors(seconds)} times as fast"
    rows.append(("time a step, stage 2", [f"{1e3 * s:.0f} ms" for s in seconds], note))
    table = "\n".join(
        f"  {what:<24}{''.join(f'{cell:>12}' for cell in cells)}   {note}".rstrip() for what, cells, note in rows
    )
    reports = "".join(
        f"{name}, optimizer.report():\n" + "".join(f"  {line}\n" for line in text.splitlines()) + "\n"
        for name, text in zip(NAMES[1:], record.end.reports, strict=True)
    )
    return (
        f"{settings.ranks} ranks, {start.backend} on {start.device}; a transformer of {start.elements:,} parameters on "
        f"Python's documentation,\n{settings.steps} steps of {settings.ranks} x {BATCH} x {LENGTH} characters, seed "
        f"{settings.seed}; {NAMES[1]} is in stage 2 from step {record.freeze} on\n\n{table}\n\n{reports}{NOTE}"
    )


def _factors(values: Sequence[float]) -> str:
    """How many times the first is each other."""
    return " and ".join(f"{values[0] / value:.1f}" for value in values[1:])

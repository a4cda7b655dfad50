"""What the demo shows: the progress line, the table, the plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onebit.cli.demo.model import LENGTH
from onebit.cli.demo.train import BATCH, End, Settings, Start, Step
from onebit.report.plots import pyplot

COLORS = "#7f7f7f", "#1f77b4", "#d62728"
NOTE = (
    "\n\nThe ranks of one machine exchange data at the speed of its memory, so that times say little here: what fewer\n"
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
        """The first step of stage 2."""
        return next((s.step for s in self.steps if s.compressing), None)

    def sent(self) -> list[list[int]]:
        """By each optimizer: in all, and from the step on in which the second's stage 2 begins."""
        rows = [s.sent for s in self.steps]
        before = rows[self.freeze - 2] if self.freeze else rows[-1]
        return [[all_of_it, all_of_it - b] for all_of_it, b in zip(rows[-1], before, strict=True)]


def progress_line(record: Record) -> str:
    """Fits into 80 columns."""
    last = record.steps[-1]
    recent = [sum(step.seconds) for step in record.steps[-10:]]
    names = [name.split()[0] for name in record.settings.names]
    losses = ", ".join(
        f"{name} {means[-1]:.3f}" for name, means in zip(names, smoothed(record.steps[-10:], 10), strict=True)
    )
    sent = ", ".join(f"{each / 1e6:.0f}" for each in last.sent)
    stage, steps = 2 if last.compressing else 1, record.settings.steps
    left = (steps - last.step) * statistics.mean(recent)
    return f"{last.step}/{steps} stage {stage}  {losses}  {sent} MB sent  {left:.0f} s left"


def describe(record: Record) -> str:
    assert record.start is not None and record.end is not None
    settings, start, names = record.settings, record.start, record.settings.names
    rows = [("", list(names), ""), ("validation loss", [f"{loss:.3f}" for loss in record.end.losses], "")]
    total, stage2 = zip(*record.sent(), strict=True)
    rows.append(("sent by each rank", [*map(megabytes, total)], _times_less(total)))
    rows.append(("  of it in stage 2", [*map(megabytes, stage2)], _times_less(stage2)))
    seconds = [statistics.median(s) for s in zip(*(s.seconds for s in record.steps if s.compressing), strict=True)]
    note = "" if seconds[0] <= 1.1 * min(seconds[1:]) else f"{_factors(seconds)} times as fast"
    rows.append(("time a step, stage 2", [f"{1e3 * s:.0f} ms" for s in seconds], note))
    table = "\n".join(
        f"  {what:<24}{''.join(f'{cell:>12}' for cell in cells)}   {note}".rstrip() for what, cells, note in rows
    )
    reports = "".join(
        f"\n\n{name}, optimizer.report():\n" + "\n".join(f"  {line}" for line in text.splitlines())
        for name, text in zip(names[1:], record.end.reports, strict=True)
    )
    return (
        f"{settings.ranks} ranks, {start.backend} on {start.device}; a transformer of {start.elements:,} parameters on "
        f"Python's documentation,\n"
        f"{settings.steps} steps of {settings.ranks} x {BATCH} x {LENGTH} characters, seed {settings.seed}; "
        f"{names[1]} is in stage 2 from step {record.freeze} on\n\n{table}{reports}{NOTE}"
    )


def plot(record: Record, path: Path) -> None:
    """Losses above, bytes below, over the steps. Needs matplotlib."""
    assert record.end is not None
    settings, names, where = record.settings, record.settings.names, [s.step for s in record.steps]
    figure, (above, below) = pyplot().subplots(
        2, 1, figsize=(8, 6.5), height_ratios=(3, 2), sharex=True, layout="constrained"
    )
    curves = smoothed(record.steps, max(1, settings.steps // 40))
    sent = list(zip(*(s.sent for s in record.steps), strict=True))
    places = (((-40, 0), "center"), ((-6, 6), "bottom"), ((-90, 6), "bottom"))
    for i, (name, color, (offset, va)) in enumerate(zip(names, COLORS, places, strict=False)):
        above.plot(where, curves[i], color=color, label=f"{name}: {record.end.losses[i]:.3f} on held-out text")
        below.plot(where, [b / 1e6 for b in sent[i]], color=color)
        below.annotate(
            f"{name}: {megabytes(sent[i][-1])}", (where[-1], sent[i][-1] / 1e6), offset, color=color,
            textcoords="offset points", ha="right", va=va,
        )  # fmt: skip
    above.set(ylabel="training loss")
    above.legend(loc="upper right")
    below.set(xlabel="step", ylabel="MB sent by each rank", ylim=(0, None), xlim=(0, settings.steps))
    for axes in (above, below):
        axes.axvline(settings.freeze_step, color="black", linestyle=":", linewidth=1)
        axes.grid(alpha=0.3)
    at = (settings.freeze_step, 0.95)
    below.annotate("freeze", at, (-5, 0), xycoords=below.get_xaxis_transform(), textcoords="offset points",
                   ha="right", va="top")  # fmt: skip
    below.annotate("1 bit", at, (5, 0), xycoords=below.get_xaxis_transform(), textcoords="offset points", va="top")
    stage2 = [sent for _, sent in record.sent()]
    fewer = f"{stage2[0] / stage2[1]:.1f} times less"
    figure.suptitle(f"{settings.ranks} ranks: after the freeze {names[1]} sends {fewer} than {names[0]}")
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def smoothed(steps: Sequence[Step], window: int) -> list[list[float]]:
    """Of each optimizer the losses, each the mean of the last `window`."""
    each = zip(*(s.losses for s in steps), strict=True)
    return [[statistics.fmean(one[max(0, i - window) : i]) for i in range(1, len(one) + 1)] for one in each]


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _times_less(sent: Sequence[int]) -> str:
    return f"{_factors(sent)} times less"


def _factors(values: Sequence[float]) -> str:
    """How many times the first is each other."""
    return " and ".join(f"{values[0] / value:.1f}" for value in values[1:])

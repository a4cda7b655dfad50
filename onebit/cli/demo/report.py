"""What the demo prints: the progress line, the table, and what fewer bytes are worth on the link."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from onebit.cli.demo.model import LENGTH
from onebit.cli.demo.record import Record, smoothed
from onebit.cli.demo.train import BATCH
from onebit.cli.paced_link import rate_title, refusal

BAR = 12  # characters
UNPACED = "No verdict on time: these ranks exchange data at the speed of this machine's memory. Two with --link tell"


def progress_line(record: Record) -> str:
    """Write a line of at most 80 columns."""
    last, steps = record.steps[-1], record.settings.steps
    recent = [sum(step.seconds) for step in record.steps[-10:]]
    names = [name.split()[0] for name in record.settings.names]
    losses = ", ".join(
        f"{name} {means[-1]:.3f}" for name, means in zip(names, smoothed(record.steps[-10:], 10), strict=True)
    )
    left = (steps - last.step) * statistics.mean(recent)
    done = BAR * last.step // steps
    return f"[{'#' * done:.<{BAR}}] {last.step}/{steps}  loss {losses}  {left:.0f} s left"


def describe(record: Record) -> str:
    assert record.start is not None and record.end is not None
    settings, start, names = record.settings, record.start, record.settings.names
    rows = [("validation loss", [f"{loss:.3f}" for loss in record.losses], "")]
    total, stage2 = zip(*record.sent(), strict=True)
    rows.append(("sent by each rank", [*map(megabytes, total)], f"{_factors(total)} times less"))
    rows.append(("  of it in stage 2", [*map(megabytes, stage2)], f"{_factors(stage2)} times less"))
    if record.link_is_kept:
        rows.append(("training", [f"{s:.1f} s" for s in record.seconds], _faster(record.seconds)))
        each = [statistics.median(s) for s in zip(*(s.seconds for s in record.steps if s.compressing), strict=True)]
        rows.append(("a step in stage 2", [f"{1e3 * s:.0f} ms" for s in each], _faster(each)))
    table = "\n".join(
        f"  {what:<20}{''.join(f'{cell:>12}' for cell in cells)}   {note}".rstrip()
        for what, cells, note in [("", list(names), ""), *rows]
    )
    reports = "".join(
        f"\n\n{name}, optimizer.report():\n" + "\n".join(f"  {line}" for line in text.splitlines())
        for name, text in zip(names[1:], record.end.reports, strict=True)
    )
    return (
        f"{settings.ranks} ranks, {start.backend} on {start.device}, {link(record)}.\n"
        f"A transformer of {start.elements:,} parameters on Python's documentation, {settings.steps} steps of "
        f"{settings.ranks} x {BATCH} x {LENGTH} characters,\n"
        f"seed {settings.seed}; {names[1]} is in stage 2 from step {record.freeze} on\n\n{table}{reports}"
    )


def link(record: Record) -> str:
    """Say how the ranks are joined."""
    if record.settings.link is None:
        return "no link between them"
    found = " and ".join(map(rate_title, record.rates))
    return f"a link of {rate_title(record.settings.link)} (measured before and after: {found})"


def verdict(record: Record) -> str:
    """Say what 1 bit is worth here, in one sentence, or why that can't be told."""
    first, last = record.settings.names[0], record.settings.names[-1]
    if record.settings.link is None:
        return UNPACED
    if not record.link_is_kept:
        return f"No verdict on time: {refusal(record.settings.link, record.rates)}, or give --link none"
    found = record.times_as_soon()
    if found is None:
        ends = " and ".join(
            f"{name} at {loss:.3f}" for name, loss in ((first, record.losses[0]), (last, record.losses[-1]))
        )
        return f"{last} does not reach {first}'s last loss in these steps: they end with {ends}"
    return f"{last} reaches {first}'s last loss {found:.1f} times as soon"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _faster(seconds: Sequence[float]) -> str:
    return "" if seconds[0] <= 1.1 * min(seconds[1:]) else f"{_factors(seconds)} times as fast"


def _factors(values: Sequence[float]) -> str:
    """Write how many times the first is each of the others."""
    return " and ".join(f"{values[0] / value:.1f}" for value in values[1:])

"""Plots of the training-step benchmark: throughput against rate, where the time goes, loss against time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf import plots
from perf.lab.rates import link_title, rate_and_rtt, rate_bits
from perf.train_step.measure import Row
from perf.train_step.record import Record
from perf.train_step.report import Curves, Group, by_rate, faster, seconds_after, timed, timed_curves
from perf.train_step.variants import BASELINE, UNCOMPRESSED, VARIANTS

LIKE_OTHERS = ("bf16", "adam-1", "adam-1-bf16", "adam-2-bf16", "lamb-1")  # in bytes: left out of curves over rates
SHOWN_FROM = 0.1  # of the steps: before, losses fall too far to be distinguished


def draw(record: Record, title: str) -> list[Path]:
    """Draw steps, and training; of the networks the slowest and the fastest."""
    networks = by_rate(record.rows)
    shown = [networks[0], *networks[1:][-1:]] if networks else []
    panels = {
        record.path.with_suffix(".png"): [
            *([throughput_panel(record)] if any(rate_bits(rate) for rate, _ in networks) else []),
            *(parts_panel(rate, group) for rate, group in shown),
        ],
        record.path.with_name(f"{record.path.stem}-loss.png"): [
            _losses(record, rate, group) for rate, group in shown if record.runs and timed(group, UNCOMPRESSED)
        ],
    }
    made = {path: own for path, own in panels.items() if own}
    for path, own in made.items():
        plots.save(path, own, title)
    return list(made)


def _losses(record: Record, rate: str | None, group: Group) -> plots.Draw:
    freeze = record.runs[0].freeze
    title = f"Validation loss over time{_at(rate)}"
    return loss_panel(
        title, timed_curves(group, record.runs), lambda name, step: seconds_after(group, name, freeze, step)
    )


def throughput_panel(record: Record) -> plots.Draw:
    curves: dict[str, list[tuple[float, float]]] = {}
    for rate, group in by_rate(record.rows):
        bits = rate_bits(rate)
        for row in group.values():
            if bits and row.seconds and row.variant not in LIKE_OTHERS:
                title = ", ".join(filter(None, (VARIANTS[row.variant].title, rate_and_rtt(rate)[1])))
                curves.setdefault(title, []).append((bits / 1e9, 1 / row.seconds))
    return plots.lines("Throughput", "link, Gbit/s", "steps a second", curves)


def parts_panel(rate: str | None, group: Group) -> plots.Draw:
    rows = {VARIANTS[row.variant].title: row for row in group.values() if row.seconds}
    parts = {title: parts_of(row) for title, row in rows.items()}
    baseline = group.get(BASELINE)
    notes = {title: _note(row, baseline) for title, row in rows.items()}
    return plots.stacked(f"A step{_at(rate)}", f"seconds; x: times as fast as {BASELINE}", parts, notes)


def parts_of(row: Row) -> dict[str, float]:
    return {"forward": row.forward, "backward": row.backward, "step": row.step, "all-reduce": row.all_reduce}


def title_of(variant: str) -> str:
    """The title of a whole run."""
    return VARIANTS[variant].title.replace(", stage 2", "")


def loss_panel(title: str, curves: Curves, seconds: Callable[[str, int], float], scale: str = "linear") -> plots.Draw:
    """Curves of variants, each with its last loss; `seconds` of a variant after so many steps."""

    def panel(axes: Any) -> None:
        styles = plots.Styles()
        for name, curve in curves.items():
            shown = [(seconds(name, step), loss) for step, loss in curve if step >= SHOWN_FROM * curve[-1][0]]
            color, style = styles.of(title_of(name))
            axes.plot(*zip(*shown, strict=True), style, label=f"{title_of(name)}: {curve[-1][1]:.3f}", color=color)
        axes.set(title=title, xlabel="seconds", ylabel="validation loss", xscale=scale)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)

    return panel


def _note(row: Row, baseline: Row | None) -> str:
    ratio = faster(row, baseline) if baseline else None
    return f"{row.seconds:.2f} s" + (f", {ratio:.2f} x" if ratio else "")


def _at(rate: str | None) -> str:
    return f", {link_title(rate)}" if rate else ""

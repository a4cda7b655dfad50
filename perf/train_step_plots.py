"""Plots of the training-step benchmark: throughput against rate, where the time goes, loss against time."""

from __future__ import annotations

from pathlib import Path

from perf import plots
from perf.all_reduce_report import rate_bits
from perf.train_step_ranks import Row
from perf.train_step_report import Group, Record, by_rate, faster, mean_curves, seconds_after, timed
from perf.train_step_variants import BASELINE, VARIANTS

LIKE_OTHERS = ("bf16", "adam-1", "lamb-1")  # send as much as fp16 and fp32: left out of the curves over rates
SHOWN_FROM = 0.1  # of the steps: before, losses fall too far to be told apart


def draw(record: Record, title: str) -> list[Path]:
    """Two files at most: of steps, and of training."""
    networks = by_rate(record.rows)
    of_steps, of_training = record.path.with_suffix(".png"), record.path.with_name(f"{record.path.stem}-loss.png")
    made = []
    if networks:
        shown = [networks[0], *networks[-1:]] if len(networks) > 1 else networks
        throughput = [throughput_panel(record)] if any(rate_bits(rate) for rate, _ in networks) else []
        plots.save(of_steps, [*throughput, *(parts_panel(rate, group) for rate, group in shown)], title)
        made.append(of_steps)
    if record.runs and any(timed(group, "fp32") for _, group in networks):
        plots.save(of_training, [loss_panel(record, rate, group) for rate, group in networks], title)
        made.append(of_training)
    return made


def throughput_panel(record: Record) -> plots.Draw:
    curves: dict[str, list[tuple[float, float]]] = {}
    for rate, group in by_rate(record.rows):
        bits = rate_bits(rate)
        for row in group.values():
            if bits and row.seconds and row.variant not in LIKE_OTHERS:
                curves.setdefault(VARIANTS[row.variant].title, []).append((bits / 1e6, 1 / row.seconds))
    return plots.lines("Throughput", "link, Mbit/s", "steps a second", curves)


def parts_panel(rate: str | None, group: Group) -> plots.Draw:
    rows = {VARIANTS[row.variant].title: row for row in group.values() if row.seconds}
    parts = {title: parts_of(row) for title, row in rows.items()}
    baseline = group.get(BASELINE)
    notes = {title: _note(row, baseline) for title, row in rows.items()}
    return plots.stacked(f"A step{_at(rate)}: seconds, times as fast as {BASELINE}", "seconds", parts, notes)


def parts_of(row: Row) -> dict[str, float]:
    return {"forward": row.forward, "backward": row.backward, "step": row.step, "all-reduce": row.all_reduce}


def _note(row: Row, baseline: Row | None) -> str:
    ratio = faster(row, baseline) if baseline else None
    return f"{row.seconds:.2f} s" + (f", {ratio:.2f} x" if ratio else "")


def _at(rate: str | None) -> str:
    return f", links of {rate}" if rate else ""


def loss_panel(record: Record, rate: str | None, group: Group) -> plots.Draw:
    freeze = record.runs[0].freeze
    curves = {
        VARIANTS[name].title: [
            (seconds_after(group, name, freeze, step), loss)
            for step, loss in curve
            if step >= SHOWN_FROM * curve[-1][0]
        ]
        for name, curve in mean_curves(record.runs).items()
        if timed(group, name)
    }
    return plots.lines(f"Validation loss over time{_at(rate)}", "seconds", "loss", curves)

"""Table and plot of the runs that are there: held-out loss over steps, and over bytes that a rank has sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from onebit.cli.arguments import CommandError
from onebit.report.plots import available
from perf import plots
from perf.convergence.plan import Run, family_of
from perf.convergence.runs import full_step_bytes
from perf.learn.plan import TITLES, Setting, plan
from perf.records import read_record, slug
from perf.tables import markdown

Record = Mapping[str, Any]
SEEDS = range(100)
SHOWN_FROM = 0.1  # of the steps: before, curves fall too far to be distinguished
COLORS = plots.COLORS | {"Adam": plots.GREY, "LAMB": plots.BROWN}
STEP, HELD_OUT, SENT = 0, 2, 3  # of a point of the curve
NO_TIMES = (
    "Ranks are threads that take turns on one device. How long steps took says nothing about ranks on a network, and "
    "is not compared."
)


def record_path(out: Path, run: Run) -> Path:
    return out / f"{slug(run.task, run.variant)}-seed-{run.seed}.json"


def there(out: Path, run: Run, config: Mapping[str, Any]) -> bool:
    """Return whether the run's record is there, made with these settings."""
    try:
        return bool(read_record(record_path(out, run))["config"] == config)
    except (OSError, ValueError, KeyError):
        return False


def found(out: Path, setting: Setting) -> dict[str, list[Record]]:
    """Read the records of each optimizer, of every seed that is there."""
    runs = {run.variant: [replace(run, seed=seed) for seed in SEEDS] for run in plan(setting, 1)}
    paths = {variant: [record_path(out, run) for run in own] for variant, own in runs.items()}
    records = {variant: [read_record(path) for path in own if path.exists()] for variant, own in paths.items()}
    return {variant: own for variant, own in records.items() if own}


def write_report(out: Path, setting: Setting) -> str:
    """Write table and plot to `out`. Returns the table, and where both are."""
    records = found(out, setting)
    if not records:
        raise CommandError(f"there are no runs in {str(out)!r}: leave --report out")
    shared = {(r["config"]["text"], r["config"]["steps"]) for own in records.values() for r in own}
    if len(shared) > 1:
        raise CommandError(
            f"the runs in {str(out)!r} differ in text or steps and can't be compared: choose another --out"
        )
    page = "\n\n".join([about(records), table(records), NO_TIMES]) + "\n"
    (out / "learn.md").write_text(page, encoding="utf-8")
    drawn = draw(out / "learn.png", records) if available() else plots.MISSING
    return f"{page}\n{out / 'learn.md'}\n{drawn}"


def about(records: Mapping[str, Sequence[Record]]) -> str:
    """Say what was trained, on what."""
    every = [record for own in records.values() for record in own]
    record, devices = every[0], sorted({each["device"] for each in every})
    steps, batch, text = record["config"]["steps"], record["config"]["batch"], record["text"]
    return (
        f"{record['elements'] / 1e6:,.1f} million parameters, {record['config']['ranks']} ranks, {steps:,} steps of "
        f"{batch * record['config']['shape']['length']:,} tokens: {steps * batch / record['windows']:.1f} times the "
        f"{text['train'] / 1e6:,.1f} million tokens of the text. Losses are nats a token, of {record['held_out']:,} "
        f"windows from documents that nobody trained on. On {', '.join(devices)}."
    )


def table(records: Mapping[str, Sequence[Record]]) -> str:
    head = ["optimizer", "seeds", "full-precision steps", "held-out loss", "less its baseline's", "GB sent by a rank",
            "times fewer than fp32"]  # fmt: skip
    rows = []
    for variant, own in records.items():
        config, baseline = own[0]["config"], records.get(family_of(variant))
        loss, sent = mean(record["loss"] for record in own), mean(record["curve"][-1][SENT] for record in own)
        off = "-" if baseline is None or baseline is own else f"{loss - mean(b['loss'] for b in baseline):+.3f}"
        full = full_step_bytes(own[0]["elements"], config["ranks"]) * config["steps"]
        steps = f"{own[0]['uncompressed_steps']:,} of {config['steps']:,}"
        rows.append(
            [TITLES[variant], str(len(own)), steps, f"{loss:.3f}", off, f"{sent / 1e9:.3g}", f"{full / sent:.1f}"]
        )
    return markdown(head, rows, numbers=range(1, len(head)))


def draw(path: Path, records: Mapping[str, Sequence[Record]]) -> Path:
    over_steps = panel(records, STEP, 1, "step")
    return plots.save(path, [over_steps, panel(records, SENT, 1e9, "GB sent by a rank")], "Held-out loss")


def panel(records: Mapping[str, Sequence[Record]], of: int, unit: float, label: str) -> plots.Draw:
    """Draw losses over one number of the curve's points, means over seeds."""

    def draw_on(axes: Any) -> None:
        late = []
        for variant, own in records.items():
            curves = zip(*(record["curve"] for record in own), strict=True)
            points = [[mean(values) for values in zip(*at, strict=True)] for at in curves]
            name = TITLES[variant]
            axes.plot([p[of] / unit for p in points], [p[HELD_OUT] for p in points], label=name, color=COLORS[name])
            late += [p[HELD_OUT] for p in points if p[STEP] >= SHOWN_FROM * points[-1][STEP]]
        room = 0.05 * (max(late) - min(late))
        axes.set_ylim(min(late) - room, max(late) + room)
        if of == SENT:
            axes.set_xscale("log")
        axes.set(xlabel=label, ylabel="held-out loss")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)

    return draw_on

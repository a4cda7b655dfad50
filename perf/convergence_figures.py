"""Figures of the convergence study: loss curves with the range over seeds, final losses, sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from perf import plots
from perf.convergence_plan import SWEEPS, SWEPT, TASKS, VARIANTS, family_of
from perf.convergence_records import Records, losses

COLORS = {
    "adam": "#7f7f7f",
    "onebit_adam": "#1f77b4",
    "frozen_adam": "#2ca02c",
    "naive_adam": "#ff7f0e",
    "naive_adam_start": "#d62728",
    "lamb": "#7f7f7f",
    "onebit_lamb": "#1f77b4",
    "lamb_basic": "#ff7f0e",
}
SHOWN_FROM = 0.3  # of the steps: before, curves fall too far to be told apart


def draw(
    out: Path, task: str, runs: Mapping[str, Records], swept: Mapping[str, Mapping[str, Mapping[str, Records]]]
) -> list[Path]:
    families = [f for f in ("adam", "lamb") if any(family_of(v) == f for v in runs)]
    panels = [curves(f"{VARIANTS[f]}: validation loss", {v: r for v, r in runs.items() if family_of(v) == f})
              for f in families]  # fmt: skip
    made = [out / f"{task}.png"]
    plots.save(made[0], [*panels, finals(runs)], TASKS[task].title)
    if swept:
        made.append(out / f"{task}-sweeps.png")
        plots.save(made[1], [sweep(SWEEPS[name], at) for name, at in swept.items()], f"{TASKS[task].title}: final loss")
    return made


def curves(title: str, runs: Mapping[str, Records]) -> plots.Draw:
    """Mean over seeds as a line, their range as a band."""

    def panel(axes: Any) -> None:
        for variant, records in runs.items():
            steps = [step for step, _ in next(iter(records.values()))["valid"]]
            columns = list(zip(*([loss for _, loss in r["valid"]] for r in records.values()), strict=True))
            shown = [i for i, step in enumerate(steps) if step >= SHOWN_FROM * steps[-1]]
            x = [steps[i] for i in shown]
            color = COLORS[variant]
            axes.plot(x, [mean(columns[i]) for i in shown], label=VARIANTS[variant], color=color)
            axes.fill_between(
                x, [min(columns[i]) for i in shown], [max(columns[i]) for i in shown], color=color, alpha=0.2, lw=0
            )
        axes.set(title=title, xlabel="step", ylabel="loss")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)

    return panel


def finals(runs: Mapping[str, Records]) -> plots.Draw:
    """Bars of the mean, a dot a seed; the axis begins below the least."""

    def panel(axes: Any) -> None:
        values = {variant: losses(records) for variant, records in runs.items()}
        every = [x for xs in values.values() for x in xs]
        low = min(every) - 0.3 * (max(every) - min(every)) - 1e-3
        for i, (variant, xs) in enumerate(values.items()):
            axes.barh(i, mean(xs) - low, left=low, color=COLORS[variant], alpha=0.6)
            axes.scatter(xs, [i] * len(xs), color="black", s=10, zorder=3)
        axes.set_xlim(low)
        axes.set_yticks(range(len(values)), [VARIANTS[v].replace("1 bit ", "1 bit\n") for v in values], fontsize=8)
        axes.invert_yaxis()
        axes.set(title="Final validation loss, a dot a seed", xlabel="loss")

    return panel


def sweep(title: str, runs: Mapping[str, Mapping[str, Records]]) -> plots.Draw:
    def panel(axes: Any) -> None:
        labels = list(runs)
        for variant in SWEPT:
            at = [(i, losses(runs[label][variant])) for i, label in enumerate(labels) if variant in runs[label]]
            if not at:
                continue
            x, y = [i for i, _ in at], [mean(xs) for _, xs in at]
            error = [stdev(xs) if len(xs) > 1 else 0.0 for _, xs in at]
            style = "-" if family_of(variant) == "adam" else "--"
            axes.errorbar(x, y, error, marker="o", ls=style, capsize=3, color=COLORS[variant], label=VARIANTS[variant])
        axes.set_xticks(range(len(labels)), labels)
        axes.set(title=title, ylabel="validation loss")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)

    return panel

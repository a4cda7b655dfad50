"""Figures of the convergence study: curves with the range over seeds, distances to the baseline, sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from perf import plots
from perf.convergence.plan import (
    BITS,
    BROAD,
    DEFAULTS,
    FAMILIES,
    FOUR_BITS,
    FREEZE,
    RANKS,
    REPLIES,
    REPLY,
    SWEEPS,
    SWEPT,
    TASKS,
    VARIANTS,
    family_of,
)
from perf.convergence.records import Records, bits_sent, losses
from perf.convergence.records import differences as differences_between

COLORS = {
    "adam": plots.GREY,
    "onebit_adam": plots.BLUE,
    "direct_adam": plots.PURPLE,
    "frozen_adam": plots.GREEN,
    "naive_adam": plots.ORANGE,
    "naive_adam_start": plots.RED,
    "zero_one_adam": plots.BROWN,
    "direct_zero_one_adam": plots.PINK,
    "direct_zero_one_unbiased_adam": plots.TEAL,
    "local_16_adam": plots.OLIVE,
    "lamb": plots.GREY,
    "onebit_lamb": plots.BLUE,
    "direct_lamb": plots.PURPLE,
    "lamb_basic": plots.ORANGE,
    "sgd": plots.GREY,
    "bits_1_sgd": plots.RED,
    "muon": plots.GREY,
    **dict.fromkeys(BITS[8], plots.CYAN),
    **dict.fromkeys(BITS[4], plots.NAVY),
}
LESS = "loss, less the baseline's"
SHOWN_FROM = 0.3  # of the steps: before, curves fall too far to be distinguished


def draw(
    out: Path,
    task: str,
    runs: Mapping[str, Records],
    swept: Mapping[str, Mapping[str, Mapping[str, Records]]],
) -> list[Path]:
    families = [f for f in FAMILIES if any(family_of(v) == f for v in runs)]
    staged = [f for f in families if f in FREEZE]
    title = TASKS[task].title
    of_runs = [
        curves(f"{VARIANTS[f]}: validation loss", {v: r for v, r in runs.items() if family_of(v) == f})
        for f in families
    ]
    found = {"": (title, [*of_runs, differences(runs)])}
    if REPLY in swept:
        found["-reply"] = f"{title}: what comes back of messages", [replies(f, swept[REPLY]) for f in staged]
    if RANKS in swept:
        panels = [over_ranks(f, swept[RANKS]) for f in staged]
        found["-ranks"] = f"{title}: final loss less the baseline's, over ranks", panels
    if narrow := [sweep(SWEEPS[name], at) for name, at in swept.items() if name not in BROAD]:
        found["-sweeps"] = f"{title}: final loss", narrow
    return [plots.save(out / f"{task}{what}.png", panels, over) for what, (over, panels) in found.items()]


def curves(title: str, runs: Mapping[str, Records]) -> plots.Draw:
    """Mean over seeds as a line, their range as a band."""

    def panel(axes: Any) -> None:
        for variant, records in runs.items():
            if variant not in COLORS:  # of a sweep over one option: in the table
                continue
            steps = [step for step, _ in next(iter(records.values()))["valid"]]
            columns = list(zip(*([loss for _, loss in r["valid"]] for r in records.values()), strict=True))
            shown = [i for i, step in enumerate(steps) if step >= SHOWN_FROM * steps[-1]]
            x = [steps[i] for i in shown]
            color = COLORS[variant]
            axes.plot(x, [mean(columns[i]) for i in shown], label=VARIANTS[variant], color=color)
            axes.fill_between(
                x, [min(columns[i]) for i in shown], [max(columns[i]) for i in shown], color=color, alpha=0.2, lw=0
            )
        late = [y for line in axes.get_lines() for x, y in zip(*line.get_data(), strict=True) if 2 * x >= steps[-1]]
        if late:  # a spike in the first half does not set the scale
            room = 0.15 * (max(late) - min(late))
            axes.set_ylim(min(late) - room, max(late) + room)
        _finish(axes, title=title, xlabel="step", ylabel="loss")

    return panel


def differences(runs: Mapping[str, Records]) -> plots.Draw:
    """A dot a seed: how far a run ends from the baseline of that seed; behind, the baseline's spread over seeds."""

    def panel(axes: Any) -> None:
        names = [variant for variant in runs if variant != family_of(variant) and family_of(variant) in runs]
        spreads = [stdev(losses(runs[family_of(v)])) for v in names if len(runs[family_of(v)]) > 1]
        for i, variant in enumerate(names):
            baseline = runs[family_of(variant)]
            pairs = differences_between(runs[variant], baseline)
            axes.scatter(pairs, [i] * len(pairs), color=COLORS.get(variant, plots.GREY), s=25, alpha=0.8, zorder=3)
            if len(baseline) > 1:
                spread = stdev(losses(baseline))
                label = None if i else "baseline's deviation over seeds"
                axes.fill_betweenx((i - 0.4, i + 0.4), -spread, spread, color="#bbbbbb", alpha=0.5, lw=0, label=label)
                axes.legend(fontsize=8, loc="upper right")
        axes.axvline(0, color="black", lw=0.8)
        near = 2 * max([*spreads, 1e-3])  # linear up to there: the naive are far off, else all others were one
        axes.set_xscale("symlog", linthresh=near)
        left, right = axes.get_xlim()
        places = [times * 10.0**k for k in range(-4, 3) for times in (1, 3)]
        marked = [sign * place for place in places if place > near / 2 for sign in (-1, 1)]
        axes.set_xticks([0, *(x for x in marked if left <= x <= 1.3 * right)], minor=False)
        axes.xaxis.set_major_formatter("{x:+g}")
        axes.set_xlim(left, 1.3 * right)
        axes.set_yticks(range(len(names)), [VARIANTS[v] for v in names], fontsize=8)
        axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
        axes.grid(alpha=0.3, axis="x")
        axes.set(title="Final loss less the baseline's, a dot a seed", xlabel="difference, worse to the right")

    return panel


def replies(family: str, runs: Mapping[str, Mapping[str, Records]]) -> plots.Draw:
    """Final loss less the baseline's over the bits sent, means over the seeds of both; a colour a number of ranks."""

    def panel(axes: Any) -> None:
        for label, at in runs.items():
            found = []
            for variant in (name.format(family=family) for name in REPLIES.values()):
                if off := differences_between(at.get(variant, {}), at.get(family, {})):
                    sent = bits_sent(next(iter(at[variant].values())))
                    found.append((sent, mean(off), VARIANTS[variant].partition(", ")[2] or "replies of 1 bit"))
            if not found:
                continue
            x, y, names = zip(*found, strict=True)
            (line,) = axes.plot(x, y, marker="o", ls="", label=f"{label} ranks")
            for place, name in zip(zip(x, y, strict=True), names, strict=True):
                axes.annotate(
                    name, place, textcoords="offset points", xytext=(4, 4), fontsize=7, color=line.get_color()
                )
        axes.axhline(0, color="black", lw=0.8)
        axes.margins(x=0.2)
        _finish(axes, title=VARIANTS[family], xlabel="bits sent for each element and step", ylabel=LESS)

    return panel


def over_ranks(family: str, runs: Mapping[str, Mapping[str, Records]]) -> plots.Draw:
    """A dot a seed and number of ranks; behind, the baseline's deviation over seeds."""

    def panel(axes: Any) -> None:
        baseline, labels = next(iter(runs.values())).get(family, {}), list(runs)
        for names in (*zip(*DEFAULTS.values(), strict=True), (FOUR_BITS,)):  # of one optimizer
            found = [(i, differences_between(runs[label].get(v, {}), baseline))
                     for i, label in enumerate(labels) for v in names if family_of(v) == family]  # fmt: skip
            at = [(i, off) for i, off in found if off]
            if not at:
                continue
            title = VARIANTS[names[0]].partition(",")[0]
            (line,) = axes.plot([i for i, _ in at], [mean(off) for _, off in at], label=title)
            for i, off in at:
                axes.scatter([i] * len(off), off, color=line.get_color(), s=20)
        if len(baseline) > 1:
            spread = stdev(losses(baseline))
            axes.axhspan(-spread, spread, color="#bbbbbb", alpha=0.4, lw=0, label="baseline's deviation over seeds")
        axes.axhline(0, color="black", lw=0.8)
        axes.set_xticks(range(len(labels)), labels)
        _finish(axes, title=VARIANTS[family], xlabel="ranks", ylabel=LESS)

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
        _finish(axes, title=title, ylabel="validation loss")

    return panel


def _finish(axes: Any, **labels: str) -> None:
    axes.set(**labels)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)

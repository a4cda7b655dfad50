"""Figures of the convergence study: curves with the range over seeds, distances to the baseline, rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from perf import plots
from perf.convergence.plan import BITS, FAMILIES, RATES, TASKS, USUAL, VARIANTS, family_of, points
from perf.convergence.records import Records, bytes_sent, losses
from perf.convergence.records import differences as differences_between

COLORS = {  # of what is drawn as a curve
    "adam": plots.GREY,
    "onebit_adam": plots.PURPLE,
    "direct_unbiased_adam": plots.BLUE,
    "direct_zero_one_adam": plots.PINK,
    "direct_zero_one_unbiased_adam": plots.TEAL,
    "direct_zero_one_unbiased_beta_25_adam": plots.BROWN,
    "local_16_unbiased_adam": plots.OLIVE,
    "frozen_adam": plots.GREEN,
    "naive_adam": plots.ORANGE,
    "naive_adam_start": plots.RED,
    "lamb": plots.GREY,
    "onebit_lamb": plots.PURPLE,
    "direct_unbiased_lamb": plots.BLUE,
    "lamb_basic": plots.ORANGE,
    "sgd": plots.GREY,
    "bits_1_sgd": plots.RED,
    "muon": plots.GREY,
    **dict.fromkeys(BITS[8], plots.CYAN),
    **dict.fromkeys(BITS[4], plots.NAVY),
}
SHOWN_FROM = 0.3  # of the steps: before, curves fall too far to be distinguished


def draw(out: Path, task: str, runs: Mapping[str, Records]) -> Path:
    title = TASKS[task].title
    of_family = {f: {v: r for v, r in runs.items() if family_of(v) == f} for f in FAMILIES}
    panels = [curves(f"{VARIANTS[f]}: {TASKS[task].measure}", own) for f, own in of_family.items() if own]
    if all("sent" in record for records in runs.values() for record in records.values()):
        panels.append(over_bytes(runs))
    return plots.save(out / f"{task}.png", [*panels, differences(runs)], title)


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


def over_bytes(runs: Mapping[str, Records]) -> plots.Draw:
    """The first seed's loss over what a rank has sent."""

    def panel(axes: Any) -> None:
        for variant in filter(runs.__contains__, COLORS):
            record = next(iter(runs[variant].values()))
            sent = [bytes_sent(record, *then) / 1e9 for _, *then in record["sent"]]
            axes.plot(sent, [loss for _, loss in record["valid"]], label=VARIANTS[variant], color=COLORS[variant])
        axes.set_xscale("log")
        _finish(axes, title="The same over bytes", xlabel="GB that a rank has sent", ylabel="loss")

    return panel


def draw_rates(out: Path, task: str, swept: Mapping[str, Mapping[str, Records]], runs: Mapping[str, Records]) -> Path:
    tried = [variant for variant in COLORS if any(variant in at for at in swept.values())]
    at_rates = {label: runs if label == USUAL else swept.get(label, {}) for label in points(TASKS[task], RATES)}
    panels = [
        rates(at_rates, own, TASKS[task].lr[family])
        for family in FAMILIES
        if (own := [variant for variant in tried if family_of(variant) == family])
    ]
    return plots.save(out / f"{task}-rates.png", panels, f"{TASKS[task].title}: final loss over the learning rate")


def rates(at_rates: Mapping[str, Mapping[str, Records]], variants: Sequence[str], rate: float) -> plots.Draw:
    """The mean over seeds as a line, their range as a band."""

    def panel(axes: Any) -> None:
        for variant in variants:
            at = [(i, losses(runs[variant])) for i, runs in enumerate(at_rates.values()) if variant in runs]
            x, color = [i for i, _ in at], COLORS[variant]
            axes.plot(x, [mean(each) for _, each in at], label=VARIANTS[variant], color=color, marker="o")
            axes.fill_between(
                x, [min(each) for _, each in at], [max(each) for _, each in at], color=color, alpha=0.2, lw=0
            )
        axes.set_xticks(range(len(at_rates)), list(at_rates))
        _finish(axes, xlabel=f"learning rate, times {rate:g}", ylabel="loss")

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
                axes.fill_betweenx((i - 0.4, i + 0.4), -spread, spread, color="#bbbbbb", alpha=0.5, lw=0)
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
        axes.set(title="Final loss less the baseline's, a dot a seed")
        axes.set_xlabel("difference, worse to the right\ngrey: the baseline's deviation over seeds")

    return panel


def _finish(axes: Any, **labels: str) -> None:
    axes.set(**labels)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)

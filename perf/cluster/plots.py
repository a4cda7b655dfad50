"""The plots of the cluster model: predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf import plots
from perf.cluster.papers import ADAM_TABLE, BAND, LAMB_TABLE, PROFILES, Compared, by_kind

NETWORKS = {"Ethernet": plots.BLUE, "InfiniBand": "#d95f02"}
SIZE = (6.5, 5)  # of a panel


def plot_papers(reduces: Sequence[Compared], speed_ups: Sequence[Compared], path: Path) -> Path:
    panels = [lambda axes: _over_nodes(axes, reduces), lambda axes: _speed_ups(axes, speed_ups)]
    return plots.save(path, panels, "The cluster model against the papers", SIZE)


def _speed_ups(axes: Any, speed_ups: Sequence[Compared]) -> None:
    places = range(len(speed_ups))
    for offset, name, color in ((-0.2, "measured", plots.GREY), (0.2, "predicted", plots.BLUE)):
        where, values = [place + offset for place in places], [getattr(row, name) for row in speed_ups]
        drawn = axes.barh(where, values, 0.38, color=color, label=name)
        axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
    axes.set_yticks(places, [row.what for row in speed_ups])
    axes.invert_yaxis()
    axes.set(title="Speed-ups on Ethernet", xlabel="times as fast", xlim=(0, 7))
    axes.legend(loc="lower right")


def _over_nodes(axes: Any, reduces: Sequence[Compared]) -> None:
    """Measured all-reduces as points, the model as lines with the error that half of the rows may have."""
    band, rows = BAND["papers"], list(zip(PROFILES, reduces, strict=True))
    for network, color in NETWORKS.items():
        line = sorted({(profile.nodes, row.predicted) for profile, row in rows if profile.network == network})
        nodes, predicted = zip(*line, strict=True)
        axes.plot(nodes, predicted, color=color, label=f"{network}, model within {band:.0%}")
        low, high = ([x / (1 + sign * band) for x in predicted] for sign in (1, -1))
        axes.fill_between(nodes, low, high, color=color, alpha=0.1)
        for source, marker in ((ADAM_TABLE, "o"), (LAMB_TABLE, "x")):
            points = [(p.nodes, p.all_reduce) for p, _ in rows if (p.network, p.source) == (network, source)]
            axes.scatter(*zip(*points, strict=True), marker=marker, color=color, label=f"{network}, {source}", zorder=3)
    fitted = [(profile.nodes, profile.all_reduce) for profile, row in rows if row.fitted]
    axes.scatter(*zip(*fitted, strict=True), s=110, facecolors="none", edgecolors="black", label="fitted", zorder=4)
    axes.set_xscale("log", base=2)
    axes.set(title="All-reduce of BERT-Large's gradients", xlabel="nodes", ylabel="milliseconds", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def plot_lab(rows: Sequence[Compared], device: str, path: Path) -> Path:
    groups = by_kind(rows)
    panels = [
        lambda axes: _scatter(axes, groups, BAND["lab"], "All-reduces in the network lab"),
        lambda axes: _errors(axes, groups, BAND["lab"]),
    ]
    return plots.save(path, panels, f"The cluster model against the network lab, {device}", SIZE)


def _errors(axes: Any, groups: Mapping[str, Sequence[Compared]], band: float) -> None:
    for name, each in groups.items():
        errors = [100 * row.error for row in each]
        axes.plot(errors, marker="o", linestyle=":", color=plots.COLORS[name], label=name)
    first = next(iter(groups.values()))
    labels = [", ".join(row.what.partition(": ")[2].split(", ")[:2]) for row in first]
    axes.set_xticks(range(len(first)), labels, rotation=40, ha="right")
    axes.axhspan(-100 * band, 100 * band, color=plots.GREEN, alpha=0.1)
    axes.axhline(0, color="black", linewidth=1)
    axes.set(title="Error", ylabel="predicted / measured - 1, percent")
    axes.grid(alpha=0.3)
    axes.legend()


def _scatter(axes: Any, groups: Mapping[str, Sequence[Compared]], band: float, title: str) -> None:
    """Predicted over measured; the band is the error that half of the rows may have."""
    every = [row for rows in groups.values() for row in rows]
    ends = (
        0.7 * min(min(r.measured, r.predicted) for r in every),
        1.4 * max(max(r.measured, r.predicted) for r in every),
    )
    axes.fill_between(
        ends, [x * (1 - band) for x in ends], [x * (1 + band) for x in ends], color=plots.GREEN, alpha=0.12,
        label=f"within {band:.0%}",
    )  # fmt: skip
    axes.plot(ends, ends, color="black", linewidth=1)
    for name, rows in groups.items():
        x, y = [row.measured for row in rows], [row.predicted for row in rows]
        axes.scatter(x, y, color=plots.COLORS[name], label=name, zorder=3)
    axes.set(
        title=title, xlabel="measured, ms", ylabel="predicted, ms", xscale="log", yscale="log", xlim=ends, ylim=ends
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()

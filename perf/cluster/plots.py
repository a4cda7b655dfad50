"""The plots of the cluster model: predicted beside measured. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.cluster import papers as cluster_papers
from perf.cluster.papers import BAND, Compared, by_kind

NETWORKS = {"Ethernet": "#1f77b4", "InfiniBand": "#d95f02"}
COLORS = {"fp32": "#7f7f7f", "fp16": "#ff7f0e", "1 bit": "#1f77b4"}


def plot_papers(reduces: Sequence[Compared], speed_ups: Sequence[Compared], path: Path) -> None:
    figure, (left, right) = _panels()
    _over_nodes(left, reduces)
    places = range(len(speed_ups))
    for offset, name, color in ((-0.2, "measured", "#7f7f7f"), (0.2, "predicted", "#1f77b4")):
        drawn = right.barh(
            [place + offset for place in places],
            [getattr(row, name) for row in speed_ups],
            0.38,
            color=color,
            label=name,
        )
        right.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
    right.set_yticks(places, [row.what for row in speed_ups])
    right.invert_yaxis()
    right.set(title="Speed-ups on Ethernet", xlabel="times as fast", xlim=(0, 7))
    right.legend(loc="lower right")
    _save(figure, path, "The cluster model against the papers")


def _over_nodes(axes: Any, reduces: Sequence[Compared]) -> None:
    """Measured all-reduces as points, the model as lines with the error that half of the rows may have."""
    band, rows = BAND["papers"], list(zip(cluster_papers.PROFILES, reduces, strict=True))
    for network, color in NETWORKS.items():
        line = sorted({(profile.nodes, row.predicted) for profile, row in rows if profile.network == network})
        nodes, predicted = zip(*line, strict=True)
        axes.plot(nodes, predicted, color=color, label=f"{network}, model within {band:.0%}")
        low, high = ([x / (1 + sign * band) for x in predicted] for sign in (1, -1))
        axes.fill_between(nodes, low, high, color=color, alpha=0.1)
        for source, marker in (("001, Table 1", "o"), ("003, Table 5", "x")):
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


def plot_lab(rows: Sequence[Compared], device: str, path: Path) -> None:
    groups = by_kind(rows)
    figure, (left, right) = _panels()
    _scatter(left, groups, BAND["lab"], "All-reduces in the network lab")
    for name, each in groups.items():
        right.plot([100 * row.error for row in each], marker="o", linestyle=":", color=COLORS[name], label=name)
    first = next(iter(groups.values()))
    labels = [", ".join(row.what.partition(": ")[2].split(", ")[:2]) for row in first]
    right.set_xticks(range(len(first)), labels, rotation=40, ha="right")
    most = 100 * BAND["lab"]
    right.axhspan(-most, most, color="#2ca02c", alpha=0.1)
    right.axhline(0, color="black", linewidth=1)
    right.set(title="Error", ylabel="predicted / measured - 1, percent")
    right.grid(alpha=0.3)
    right.legend()
    _save(figure, path, f"The cluster model against the network lab, {device}")


def _panels() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")


def _scatter(axes: Any, groups: Mapping[str, Sequence[Compared]], band: float, title: str) -> None:
    """Predicted over measured; the band is the error that half of the rows may have."""
    every = [row for rows in groups.values() for row in rows]
    ends = (
        0.7 * min(min(r.measured, r.predicted) for r in every),
        1.4 * max(max(r.measured, r.predicted) for r in every),
    )
    axes.fill_between(
        ends, [x * (1 - band) for x in ends], [x * (1 + band) for x in ends], color="#2ca02c", alpha=0.12,
        label=f"within {band:.0%}",
    )  # fmt: skip
    axes.plot(ends, ends, color="black", linewidth=1)
    for name, rows in groups.items():
        axes.scatter([r.measured for r in rows], [r.predicted for r in rows], color=COLORS[name], label=name, zorder=3)
    axes.set(
        title=title, xlabel="measured, ms", ylabel="predicted, ms", xscale="log", yscale="log", xlim=ends, ylim=ends
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()


def _save(figure: Any, path: Path, title: str) -> None:
    from matplotlib import pyplot

    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

"""The picture of `onebit plan`: what ends a run first over network rates and round trips.

It is there twice: of the methods whose ranks have the same parameters after every step, and with local steps.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from onebit.cli.plan.cluster import Cluster
from onebit.cli.plan.model import Model
from onebit.cli.plan.report import gbit
from onebit.cli.plan.runs import UNCOMPRESSED, First, first, runs
from onebit.report.plots import pyplot

RATES = (10e6, 100e9)  # bit/s
ROUND_TRIPS = (0.05e-3, 100e-3)  # seconds
POINTS = (49, 34)  # of the picture: rates, round trips
TABLE = ([10e6, 100e6, 1e9, 10e9, 100e9], [0.05e-3, 0.5e-3, 5e-3, 30e-3, 100e-3])  # what is printed
KINDS = {False: "ranks in step", True: "with local steps"}
NONE = "don't use\nthis library:\nuncompressed\nis first"
NAMES = {"and local steps": "0/1 Adam with local steps", **dict.fromkeys(UNCOMPRESSED, NONE)}
COLORS = {"fp32": "#bdbdbd", "fp16": "#bdbdbd", "1-bit Adam": "#6baed6", "1-bit LAMB": "#6baed6"}
COLORS |= {"0/1 Adam": "#fc9272", "and local steps": "#a1d99b"}
LEVELS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # of factors, from line to line
LOSS = """Predicted, not measured, for equal numbers of steps. In docs/convergence.md the optimizers end within a
deviation of their originals' loss, or below, in 13 of 14 comparisons. The exception is a GAN, where 0/1 Adam ends at
8.0 and Adam at 7.2. With local steps up to 16 apart a language model ends 0.03 above, so the gain of local steps is a
bound."""


def places(
    model: Model, cluster: Cluster, rates: Sequence[float], round_trips: Sequence[float]
) -> dict[bool, list[list[First]]]:
    """What is first, without local steps and with them: a row for each round trip, a column for each rate."""
    found = [[runs(model, replace(cluster, network=rate, rtt=rtt)) for rate in rates] for rtt in round_trips]
    kinds = [False, True] if any(run.local for run in found[0][0].values()) else [False]
    return {kind: [[first(each, kind) for each in row] for row in found] for kind in kinds}


def table(model: Model, cluster: Cluster) -> str:
    rates, round_trips = TABLE
    lines = [
        f"first to end {model.steps:,} steps, and the best compressed one's speed, times the best uncompressed one's"
    ]
    for kind, rows in places(model, cluster, rates, round_trips).items():
        lines.append(f"{KINDS[kind]:<17}" + "".join(f"{gbit(rate):>19}" for rate in rates))
        for rtt, row in zip(round_trips, rows, strict=True):
            cells = (f"{each.name.removeprefix('and ')} {each.factor:.2f}" for each in row)
            lines.append(f"  {f'{1e3 * rtt:g} ms':<15}" + "".join(f"{cell:>19}" for cell in cells))
    return "\n".join([*lines, textwrap.fill(" ".join(LOSS.split()), 112)])


def spaced(ends: tuple[float, float], points: int) -> list[float]:
    """Equally far apart on a logarithmic axis."""
    return [ends[0] * (ends[1] / ends[0]) ** (k / (points - 1)) for k in range(points)]


def draw_map(model: Model, cluster: Cluster, path: Path) -> None:
    """Draw the regions of what is first, and beside them by how much; a row of panels for each kind. Needs
    matplotlib."""
    rates, round_trips = spaced(RATES, POINTS[0]), spaced(ROUND_TRIPS, POINTS[1])
    found = places(model, cluster, rates, round_trips)
    x, y = [rate / 1e9 for rate in rates], [1e3 * rtt for rtt in round_trips]
    figure, axes = pyplot().subplots(
        len(found), 2, figsize=(12, 0.9 + 4.1 * len(found)), layout="constrained", squeeze=False
    )
    for (kind, rows), (left, right) in zip(found.items(), axes, strict=True):
        _regions(left, x, y, [[each.name for each in row] for row in rows])
        drawn = _factors(right, x, y, [[each.factor for each in row] for row in rows])
        figure.colorbar(drawn, ax=right, format="{x:g} x")
        _finish(left, f"First to end {model.steps:,} steps, {KINDS[kind]}", "round trip, ms")
        _finish(right, f"Times the best uncompressed one's speed, {KINDS[kind]}", "round trip, ms")
        if RATES[0] <= cluster.network <= RATES[1] and ROUND_TRIPS[0] <= cluster.rtt <= ROUND_TRIPS[1]:
            for each in (left, right):
                each.plot(cluster.network / 1e9, 1e3 * cluster.rtt, "k*", markersize=12)
    figure.suptitle(_about(model, cluster))
    figure.supxlabel(textwrap.fill(" ".join(LOSS.split()), 150), fontsize=8)
    figure.savefig(path, dpi=80)
    pyplot().close(figure)


def _about(model: Model, cluster: Cluster) -> str:
    nodes = f"{cluster.nodes} nodes of {cluster.on_node}"
    return f"{model.elements:,} elements, {cluster.gpus} ranks, {nodes}, {cluster.transport}"


def _finish(axes: Any, title: str, ylabel: str) -> None:
    axes.set(title=title, xscale="log", yscale="log", xlabel="Gbit/s a node", ylabel=ylabel)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")


def _regions(axes: Any, x: list[float], y: list[float], found: list[list[str]]) -> None:
    """A colour for each method, with its name in the middle of its region."""
    from matplotlib.colors import ListedColormap

    names = sorted({name for row in found for name in row})
    which = [[names.index(name) for name in row] for row in found]
    colors = ListedColormap([COLORS[name] for name in names])
    axes.pcolormesh(x, y, which, cmap=colors, vmin=-0.5, vmax=len(names) - 0.5, shading="nearest")
    for index, name in enumerate(names):
        cells = [(i, j) for i, row in enumerate(which) for j, cell in enumerate(row) if cell == index]
        i, j = (round(mean(each)) for each in zip(*cells, strict=True))
        axes.text(x[j], y[i], NAMES.get(name, name), ha="center", va="center", fontsize=9)


def _factors(axes: Any, x: list[float], y: list[float], factors: list[list[float]]) -> Any:
    """A colour from line to line of equal factors."""
    from matplotlib.colors import BoundaryNorm

    low, high = min(map(min, factors)), max(map(max, factors))
    levels = [level for level in LEVELS if low / 2 < level < 2 * high]
    colors = BoundaryNorm(levels, 256, extend="both")
    axes.contour(x, y, factors, levels=levels, colors="black", linewidths=0.5)
    return axes.contourf(x, y, factors, levels=levels, norm=colors, cmap="YlGnBu", extend="both", zorder=0)

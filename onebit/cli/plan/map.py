"""Which method ends a run first, over the network's rate and the round trip between nodes: `onebit plan --map`.

    first     the method whose run takes the least time, of as many steps with each
    factor    the best uncompressed method's time over the best compressed one's

A factor below WORTH counts as none: the uncompressed method is first, and this library has nothing to give there.
Twice: of the methods whose ranks have the same parameters after every step, and with local steps besides.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onebit.cli.plan.model import WORTH, Cluster, Model
from onebit.cli.plan.runs import UNCOMPRESSED, Run, runs

RATES = (10e6, 100e9)  # bit/s
ROUND_TRIPS = (0.05e-3, 100e-3)  # seconds
POINTS = (49, 34)  # of the picture: rates, round trips
TABLE = ([10e6, 100e6, 1e9, 10e9, 100e9], [0.05e-3, 0.5e-3, 5e-3, 30e-3, 100e-3])  # what is printed
KINDS = {"in step": "ranks in step", "local steps": "with local steps"}
NONE = "don't use\nthis library:\nuncompressed\nis first"
NAMES = {"and local steps": "0/1 Adam with local steps", **dict.fromkeys(UNCOMPRESSED, NONE)}
SHORT = {"and local steps": "local steps"}
COLORS = {"fp32": "#bdbdbd", "fp16": "#bdbdbd", "1-bit Adam": "#6baed6", "1-bit LAMB": "#6baed6"}
COLORS |= {"0/1 Adam": "#fc9272", "and local steps": "#a1d99b"}
LEVELS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # of factors, from line to line
LOSS = """Predicted, not measured; equal numbers of steps. In docs/convergence.md 1-bit Adam and 1-bit LAMB end within a
deviation of Adam's and LAMB's loss after as many steps, or below, in 7 of 8 comparisons, all but a GAN's; so does 0/1
Adam with direct replies in 4 of 5, all but the GAN's: 8.0 where Adam has 7.2. With local steps up to 16 apart a
language model ends 0.04 above, of one seed: what they gain is a bound."""


@dataclass(frozen=True)
class Place:
    """What is first at a rate and a round trip, and how many times the best uncompressed one's speed the best
    compressed one has."""

    first: str
    factor: float


@dataclass(frozen=True)
class Map:
    """Places by kind: a row for each round trip (seconds), a column for each rate (bit/s)."""

    rates: Sequence[float]
    round_trips: Sequence[float]
    places: Mapping[str, list[list[Place]]]

    @classmethod
    def of(cls, model: Model, cluster: Cluster, rates: Sequence[float], round_trips: Sequence[float]) -> Map:
        found = [[runs(model, replace(cluster, network=rate, rtt=rtt)) for rate in rates] for rtt in round_trips]
        places = {kind: [[first(each, kind) for each in row] for row in found] for kind in kinds(found[0][0])}
        return cls(rates, round_trips, places)

    def as_json(self) -> dict[str, Any]:
        places = {kind: [[asdict(place) for place in row] for row in rows] for kind, rows in self.places.items()}
        return {"rates_bit_per_s": self.rates, "round_trips_s": self.round_trips, "places": places}


def kinds(found: Mapping[str, Run]) -> list[str]:
    """Those that these runs differ in."""
    return [kind for kind in KINDS if kind == "in step" or not all(run.in_step for run in found.values())]


def first(found: Mapping[str, Run], kind: str) -> Place:
    """Of runs by method; ties go to the uncompressed ones."""
    seconds = {name: run.seconds for name, run in found.items() if run.in_step or kind == "local steps"}
    plain = min(UNCOMPRESSED, key=lambda name: seconds[name])
    best = min(seconds.keys() - UNCOMPRESSED.keys(), key=lambda name: (seconds[name], name))
    factor = seconds[plain] / seconds[best]
    return Place(best if factor >= WORTH else plain, factor)


def spaced(ends: tuple[float, float], count: int) -> list[float]:
    """Equally far apart on a logarithmic axis."""
    return [ends[0] * (ends[1] / ends[0]) ** (k / (count - 1)) for k in range(count)]


def table(found: Map, steps: int) -> str:
    """A row for each round trip, a column for each rate."""
    lines = [f"first to end {steps:,} steps, and the best compressed one's speed, times the best uncompressed one's"]
    for kind, rows in found.places.items():
        lines.append(f"{KINDS[kind]:<17}" + "".join(f"{_rate(rate):>19}" for rate in found.rates))
        for rtt, row in zip(found.round_trips, rows, strict=True):
            cells = (f"{SHORT.get(place.first, place.first)} {place.factor:.2f}" for place in row)
            lines.append(f"  {f'{1e3 * rtt:g} ms':<15}" + "".join(f"{cell:>19}" for cell in cells))
    return "\n".join([*lines, textwrap.fill(" ".join(LOSS.split()), 112)])


def _rate(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def draw(model: Model, cluster: Cluster, path: Path) -> None:
    """Beside the regions of what is first, by how much; a row of panels for each kind. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = Map.of(model, cluster, spaced(RATES, POINTS[0]), spaced(ROUND_TRIPS, POINTS[1]))
    count = len(found.places)
    figure, axes = pyplot.subplots(count, 2, figsize=(12, 0.9 + 4.1 * count), layout="constrained", squeeze=False)
    for (kind, places), (left, right) in zip(found.places.items(), axes, strict=True):
        _regions(left, found, places, f"First to end {model.steps:,} steps, {KINDS[kind]}")
        drawn = _factors(right, found, places, f"Times the best uncompressed one's speed, {KINDS[kind]}")
        figure.colorbar(drawn, ax=right, format="{x:g} x")
        for each in (left, right):
            each.set(xscale="log", yscale="log", xlabel="Gbit/s a node", ylabel="round trip, ms")
            for axis in (each.xaxis, each.yaxis):
                axis.set_major_formatter("{x:g}")
            if RATES[0] <= cluster.network <= RATES[1] and ROUND_TRIPS[0] <= cluster.rtt <= ROUND_TRIPS[1]:
                each.plot(cluster.network / 1e9, 1e3 * cluster.rtt, "k*", markersize=12)
    nodes = f"{cluster.nodes} nodes of {cluster.on_node}"
    figure.suptitle(f"{model.elements:,} elements, {cluster.gpus} ranks, {nodes}, {cluster.transport}")
    figure.supxlabel(textwrap.fill(" ".join(LOSS.split()), 150), fontsize=8)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _axes_of(found: Map) -> tuple[list[float], list[float]]:
    return [rate / 1e9 for rate in found.rates], [1e3 * rtt for rtt in found.round_trips]


def _regions(axes: Any, found: Map, places: list[list[Place]], title: str) -> None:
    """A colour for each method, with its name where most of its region is."""
    from matplotlib.colors import ListedColormap

    names = sorted({place.first for row in places for place in row})
    x, y = _axes_of(found)
    which = [[names.index(place.first) for place in row] for row in places]
    colors = ListedColormap([COLORS[name] for name in names])
    axes.pcolormesh(x, y, which, cmap=colors, vmin=-0.5, vmax=len(names) - 0.5, shading="nearest")
    for index, name in enumerate(names):
        row, column = middle(which, index)
        across = ("right", "left", "center")[_side(column, len(x))]
        along = ("top", "bottom", "center")[_side(row, len(y))]
        place = {"right": -1, "left": 0, "center": column}[across], {"top": -1, "bottom": 0, "center": row}[along]
        axes.text(x[place[0]], y[place[1]], NAMES.get(name, name), ha=across, va=along, fontsize=9)
    axes.set(title=title)


def _side(place: int, count: int) -> int:
    """0 near the end of an axis, 1 near its begin, 2 between."""
    return 0 if place > 0.8 * count else 1 if place < 0.2 * count else 2


def middle(which: Sequence[Sequence[int]], index: int) -> tuple[int, int]:
    """Row and column in the middle of the largest square of `index`."""
    sides: list[list[int]] = []
    for i, row in enumerate(which):
        sides.append([])
        for j, cell in enumerate(row):
            near = min(sides[i - 1][j], sides[i - 1][j - 1], sides[i][j - 1]) if i and j else 0
            sides[i].append(near + 1 if cell == index else 0)
    side, i, j = max((side, i, j) for i, row in enumerate(sides) for j, side in enumerate(row))
    return i - side // 2, j - side // 2


def _factors(axes: Any, found: Map, places: list[list[Place]], title: str) -> Any:
    """A colour from line to line of equal factors."""
    from matplotlib.colors import BoundaryNorm

    x, y = _axes_of(found)
    factors = [[place.factor for place in row] for row in places]
    low, high = min(map(min, factors)), max(map(max, factors))
    levels = [level for level in LEVELS if low / 2 < level < 2 * high]
    colors = BoundaryNorm(levels, 256, extend="both")
    drawn = axes.contourf(x, y, factors, levels=levels, norm=colors, cmap="YlGnBu", extend="both")
    axes.contour(x, y, factors, levels=levels, colors="black", linewidths=0.5)
    axes.set(title=title)
    return drawn

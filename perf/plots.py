"""Plots of benchmarks: panels side by side in one PNG, the same look everywhere. Needs matplotlib."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = {"fp32": "#7f7f7f", "fp16": "#ff7f0e", "bf16": "#9467bd", "1 bit": "#1f77b4"}
COLORS |= {"PowerSGD": "#2ca02c", "1-bit Adam": "#1f77b4", "1-bit LAMB": "#17becf"}
PARTS = {"forward": "#aec7e8", "backward": "#1f77b4", "step": "#2ca02c", "all-reduce": "#d62728"}
TARGET = "#d62728"
Draw = Callable[[Any], None]  # draws on a matplotlib Axes


def save(path: Path, panels: Sequence[Draw], title: str = "") -> None:
    """Draw one panel after the other, left to right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (5.5 * len(panels), 4.2)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for draw, on in zip(panels, axes[0], strict=True):
        draw(on)
    figure.suptitle(textwrap.fill(title, 55 * len(panels)))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def lines(
    title: str, xlabel: str, ylabel: str, curves: Mapping[str, Sequence[tuple[float, float]]], logy: bool = True
) -> Draw:
    """A panel of curves over a logarithmic axis; what stands before a comma in a name is its color."""

    def draw(axes: Any) -> None:
        styles: dict[str | None, Iterator[str]] = {}
        for name, points in curves.items():
            color = COLORS.get(name.partition(",")[0])
            style = next(styles.setdefault(color, itertools.cycle(("-", "--", ":", "-."))))
            axes.plot(*zip(*sorted(points), strict=True), style, marker="o", label=name, color=color)
        axes.set_xscale("log")
        if max(x for points in curves.values() for x, _ in points) < 1000:
            plain_ticks(axes.xaxis)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if logy:
            axes.set_yscale("log")
            plain_ticks(axes.yaxis)
        else:
            axes.set_ylim(0)
        axes.grid(alpha=0.3)
        axes.legend()

    return draw


def plain_ticks(axis: Any) -> None:
    """Of a logarithmic axis: 1, 2 and 5 of each decade, written as they are."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def bars(title: str, ylabel: str, values: Mapping[str, float], notes: Mapping[str, str]) -> Draw:
    """A panel of bars on a logarithmic axis, each with a note on top."""

    def draw(axes: Any) -> None:
        drawn = axes.bar(list(values), list(values.values()), color=[COLORS.get(name) for name in values])
        axes.bar_label(drawn, [notes[name] for name in values])
        axes.set_yscale("log")
        axes.margins(y=0.2)
        plain_ticks(axes.yaxis)
        axes.set(title=title, ylabel=ylabel)

    return draw


def marked(draw: Draw, points: Sequence[tuple[float, float]], label: str) -> Draw:
    """The panel with the values to reach."""

    def drawn(axes: Any) -> None:
        if points:
            axes.scatter(*zip(*points, strict=True), marker="_", s=500, color=TARGET, label=label, zorder=3)
        draw(axes)

    return drawn


def stacked(title: str, xlabel: str, parts: Mapping[str, Mapping[str, float]], notes: Mapping[str, str]) -> Draw:
    """A panel of horizontal bars, each made of its named parts, with a note at its end."""

    def draw(axes: Any) -> None:
        ends = dict.fromkeys(parts, 0.0)
        for part in dict.fromkeys(part for own in parts.values() for part in own):
            widths = [own.get(part, 0.0) for own in parts.values()]
            axes.barh(list(parts), widths, left=list(ends.values()), label=part, color=PARTS.get(part))
            ends = {name: end + width for (name, end), width in zip(ends.items(), widths, strict=True)}
        for row, (name, end) in enumerate(ends.items()):
            axes.annotate(notes[name], (end, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.6 * max(ends.values()))  # room for the notes
        axes.set(title=title, xlabel=xlabel)
        axes.legend(fontsize=9, ncol=4, loc="upper center", bbox_to_anchor=(0.4, -0.13), frameon=False)

    return draw

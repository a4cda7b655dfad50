"""Plots of benchmarks: panels side by side in one PNG, the same look everywhere. Drawing needs matplotlib."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onebit.report.plots import available, pyplot

GREY, BLUE, ORANGE, GREEN, RED = "#7f7f7f", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728"
PURPLE, CYAN, BROWN, PINK, OLIVE, TEAL = "#9467bd", "#17becf", "#8c564b", "#e377c2", "#bcbd22", "#00665e"
NAVY = "#1f2a6b"
COLORS = {"fp32": GREY, "fp16": ORANGE, "bf16": PURPLE, "1 bit": BLUE}
COLORS |= {"PowerSGD": GREEN, "1-bit Adam": BLUE, "1-bit LAMB": CYAN, "0/1 Adam": RED, "AdamW": BROWN}
COLORS |= {"DiLoCo-like": ORANGE, "DiLoCo": ORANGE}
PARTS = {"forward": "#aec7e8", "backward": BLUE, "step": GREEN, "all-reduce": RED}
TARGET = RED
MISSING = "No plot: matplotlib is not installed. For one: pip install matplotlib"
Draw = Callable[[Any], None]  # draws on a matplotlib Axes


def draw_if_possible(draw: Callable[[], Sequence[Path]]) -> None:
    """Print the paths of the plots that `draw` makes, or how to get matplotlib."""
    if available():
        print(*draw(), sep="\n")
    else:
        print(MISSING)


def save(path: Path, panels: Sequence[Draw], title: str = "") -> Path:
    """Draw one panel after the other, left to right."""
    width = 5.5 * len(panels)
    figure, axes = pyplot().subplots(1, len(panels), figsize=(width, 4.2), layout="constrained", squeeze=False)
    for draw, on in zip(panels, axes[0], strict=True):
        draw(on)
    if title:
        figure.suptitle(textwrap.fill(title, round(10 * width)))
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
    return path


class Styles:
    """The color of a curve, and a line style that no other curve of that color has yet."""

    def __init__(self) -> None:
        self._left: dict[str | None, Iterator[str]] = {}

    def of(self, name: str) -> tuple[str | None, str]:
        """Choose the color and the line by what stands before a comma in the name."""
        color = COLORS.get(name.partition(",")[0])
        return color, next(self._left.setdefault(color, itertools.cycle(("-", "--", ":", "-."))))


def lines(
    title: str,
    xlabel: str,
    ylabel: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    logy: bool = True,
    goals: Sequence[tuple[float, float]] = (),
    goal: str = "",
) -> Draw:
    """A panel of curves over a logarithmic axis, with values to reach and what they are called."""

    def draw(axes: Any) -> None:
        if goals:
            axes.scatter(*zip(*goals, strict=True), marker="_", s=500, color=TARGET, label=goal, zorder=3)
        styles = Styles()
        for name, points in curves.items():
            color, style = styles.of(name)
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
    """Set a logarithmic axis' ticks: 1, 2 and 5 of each decade, written as they are."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def bars(title: str, ylabel: str, values: Mapping[str, float], notes: Mapping[str, str]) -> Draw:
    """A panel of bars on a logarithmic axis, each with a note on top."""

    def draw(axes: Any) -> None:
        colors = [COLORS.get(name.partition(",")[0]) for name in values]
        drawn = axes.bar(list(values), list(values.values()), color=colors)
        axes.bar_label(drawn, [notes[name] for name in values])
        axes.set_yscale("log")
        axes.margins(y=0.2)
        plain_ticks(axes.yaxis)
        axes.set(title=title, ylabel=ylabel)

    return draw


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

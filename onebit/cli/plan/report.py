"""What `onebit plan` prints: the parts of each step, whole runs, what limits them, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onebit.cli.plan.cluster import Cluster
from onebit.cli.plan.model import (
    WORTH,
    Model,
    Step,
    pays_below,
    sent_compressed,
    sent_uncompressed,
    stage_1,
    stage_2,
    uncompressed,
)
from onebit.cli.plan.runs import UNCOMPRESSED, Run, first, runs

STEP = {
    "forward": ("forward", 1e-3, ",.1f"),
    "backward": ("backward", 1e-3, ",.1f"),
    "communication": ("communication not hidden", 1e-3, ",.1f"),
    "local": ("optimizer's own work", 1e-3, ",.1f"),
    "total": ("total", 1e-3, ",.1f"),
}
RUN = {
    "uncompressed": ("uncompressed steps", 1.0, ",.0f"),
    "compressed": ("steps with 1 bit", 1.0, ",.0f"),
    "local": ("local steps", 1.0, ",.0f"),
    "seconds": ("hours", 3600.0, ",.2f"),
    "sent": ("GB a node sends to others", 1e9, ",.1f"),
}


def describe(model: Model, cluster: Cluster) -> str:
    steps = {
        "fp32": uncompressed(model, cluster, 4),
        "fp16": uncompressed(model, cluster, 2),
        "1-bit stage 1": stage_1(model, cluster),
        "1-bit stage 2": stage_2(model, cluster),
    }
    found = runs(model, cluster)
    head = (
        f"{model.elements:,} elements, {model.itemsize} bytes a gradient; {counted(cluster.gpus, 'GPU')}, "
        f"{counted(cluster.nodes, 'node')} of {cluster.on_node}, {gbit(cluster.network)} a node"
    )
    sent = [sent_uncompressed(model, cluster, itemsize) for itemsize in (4, 2, None)]
    sent.append(sent_compressed(model, cluster, steps["1-bit stage 2"].chunks))
    of_steps = [*_rows("milliseconds a step", steps, STEP), ["  MB a node sends to others", *_cells(sent, 1e6, ",.1f")]]
    speeds = [found["fp16"].seconds / each.seconds for each in found.values()]
    of_runs = [
        *_rows(f"a run of {model.steps:,} steps", found, RUN),
        ["  times fp16's speed", *_cells(speeds, 1, ".2f")],
    ]
    verdict = [*_limits(steps), _pays(model, cluster), *_first(found)]
    return "\n\n".join([head, _table(of_steps), _table(of_runs), "\n".join(verdict)])


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def gbit(rate: float) -> str:
    """Write a rate in Gbit/s with three digits and no power of ten."""
    return f"{float(f'{rate / 1e9:.3g}'):,.15g} Gbit/s"


def _rows(title: str, found: Mapping[str, Any], parts: Mapping[str, tuple[str, float, str]]) -> list[list[str]]:
    rows = [[title, *found]]
    for name, (what, unit, form) in parts.items():
        rows.append([f"  {what}", *_cells([getattr(each, name) for each in found.values()], unit, form)])
    return rows


def _cells(values: Sequence[float], unit: float, form: str) -> list[str]:
    return [f"{value / unit:{form}}" for value in values]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"{name:<28}" + "".join(f"{cell:>16}" for cell in cells) for name, *cells in rows]
    return "\n".join(line.rstrip() for line in lines)


def _limits(steps: Mapping[str, Step]) -> list[str]:
    """What most of a step's time goes to."""
    found = []
    for name in ("fp16", "1-bit stage 2"):
        step = steps[name]
        computing = step.forward + step.backward
        shares = {"forward and backward": computing, "communication": step.communication, "the optimizer": step.local}
        most = max(shares, key=lambda part: shares[part])
        found.append(f"{name}: {100 * shares[most] / step.total:.0f} % of a step is {most}")
    return found


def _pays(model: Model, cluster: Cluster) -> str:
    if cluster.nodes == 1:
        most = f"{cluster.gpus} of at most {counted(cluster.gpus_per_node, 'GPU')}"
        return f"On one node ({most}) no network is used: compression is for more nodes"
    what = f"A step of stage 2 is {100 * (WORTH - 1):.0f} % faster than fp16's, or more,"
    below = pays_below(model, cluster)
    if below == 0 or math.isinf(below):
        return f"{what} at {'any' if below else 'no'} network rate"
    return f"{what} below {gbit(below)} a node; here {gbit(cluster.network)}"


def _first(found: Mapping[str, Run]) -> list[str]:
    best, alone = first(found, local=False), first(found, local=True)
    said = f"{best.name} ends a run {best.factor:.2f} times as fast as the best uncompressed one"
    if best.name in UNCOMPRESSED:
        said = f"stay uncompressed ({best.name}). 1 bit ends a run {best.factor:.2f} times as fast"
    lines = [f"Verdict, predicted: {said}"]
    if alone != best and alone.name not in UNCOMPRESSED:
        lines.append(f"With local steps 0/1 Adam may be {alone.factor:.2f} times as fast, at some cost in loss")
    return lines

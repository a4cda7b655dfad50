"""What `onebit plan` shows: the parts of each step, bytes, speed-ups, constants, and a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from onebit.cli.plan.model import (
    WORTH,
    Cluster,
    Groups,
    Levels,
    Model,
    Step,
    end_to_end,
    pays_below,
    sent_compressed,
    sent_uncompressed,
    stage_1,
    stage_2,
    state_bytes,
    uncompressed,
)
from onebit.cli.plan.options import CLUSTER_OPTIONS, CONSTANTS, OF_CPUS
from onebit.cli.plan.runs import runs
from onebit.collectives.direct import Direct
from onebit.collectives.reply import WAYS, way_for

MOST_GPUS = 4096
RATES = (0.1e9, 800e9)  # bit/s, of the plot
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "communication": "communication not hidden",
    "local": "optimizer's own work",
}
LEVELS: dict[Levels, str] = {2: "two levels", 1: "one level"}
NODE_GROUP = {2: 'node_group="auto", the default', 1: "node_group=None"}  # of the optimizers
COLORS = {"fp32": "#7f7f7f", "fp16": "#ff7f0e", "stage 2": "#1f77b4", "run": "#2ca02c"}


def steps(model: Model, cluster: Cluster) -> dict[str, Step]:
    return {
        "fp32": uncompressed(model, cluster, 4),
        "fp16": uncompressed(model, cluster, 2),
        "stage 1": stage_1(model, cluster),
        "stage 2": stage_2(model, cluster),
    }


def results(model: Model, cluster: Cluster) -> dict[str, Any]:
    """Seconds, bytes and ratios, for JSON."""
    all_steps = steps(model, cluster)
    baseline = uncompressed(model, cluster).total
    below = pays_below(model, cluster)
    two, mean = all_steps["stage 2"], end_to_end(model, cluster)
    sent = {"fp32": sent_uncompressed(model, cluster, 4), "fp16": sent_uncompressed(model, cluster, 2)}
    sent |= {"stage 1": sent_uncompressed(model, cluster), "stage 2": sent_compressed(model, cluster, two.chunks)}
    return {
        "model": asdict(model),
        "cluster": asdict(cluster) | {"nodes": cluster.nodes},
        "steps": {name: asdict(step) | {"total": step.total} for name, step in all_steps.items()},
        "bytes_sent": {name: {"gpu": gpu, "node": node} for name, (gpu, node) in sent.items()},
        "speed_up": {
            "stage 2": {
                "own dtype": baseline / two.total,
                "fp32": all_steps["fp32"].total / two.total,
                "fp16": all_steps["fp16"].total / two.total,
            },
            "end to end": {
                "own dtype": baseline / mean,
                "fp32": all_steps["fp32"].total / mean,
                "fp16": all_steps["fp16"].total / mean,
            },
        },
        "replies": replies(model, cluster),
        "levels": levels(model, cluster),
        "runs": {name: asdict(run) for name, run in runs(model, cluster).items()},
        "pays_below_bit_per_s": None if math.isinf(below) else below,
    }


def replies(model: Model, cluster: Cluster) -> dict[str, dict[str, float]]:
    """Stage 2 with each kind of reply: collectives a chunk, seconds a step, and bytes."""
    found = {}
    for reply, way in WAYS.items():
        other = replace(model, reply=reply)
        step = stage_2(other, cluster)
        gpu, node = sent_compressed(other, cluster, step.chunks)
        rounds = 1 if way is Direct else 2
        found[str(reply)] = {"collectives": rounds, "total": step.total, "gpu": gpu, "node": node}
    return found


def levels(model: Model, cluster: Cluster) -> dict[str, dict[str, float]]:
    """Stage 2 with two levels of ranks and with one: seconds a step, bytes, times fp16's speed, and bytes of state an
    element. Empty where there is one node, or nodes have one GPU."""
    found: dict[str, dict[str, float]] = {}
    if not cluster.has_two_levels:
        return found
    fp16 = uncompressed(model, cluster, 2).total
    for number in LEVELS:
        other = replace(model, levels=number)
        step = stage_2(other, cluster)
        gpu, node = sent_compressed(other, cluster, step.chunks)
        found[str(number)] = {
            "total": step.total,
            "gpu": gpu,
            "node": node,
            "fp16": fp16 / step.total,
            "state": state_bytes(other, cluster),
        }
    return found


def describe(model: Model, cluster: Cluster) -> str:
    found = results(model, cluster)
    names = list(found["steps"])
    head = {"fp32": "fp32", "fp16": "fp16", "stage 1": "1-bit stage 1", "stage 2": "1-bit stage 2"}
    rows = [("milliseconds a step", *(head[name] for name in names))]
    for part, what in {**PARTS, "total": "total"}.items():
        rows.append((f"  {what}", *(f"{1e3 * found['steps'][name][part]:,.1f}" for name in names)))
    rows.append(("MB a step", *("" for _ in names)))
    for who, what in (("gpu", "sent by a GPU"), ("node", "sent by a node to others")):
        rows.append((f"  {what}", *(f"{found['bytes_sent'][name][who] / 1e6:,.1f}" for name in names)))
    two_levels = cluster.has_two_levels
    asked = str(way_for(model.reply, Groups.of(cluster, model.levels).replicas.gpus).way)
    what = LEVELS[model.levels] if two_levels else "stage 2"
    tables = [_table(rows), _compared(f"{what} by --reply", found["replies"], asked)]
    if two_levels:
        tables.insert(1, _compared("stage 2 by --levels", found["levels"], str(model.levels)))
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.on_node}"
    tables.append(_runs(model, found["runs"]))
    said = [_speed_ups(model, found["speed_up"]), _pays(found["pays_below_bit_per_s"], cluster)]
    if two_levels:
        said.append(_advice(found["levels"]))
    return "\n\n".join(
        [
            f"{model.elements:,} elements, {model.itemsize} bytes a gradient; {_gpus(cluster.gpus)}, {nodes}, "
            f"{_gbit(cluster.network)} a node",
            *tables,
            "\n".join(said),
            f"Predicted, not measured. Constants of the model, each replaceable:\n{_constants(cluster)}",
        ]
    )


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"{first:<28}" + "".join(f"{cell:>16}" for cell in cells) for first, *cells in rows]
    return "\n".join(line.rstrip() for line in lines)


def _compared(title: str, choices: Mapping[str, Mapping[str, float]], asked: str) -> str:
    """What the choices of an option come to, side by side."""
    rows = [(title, *(f"{name}{' (this)' * (name == asked)}" for name in choices))]
    for key, what, unit, form in (
        ("collectives", "collectives a chunk", 1.0, ",.0f"),
        ("total", "milliseconds a step", 1e-3, ",.1f"),
        ("gpu", "MB a GPU sends", 1e6, ",.1f"),
        ("node", "MB a node sends to others", 1e6, ",.1f"),
        ("fp16", "times fp16's speed", 1.0, ",.2f"),
        ("state", "bytes of state an element", 1.0, ",.2f"),
    ):
        if all(key in each for each in choices.values()):
            rows.append((f"  {what}", *(f"{each[key] / unit:{form}}" for each in choices.values())))
    return _table(rows)


def _runs(model: Model, found: Mapping[str, Mapping[str, float]]) -> str:
    """Whole runs, side by side."""
    rows = [(f"a run of {model.steps:,} steps", *found)]
    for key, what, unit, form in (
        ("uncompressed", "uncompressed steps", 1.0, ",.0f"),
        ("compressed", "steps with 1 bit", 1.0, ",.0f"),
        ("local", "local steps", 1.0, ",.0f"),
        ("seconds", "hours", 3600.0, ",.2f"),
        ("sent", "GB a node sends to others", 1e9, ",.1f"),
    ):
        rows.append((f"  {what}", *(f"{each[key] / unit:{form}}" for each in found.values())))
    fp16 = found["fp16"]["seconds"]
    rows.append(("  times fp16's speed", *(f"{fp16 / each['seconds']:.2f}" for each in found.values())))
    return _table(rows)


def _advice(found: Mapping[str, Mapping[str, float]]) -> str:
    """Which layout to take."""
    best: Levels = 2 if found["2"]["total"] <= found["1"]["total"] else 1
    other: Levels = 1 if best == 2 else 2
    ratio = found[str(other)]["total"] / found[str(best)]["total"]
    return f"Take {LEVELS[best]} ({NODE_GROUP[best]}): {ratio:.2f} times as fast as {LEVELS[other]}"


def _speed_ups(model: Model, found: dict[str, dict[str, float]]) -> str:
    lines = [
        f"{what:<44}{ratios['fp16']:5.2f} x fp16's, {ratios['fp32']:5.2f} x fp32's speed"
        for what, ratios in (
            ("Stage 2", found["stage 2"]),
            (f"A run with {100 * model.warmup:.4g} % of its steps in stage 1", found["end to end"]),
        )
    ]
    return "\n".join(lines)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def _pays(below: float | None, cluster: Cluster) -> str:
    if cluster.nodes == 1:
        gpus = f"{cluster.gpus} of at most {_gpus(cluster.gpus_per_node)}"
        return f"On one node ({gpus}) no network is used: compression is for more nodes"
    what = f"A step of stage 2 is {100 * (WORTH - 1):.0f} % faster than fp16's, or more,"
    if below is None:
        return f"{what} at any network rate"
    if below == 0:
        return f"{what} at no network rate"
    return f"{what} below {_gbit(below)} a node; here {_gbit(cluster.network)}"


def _gbit(rate: float) -> str:
    """Three digits, and no power of ten."""
    return f"{float(f'{rate / 1e9:.3g}'):,.15g} Gbit/s"


def _constants(cluster: Cluster) -> str:
    lines = []
    for name, constant in CONSTANTS.items():
        value, option = getattr(cluster, name), f"--{name.replace('_', '-')}"
        of_cpus, where = OF_CPUS.get(name, (None, ""))
        source = constant.metadata["source"] if value == constant.default else "as given"
        source = where if cluster.transport == "gloo" and value == of_cpus else source
        lines.append(f"  {option:<17}{CLUSTER_OPTIONS[name].show(value):>12}  {source}")
    if cluster.rates:
        lines.append(f"  --rates           measured: {', '.join(sorted(cluster.rates))}")
    return "\n".join(lines)


def gpu_counts(cluster: Cluster) -> list[int]:
    """One GPU a node's worth and on, doubling, to thousands."""
    g = cluster.gpus_per_node
    counts = [g * 2**k for k in range(20) if g * 2**k <= max(MOST_GPUS, cluster.gpus)]
    return sorted({*counts, cluster.gpus})


def rates(here: float) -> list[float]:
    """Those of the plot: as planned and beyond."""
    low, high = min(RATES[0], here / 10), max(RATES[1], 10 * here)
    return [low * (high / low) ** (k / 60) for k in range(61)]


def plot(model: Model, cluster: Cluster, path: Path) -> None:
    """Step time over GPUs, speed-up over GPUs, speed-up over the network's rate. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time, scale, network) = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    counts = gpu_counts(cluster)
    grown = [replace(cluster, gpus=n) for n in counts]
    _times(time, model, counts, grown)
    _ratios(scale, model, counts, grown, here=cluster.gpus, title="Speed-up, more GPUs", xlabel="GPUs")
    speeds = rates(cluster.network)
    gbit = [x / 1e9 for x in speeds]
    others = [replace(cluster, network=x) for x in speeds]
    _ratios(
        network,
        model,
        gbit,
        others,
        here=cluster.network / 1e9,
        title=f"Speed-up, {_gpus(cluster.gpus)}",
        xlabel="Gbit/s a node",
    )
    figure.suptitle(
        f"Predicted: {model.elements:,} elements, {_gpus(cluster.gpus_per_node)} a node, "
        f"{_gbit(cluster.network)} a node"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _times(axes: Any, model: Model, counts: list[int], clusters: list[Cluster]) -> None:
    every = [steps(model, each) for each in clusters]
    names = {"fp32": "fp32 all-reduce", "fp16": "fp16 all-reduce", "stage 2": "1 bit, stage 2"}
    for name, label in names.items():
        axes.plot(counts, [1e3 * each[name].total for each in every], marker=".", color=COLORS[name], label=label)
    for name, other in _other_levels(model, clusters).items():
        totals = [1e3 * stage_2(other, each).total for each in clusters]
        axes.plot(counts, totals, linestyle="--", color=COLORS["stage 2"], label=f"1 bit, stage 2, {name}")
    compute = 1e3 * (every[0]["fp16"].forward + every[0]["fp16"].backward)
    axes.axhline(compute, color="black", linestyle=":", linewidth=1, label="forward and backward alone")
    axes.set(title="Time of a step", ylabel="milliseconds")
    _finish(axes, "GPUs", base=2)
    axes.set_ylim(0, 1.3 * 1e3 * max(each["fp32"].total for each in every))
    axes.legend(loc="upper left", ncols=2, fontsize=9)


def _ratios(
    axes: Any, model: Model, where: list[Any], clusters: list[Cluster], here: float, title: str, xlabel: str
) -> None:
    """How many times as fast, over what differs between the clusters."""
    curves: dict[str, tuple[str, Callable[[Cluster], float]]] = {
        "stage 2": ("stage 2", lambda c: uncompressed(model, c, 2).total / stage_2(model, c).total),
        "run": (
            f"run, {100 * model.warmup:.4g} % in stage 1",
            lambda c: uncompressed(model, c, 2).total / end_to_end(model, c),
        ),
    }
    for name, other in _other_levels(model, clusters).items():
        ratios = [uncompressed(model, c, 2).total / stage_2(other, c).total for c in clusters]
        axes.plot(where, ratios, linestyle="--", color=COLORS["stage 2"], label=f"stage 2, {name}")
    for name, (label, ratio) in curves.items():
        marker = "." if len(where) < 30 else None
        axes.plot(where, [ratio(c) for c in clusters], marker=marker, color=COLORS[name], label=label)
    axes.axhline(1, color="black", linewidth=1)
    axes.axvline(here, color="black", linestyle=":", linewidth=1, label="as planned")
    axes.set(title=title, ylabel="times as fast as with an fp16 all-reduce")
    _finish(axes, xlabel, base=2 if xlabel == "GPUs" else 10)


def _other_levels(model: Model, clusters: Sequence[Cluster]) -> dict[str, Model]:
    """The model with the levels that it does not have, by their name, where a cluster has a choice."""
    if not any(each.has_two_levels for each in clusters):
        return {}
    return {name: replace(model, levels=number) for number, name in LEVELS.items() if number != model.levels}


def _finish(axes: Any, xlabel: str, base: int) -> None:
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=xlabel, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()

"""The page on the cluster model and its plots: predicted beside measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onebit.plan_options import CLUSTER_OPTIONS, CLUSTERS, CONSTANTS
from perf import cluster_papers
from perf.cluster_papers import Compared, median_error

Labs = Mapping[Path, tuple[dict[str, Any], Sequence[Compared]]]
BAND = {"papers": 0.25, "lab": 0.20}  # a median error at most
NETWORKS = {"Ethernet": "#1f77b4", "InfiniBand": "#d95f02"}
COLORS = {"fp32": "#7f7f7f", "fp16": "#ff7f0e", "1 bit": "#1f77b4"}

HEAD = """# The cluster model

Written by `python -m perf.cluster_model`; with `--lab` it measures in the network lab first. The model is that of
`onebit plan`; its equations stand in [onebit/cluster_model.py](../onebit/cluster_model.py). An error is predicted /
measured - 1; a median is of the errors' sizes.

## Constants

| option of `onebit plan` | default | source |
| --- | ---: | --- |
{defaults}

The clusters of the papers (`--cluster`), V100s with 900 GB/s of memory by the data sheet; latencies are assumed:

| constant | ethernet-v100 | infiniband-v100 | source |
| --- | ---: | ---: | --- |
{clusters}

Three numbers are fitted, each to one row of paper 001's Table 1. The other rows of Table 1 and all rows of paper 003
are predictions.

"""

PAPERS = """## The papers' all-reduces

BERT-Large's 340 million gradients in fp16, 680 MB. Median error {median:.1%} over the {count} rows that nothing was
fitted to; {table_5:.1%} over paper 003's alone; {once:.1%} where rows of one paper with the same nodes count once.
{target}

| measured in | predicted, ms | measured, ms | error | |
| --- | ---: | ---: | ---: | --- |
{rows}

The papers call InfiniBand's effective bandwidth "close to theoretical peak", 100 Gbit/s. Their all-reduces do not reach
it: with it the errors of all rows but the fitted ones have a median of {cable:.1%}, those of InfiniBand's rows over
several nodes one of {cable_alone:.1%}. The fitted 30.9 Gbit/s stand for the whole way from GPU to GPU.

One ring over all GPUs, which passes through each node once, is the other common all-reduce: its median error with the
same constants is {ring:.1%}. It fits Ethernet's two nodes better and InfiniBand's two nodes worse. The model keeps the
all-reduce that sends the fewest bytes: it is the harder one to beat.

## The papers' speed-ups on Ethernet

Median error {speed_ups:.1%}, of stage 2's four {stage_2:.1%}. Forward, backward and step times are those of the tables,
all communication is predicted. The papers' texts name no number of GPUs for their highest speed-ups.

| | predicted | measured | error | |
| --- | ---: | ---: | ---: | --- |
{speed_up_rows}

The papers do not give the time of a step's own work in stage 2; here it is that of stage 1. A run's speed-up is
1 / (warmup + (1 - warmup) / stage 2's).

![predicted and measured]({plot})

"""

LAB = """## The network lab: {device}, {cores} cores

Median error {median:.1%}, at most {band:.0%} to be reached: {verdict}. Rows of [{name}]({path}), measured {measured},
load before {load}, {repeats} calls a row. Nothing is fitted to these rows: the rate is 95.6 % of the link's, the
latency of {latency:.0f} us is that of all-reduces of 1024 elements, the rates of the passes are those of one process.

| measured in | predicted, ms | measured, ms | error |
| --- | ---: | ---: | ---: |
{rows}

![predicted and measured]({plot})

"""


def page(reduces: Sequence[Compared], speed_ups: Sequence[Compared], labs: Labs, where: Path, out: Path) -> str:
    """`out` is the folder of the plots."""
    cable = cluster_papers.all_reduces(cluster_papers.as_by_the_cable)
    between = [row for row in cable if "InfiniBand" in row.what and "1 x 8" not in row.what]
    median = median_error(reduces)
    text = HEAD.format(defaults=_defaults(), clusters=_clusters()) + PAPERS.format(
        median=median,
        count=sum(not row.fitted for row in reduces),
        table_5=median_error([row for row in reduces if row.what.startswith("003")]),
        once=median_error(cluster_papers.counted_once(reduces)),
        target=f"At most {BAND['papers']:.0%} was to be reached: {_verdict(median, BAND['papers'])}.",
        rows="\n".join(_row(row, "{:,.0f}") + f" {_note(row)} |" for row in reduces),
        cable=median_error(cable),
        cable_alone=median_error(between),
        ring=median_error(cluster_papers.all_reduces(cluster_papers.flat_ring)),
        speed_ups=median_error(speed_ups),
        stage_2=median_error([row for row in speed_ups if row.what.endswith("stage 2")]),
        speed_up_rows="\n".join(_row(row, "{:.2f} x") + f" {row.note} |" for row in speed_ups),
        plot=_link(out / "cluster_model-papers.png", where),
    )
    for path, (record, rows) in labs.items():
        median = median_error(rows)
        text += LAB.format(
            device=record["device"],
            cores=record["cpu_count"],
            median=median,
            band=BAND["lab"],
            verdict=_verdict(median, BAND["lab"]),
            name=path.name,
            path=_link(path, where),
            measured=record["measured"],
            load=record["load_before"],
            repeats=record["repeats"],
            latency=1e6 * record["latency_s"],
            rows="\n".join(_row(row, "{:,.1f}") for row in rows),
            plot=_link(path.with_suffix(".png"), where),
        )
    return text.rstrip() + "\n"


def _defaults() -> str:
    return "\n".join(
        f"| `--{name.replace('_', '-')}` | {CLUSTER_OPTIONS[name].show(each.default)} | {each.metadata['source']} |"
        for name, each in CONSTANTS.items()
    )


def _clusters() -> str:
    rows = {
        "gpus_per_node": "paper 001, section 3.1",
        "network": "Ethernet: paper 001, section 3.1, by iperf. InfiniBand: fitted, 8 nodes, batch 1024",
        "intra": "fitted, one node each",
        "latency": "assumed",
    }
    lines = []
    for name, source in rows.items():
        values = (f"{CLUSTERS[each][name]} {CLUSTER_OPTIONS[name].unit}" for each in CLUSTERS)
        cells = " | ".join(value.replace("gbit Gbit/s", " Gbit/s").strip() for value in values)
        lines.append(f"| `--{name.replace('_', '-')}` | {cells} | {source} |")
    return "\n".join(lines)


def _row(row: Compared, form: str) -> str:
    return f"| {row.what} | {form.format(row.predicted)} | {form.format(row.measured)} | {row.error:+.0%} |"


def _note(row: Compared) -> str:
    return "fitted" if row.fitted else row.note


def _verdict(error: float, most: float) -> str:
    return "met" if error <= most else "missed"


def _link(path: Path, page_at: Path) -> str:
    return Path(os.path.relpath(path, page_at.parent)).as_posix()


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
    groups: dict[str, list[Compared]] = {}
    for row in rows:
        groups.setdefault(row.what.partition(":")[0], []).append(row)
    figure, (left, right) = _panels()
    _scatter(left, groups, BAND["lab"], "All-reduces in the network lab")
    for name, each in groups.items():
        right.plot([100 * row.error for row in each], marker="o", color=COLORS[name], label=name)
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

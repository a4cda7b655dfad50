"""The page on the cluster model and its plots: predicted beside measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onebit.cli.plan.options import CLUSTER_OPTIONS, CLUSTERS, CONSTANTS
from perf.cluster import papers as cluster_papers
from perf.cluster.papers import BAND, Compared, by_kind, median_error

Labs = Mapping[Path, tuple[dict[str, Any], Sequence[Compared]]]
PLANNED = "onebit plan --model bert-large --cluster ethernet-v100 --gpus 64 --plot plan.png"

HEAD = """# The cluster model

Written by `python -m perf.cluster`; with `--lab` it measures in the network lab first. The model is that of
`onebit plan`; its equations stand in [onebit/cli/plan/model.py](../onebit/cli/plan/model.py). An error is predicted /
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

MORE = """## Thousands of ranks

`{command}`

A node's GPUs share its network, and each sends its own messages: with G of them a node sends (G + 1)/2 times what its
1-bit messages would need if they were averaged within the node first. And each rank sends N - 1 messages one after the
other, which shows at thousands of ranks. Nobody has measured there: this is the model alone.

![step time and speed-up]({plot})

"""

NO_LAB = """## The network lab

Not measured yet: `python -m perf.cluster --lab`, as root on Linux, on a machine with nothing else to do.
"""

LAB = """## The network lab: {device}, {cores} cores

Median errors: {medians}. At most {band:.0%} each was to be reached: {verdict}. From [{name}]({path}), measured
{measured}, load before {load}; the least of {repeats} calls a row. Nothing is fitted to these rows: the rate is 95.6 %
of the link's, the latency, {latency:.0f} us, that of all-reduces of 1024 elements, the rates of the passes those of one
process alone, in the same run. The model is told the number of chunks.

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
    text += MORE.format(command=PLANNED, plot=_link(out / "cluster_model-plan.png", where))
    for path, (record, rows) in labs.items():
        medians = {kind: median_error(each) for kind, each in by_kind(rows).items()}
        text += LAB.format(
            device=record["device"],
            cores=record["cpu_count"],
            medians=", ".join(f"{kind} {median:.1%}" for kind, median in medians.items()),
            band=BAND["lab"],
            verdict=_verdict(max(medians.values()), BAND["lab"]),
            name=path.name,
            path=_link(path, where),
            measured=record["measured"],
            load=record["load_before"],
            repeats=record["repeats"],
            latency=1e6 * record["latency_s"],
            rows="\n".join(_row(row, "{:,.1f}") for row in rows),
            plot=_link(path.with_suffix(".png"), where),
        )
    return (text if labs else text + NO_LAB).rstrip() + "\n"


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
        cells = " | ".join(value.replace("gbit", " Gbit/s").strip() for value in values)
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

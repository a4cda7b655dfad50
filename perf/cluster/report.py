"""The page on the cluster model and its plots: predicted beside measured."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onebit.cli.plan.options import CLUSTER_OPTIONS, CLUSTERS, CONSTANTS
from perf.cluster import delays
from perf.cluster.papers import (
    BAND,
    LAMB_TABLE,
    Compared,
    all_reduces,
    as_by_the_cable,
    by_kind,
    counted_once,
    flat_ring,
    median_error,
)
from perf.tables import markdown

Labs = Mapping[Path, tuple[dict[str, Any], Sequence[Compared]]]
Links = Mapping[str, Sequence[Compared]]
PLANNED = "onebit plan --model bert-large --cluster ethernet-v100 --gpus 64 --plot plan.png"

HEAD = """# The cluster model

{conclusion}

Written by `python -m perf.cluster`; with `--lab` it measures in the network lab first. The model is that of
`onebit plan`; its equations stand in [onebit/cli/plan/model.py](../onebit/cli/plan/model.py). An error is predicted /
measured - 1; a median is of the errors' sizes.

## Constants

{defaults}

The clusters of the papers (`--cluster`), V100s with 900 GB/s of memory by the data sheet; latencies are assumed:

{clusters}

Three numbers are fitted, each to one row of Table 1 in 1-bit Adam (Tang et al. 2021). The other rows of Table 1 and all
rows of Table 5 in 1-bit LAMB (Li et al. 2021) are predictions.

"""

PAPERS = """## The papers' all-reduces

BERT-Large's 340 million gradients in fp16, 680 MB. Median error {median:.1%} over the {count} rows that nothing was
fitted to; {table_5:.1%} over 1-bit LAMB's alone; {once:.1%} where rows of one paper with the same nodes count once.
{target}

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

{speed_up_rows}

The papers do not give the time of a step's own work in stage 2; here it is that of stage 1. A run's speed-up is
1 / (warmup + (1 - warmup) / stage 2's).

![predicted and measured]({plot})

"""

DELAYS = """## Links with a delay, and without

All-reduces of the network lab, 4 hosts of one rank over Gloo: those on links with a round trip of 50 ms, and those of
the same transport without one. Median errors: {medians}; of 1 bit alone {one_bit}. At most {band:.0%} each was to be
reached, of all kinds: {verdict}. Nothing is fitted to these rows; the records are {records}.

Passes and the latency of a message are those of [{lab}]({lab_path}), of the same kind of machine earlier: to compress
25,000,000 elements takes 75 ms by it, where the record without a delay has 21 to 28 in its phases. That is what large
tensors of 1 bit on fast links are off by.

{rows}

How a round trip enters the model is in [onebit/cli/plan/delay.py](../onebit/cli/plan/delay.py). The lab's shapers let
72 kB pass at once after a pause, which the model does not know: that may be most of the error of small tensors.

"""

MORE = """## Thousands of ranks

`{command}`

Stage 2 with two levels of ranks, and with one (dashed); the papers' speed-ups above are of one level. With one level
each of a node's GPUs sends its own messages: with G of them a node sends (G + 1)/2 times what it sends with two levels,
where it averages gradients first. And each rank sends N - 1 messages one after the other, which shows at thousands of
ranks; with two levels it sends one to each of the other nodes. Nobody has measured there: this is the model alone.

![step time and speed-up]({plot})

"""

NO_LAB = """## The network lab

Not measured yet: `python -m perf.cluster --lab`, as root on Linux, on a machine with nothing else to do.
"""

LAB = """## The network lab: {device}, {cores} cores

Median errors: {medians}. At most {band:.0%} each was to be reached: {verdict}. From [{name}]({path}), measured
{measured}, load before {load}; the least of {repeats} calls a row. Nothing is fitted to these rows: the rate is 95.6 %
of the link's, the latency, {latency:.0f} us, that of all-reduces of 1024 elements, the rates of the passes those of one
process alone, in the same run. The number of chunks is the one that the ranks chose.

{rows}

![predicted and measured]({plot})

"""

LAB_NODES = """## Hosts of several ranks in the network lab: {device}, {cores} cores

Median errors: {medians}. At most {band:.0%} each was to be reached: {verdict}. From [{name}]({path}), measured
{measured}, load before {load}; the least of {repeats} calls a row, hosts x ranks of each. Nothing is fitted to these
rows: within a host a message's latency is that of the mean over it of 1024 elements, the bandwidth that of the mean of
a quarter of the elements, at the same rate of the links. All else as with one rank a host. All ranks share the cores,
so that the mean over a host is here what computing makes it.

{rows}

![predicted and measured]({plot})

"""


def page(
    reduces: Sequence[Compared], speed_ups: Sequence[Compared], labs: Labs, where: Path, out: Path, links: Links
) -> str:
    """`out` is the folder of the plots."""
    text = HEAD.format(
        conclusion=conclusion(reduces, speed_ups, labs), defaults=_defaults(), clusters=_clusters()
    ) + _papers(reduces, speed_ups, _link(out / "cluster_model-papers.png", where))
    text += MORE.format(command=PLANNED, plot=_link(out / "cluster_model-plan.png", where))
    for path, (record, rows) in labs.items():
        text += _lab(path, record, rows, where)
    text += _delays(links, out, where) if links else ""
    return (text if labs else text + NO_LAB).rstrip() + "\n"


def conclusion(reduces: Sequence[Compared], speed_ups: Sequence[Compared], labs: Labs) -> str:
    """What the errors of all comparisons come to, in three lines."""
    errors = {
        "the papers' all-reduces": (median_error(reduces), BAND["papers"]),
        "their speed-ups on Ethernet": (median_error(speed_ups), BAND["papers"]),
    }
    for record, rows in labs.values():
        worst = max(median_error(each) for each in by_kind(rows).values())
        between = "all-reduces between hosts of several ranks" if "shapes" in record else "all-reduces"
        errors[f"{between} in the network lab on {record['device']}"] = (worst, BAND["lab"])
    medians = [f"{error:.1%} for {what} (target: {most:.0%})" for what, (error, most) in errors.items()]
    met = all(error <= most for error, most in errors.values())
    compared = [*reduces, *speed_ups, *(row for _, rows in labs.values() for row in rows)]
    worst_row = max((row for row in compared if not row.fitted), key=lambda row: abs(row.error))
    text = (
        f"The model of `onebit plan` has median errors of {_listed(medians)}: {'all met' if met else 'not all met'}. "
        f"Its largest error is {worst_row.error:+.0%}, for {worst_row.what}."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def _papers(reduces: Sequence[Compared], speed_ups: Sequence[Compared], plot: str) -> str:
    cable = all_reduces(as_by_the_cable)
    between = [row for row in cable if "InfiniBand" in row.what and "1 x 8" not in row.what]
    median = median_error(reduces)
    return PAPERS.format(
        median=median,
        count=sum(not row.fitted for row in reduces),
        table_5=median_error([row for row in reduces if row.what.startswith(LAMB_TABLE)]),
        once=median_error(counted_once(reduces)),
        target=f"At most {BAND['papers']:.0%} was to be reached: {_verdict(median, BAND['papers'])}.",
        rows=_table(["measured in", "predicted, ms", "measured, ms"], reduces, "{:,.0f}", notes=True),
        cable=median_error(cable),
        cable_alone=median_error(between),
        ring=median_error(all_reduces(flat_ring)),
        speed_ups=median_error(speed_ups),
        stage_2=median_error([row for row in speed_ups if row.what.endswith("stage 2")]),
        speed_up_rows=_table(["", "predicted", "measured"], speed_ups, "{:.2f} x", notes=True),
        plot=plot,
    )


def _lab(path: Path, record: Mapping[str, Any], rows: Sequence[Compared], where: Path) -> str:
    medians = {kind: median_error(each) for kind, each in by_kind(rows).items()}
    text, about = (LAB_NODES, {}) if "shapes" in record else (LAB, {"latency": 1e6 * record["latency_s"]})
    return text.format(
        **about,
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
        rows=_table(["measured in", "predicted, ms", "measured, ms"], rows, "{:,.1f}"),
        plot=_link(path.with_suffix(".png"), where),
    )


def _delays(links: Links, out: Path, where: Path) -> str:
    medians = {what: median_error(rows) for what, rows in links.items()}
    records, lab = delays.records(out), delays.lab_of(out)
    return DELAYS.format(
        medians=", ".join(f"{what} {median:.1%}" for what, median in medians.items()),
        one_bit=" and ".join(f"{median_error(by_kind(rows)['1 bit']):.1%} {what}" for what, rows in links.items()),
        band=BAND["lab"],
        verdict=_verdict(max(medians.values()), BAND["lab"]),
        records=" and ".join(f"[{path.name}]({_link(path, where)})" for path in records),
        lab=lab.name,
        lab_path=_link(lab, where),
        rows=_table(
            ["measured in", "predicted, ms", "measured, ms"],
            [row for rows in links.values() for row in rows],
            "{:,.1f}",
        ),
    )


def _defaults() -> str:
    rows = [
        [f"`--{name.replace('_', '-')}`", CLUSTER_OPTIONS[name].show(each.default), each.metadata["source"]]
        for name, each in CONSTANTS.items()
    ]
    return markdown(["option of `onebit plan`", "default", "source"], rows, numbers=(1,))


def _clusters() -> str:
    sources = {
        "gpus_per_node": "1-bit Adam, section 3.1",
        "network": "Ethernet: 1-bit Adam, section 3.1, by iperf. InfiniBand: fitted, 8 nodes, batch 1024",
        "intra": "fitted, one node each",
        "latency": "assumed",
    }
    rows = []
    for name, source in sources.items():
        values = (f"{CLUSTERS[each][name]} {CLUSTER_OPTIONS[name].unit}" for each in CLUSTERS)
        cells = (value.replace("gbit", " Gbit/s").strip() for value in values)
        rows.append([f"`--{name.replace('_', '-')}`", *cells, source])
    return markdown(["constant", *CLUSTERS, "source"], rows, numbers=(1, 2))


def _table(head: Sequence[str], rows: Sequence[Compared], form: str, notes: bool = False) -> str:
    """Predicted beside measured, the error and, with `notes`, a remark."""
    lines = []
    for row in rows:
        figures = [form.format(row.predicted), form.format(row.measured), f"{row.error:+.0%}"]
        lines.append([row.what, *figures, *([_note(row)] if notes else [])])
    return markdown([*head, "error", *([""] if notes else [])], lines, numbers=(1, 2, 3))


def _note(row: Compared) -> str:
    return "fitted" if row.fitted else row.note


def _verdict(error: float, most: float) -> str:
    return "met" if error <= most else "missed"


def _link(path: Path, page_at: Path) -> str:
    return Path(os.path.relpath(path, page_at.parent)).as_posix()

"""The cluster model against hosts of several ranks in the lab: 1 bit with one level and with two.

    python -m perf.cluster --nodes [--shapes 2x2 2x4 3x2] [--rates 50mbit 200mbit]      root on Linux, 16 minutes

What the model is told of a host is measured at other sizes than those that it predicts: its ranks' latency by the mean
over a node of 1024 elements, their bandwidth by that of a quarter of the elements. All else as in the lab of one rank a
host.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from onebit.cli.plan.model import Cluster, compressed_all_reduce
from onebit.cli.progress import Progress
from onebit.kernels.tuning.machine import provenance
from perf.all_reduce.benchmark import parse_arguments as all_reduce_arguments
from perf.all_reduce.benchmark import run_lab
from perf.all_reduce.measure import ONE_BIT, TWO_LEVELS, Row
from perf.cluster.calibration import PASSES, SMALL, latency, pass_rates
from perf.cluster.papers import Compared
from perf.lab.rates import PAYLOAD, parse_rate
from perf.records import load_average, machine

STANDARD: dict[str, Any] = {"shapes": ["2x2", "2x4", "3x2"], "rates": ["50mbit", "200mbit"]}
QUARTER = 4  # the elements of a row that is predicted, over those of the row that a host's bandwidth is taken from


def shape(text: str) -> str:
    """HOSTSxRANKS, as an argument."""
    hosts, _, each = text.partition("x")
    if not (hosts.isdigit() and each.isdigit() and int(hosts) > 1 and int(each) > 1):
        raise argparse.ArgumentTypeError(f"{text!r}: a shape is hosts x ranks of each, two or more, such as 2x4")
    return text


def measure(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A record: rows of perf.all_reduce and, of each shape, the passes' rates and the latency."""
    load = load_average()
    defaults = all_reduce_arguments(["--lab", "--chunks=auto", "--timeout=900", "--phases"])
    shapes: dict[str, dict[str, Any]] = {}
    group: dict[str, Any] = {}
    for each_shape in arguments.shapes:
        hosts, each = map(int, each_shape.split("x"))
        progress.show(f"passes of one of {hosts * each} ranks")
        elements = [SMALL, arguments.elements // QUARTER, arguments.elements]
        wanted = {**vars(defaults), **vars(arguments), "hosts": [hosts], "each": each, "elements": elements}
        before = pass_rates(hosts * each, arguments.elements)
        rows, group = run_lab(argparse.Namespace(**wanted), progress)
        after = pass_rates(hosts * each, arguments.elements)
        shapes[each_shape] = {
            "pass_bytes_per_s": {name: max(before[name], after[name]) for name in PASSES},
            "latency_s": latency(rows),
            "rows": [asdict(row) for row in rows if row.kind in (ONE_BIT, TWO_LEVELS)],
        }
    return {
        **group,
        "cpu_count": machine()["cpu_count"],
        "load_before": load,
        "repeats": arguments.repeats,
        **provenance(),
        "shapes": shapes,
    }


def compare(record: dict[str, Any]) -> list[Compared]:
    """Milliseconds of the largest rows."""
    found = []
    for of in record["shapes"].values():
        rows = [row for row in (Row.of(each) for each in of["rows"]) if row.calls]
        largest = max(row.elements for row in rows)
        for row in (row for row in rows if row.elements == largest):
            cluster = _cluster(row, rows, of, record["cpu_count"])
            if row.kind == TWO_LEVELS:
                seconds = compressed_all_reduce(largest, cluster, chunks=row.chunks, levels=2)
            else:
                seconds = compressed_all_reduce(largest, cluster, chunks=row.chunks, reply=1)
            what = f"{row.kind}: {row.hosts} x {row.each}, {row.rate}, {row.elements:,} elements"
            found.append(Compared(what, 1e3 * seconds, 1e3 * min(row.calls)))
    return found


def _cluster(row: Row, rows: Sequence[Row], of: dict[str, Any], cores: int) -> Cluster:
    hop, rate = _within(row, rows)
    return Cluster(
        gpus=row.hosts * row.each,
        gpus_per_node=row.each,
        network=PAYLOAD * float(parse_rate(row.rate) or 0),
        latency=of["latency_s"],
        intra=rate,
        intra_latency=hop,
        rates=of["pass_bytes_per_s"],
        cores=min(1.0, cores / (row.hosts * row.each)),
        transport="gloo",
    )


def _within(row: Row, rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds of a message inside a host, and B/s of its ranks: of rows with as fast links and fewer elements."""

    def node_mean(elements: int) -> tuple[float, int]:
        own = next(r for r in rows if (r.rate, r.kind, r.elements) == (row.rate, TWO_LEVELS, elements))
        assert own.phases is not None
        return own.phases["node mean"], own.chunks or 1

    others, quarter = row.each - 1, row.elements // QUARTER
    small, _ = node_mean(SMALL)
    seconds, chunks = node_mean(quarter)
    hop = small / others
    return hop, others / row.each * 4 * quarter / max(seconds - chunks * others * hop, 0.1 * seconds)

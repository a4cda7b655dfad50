"""The cluster model against all-reduces of the lab on links with a delay, and on links without one.

Of records of `python -m perf.all_reduce --lab --rates ...` with one rank a host, on the kind of machine whose passes
and latency a record of `python -m perf.cluster --lab` has. Only those count whose messages went as today's do, in pairs
and with their flags: they were measured in one chunk up to MOST_ELEMENTS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onebit.cli.plan.model import Cluster, compressed_all_reduce
from onebit.collectives.flags import MOST_ELEMENTS
from perf.all_reduce.measure import KINDS, ONE_BIT, Row
from perf.cluster.papers import Compared
from perf.lab.rates import PAYLOAD, rate_bits, rtt_seconds
from perf.records import read_record

ALL_REDUCES = "all_reduce-amd-epyc-rates-*.json"
LAB = "cluster_model-lab-amd-epyc.json"
WITH, WITHOUT = "with a delay", "without a delay"


def records(out: Path) -> list[Path]:
    return sorted(out.glob(ALL_REDUCES)) if lab_of(out).exists() else []


def lab_of(out: Path) -> Path:
    """Where passes and latency are from."""
    return out / LAB


def compared(out: Path) -> dict[str, list[Compared]]:
    """Milliseconds of every row of fp32, fp16 and 1 bit."""
    found: dict[str, list[Compared]] = {}
    for path in records(out):
        record, lab = read_record(path), read_record(lab_of(out))
        for row in (Row.of(each) for each in record["rows"]):
            if row.calls and row.kind in (ONE_BIT, "fp32", "fp16"):
                small = row.chunks in (None, 1) or row.elements > MOST_ELEMENTS
                assert row.each == 1 and small, "measured with another transport"
                one = compared_row(row, record["cpu_count"], lab)
                found.setdefault(WITH if rtt_seconds(row.rate) else WITHOUT, []).append(one)
    return found


def compared_row(row: Row, cpu_count: int, lab: dict[str, Any]) -> Compared:
    """Gloo, one rank a host. lab: where passes and latency are from."""
    cluster = Cluster(
        gpus=row.hosts,
        gpus_per_node=1,
        network=PAYLOAD * float(rate_bits(row.rate) or 0),
        latency=lab["latency_s"],
        rates=lab["pass_bytes_per_s"][str(row.hosts)],
        cores=min(1.0, cpu_count / row.hosts),
        rtt=rtt_seconds(row.rate) or 0.0,
        transport="gloo",
    )
    if row.kind == ONE_BIT:
        seconds = compressed_all_reduce(row.elements, cluster, chunks=row.chunks, reply=1)
    else:
        seconds = cluster.all_reduce(row.elements * KINDS[row.kind].itemsize)
    what = f"{row.kind}: {row.hosts} hosts, {row.rate}, {row.elements:,} elements"
    return Compared(what, 1e3 * seconds, 1e3 * min(row.calls))

"""All-reduces measured in the network lab, and what the model predicts of them. Nothing is fitted to these rows.

Over Gloo. The network's rate is that of the links times PAYLOAD. The latency is that of all-reduces of 1024 elements,
the passes are those of one process alone, of the same run, and a rank has the machine's cores divided by the ranks, at
most one. The number of chunks is what the ranks chose. Times are the least of several calls.

Inside a host of several ranks a message's latency is that of the mean over the host of 1024 elements, the bandwidth
that of the mean of a quarter of the elements. Of LINKS passes and latency are those of OTHER, of such a machine too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onebit.cli.paced_link import PAYLOAD
from onebit.cli.plan.cluster import Cluster, Groups, Levels
from onebit.cli.plan.exchange import agreement, exchange, pass_seconds
from onebit.collectives.reply import AskedReply, exchange_for
from perf.all_reduce.measure import KINDS, ONE_BIT, TWO_LEVELS, Row
from perf.cluster.papers import Compared
from perf.lab.rates import rate_bits, rtt_seconds
from perf.records import read_record

CALIBRATED, LINKS = "cluster_model-*.json", "all_reduce-amd-epyc-rates-*.json"
OTHER = "cluster_model-lab-amd-epyc.json"  # where passes and latency of the latter are from
SOURCES = {
    "amd": "AMD EPYC, a rank a host: 1 bit",
    "intel": "Intel(R) Xeon(R) Processor, a rank a host: 1 bit",
    "levels": "Intel(R) Xeon(R) Processor, several ranks a host: 1 bit, two levels",
    "far": "AMD EPYC, links of 50 ms: 1 bit",
    "near": "AMD EPYC, links of 0 ms: 1 bit",
}
SMALL = 1024  # elements of an all-reduce that is nothing but latency
QUARTER = 4  # the elements of a row that is predicted, over those of the row that a host's bandwidth is taken from


def compared(out: Path) -> list[Compared]:
    """Milliseconds of the largest rows of calibrated records, and of every row of the others."""
    found = []
    for path in sorted(out.glob(CALIBRATED)):
        record = read_record(path)
        for own in record.get("shapes", {"": record}).values():
            rows = _rows(own)
            largest = max(row.elements for row in rows)
            found += [_compare(row, record, own, rows) for row in rows if row.elements == largest]
    for path in sorted(out.glob(LINKS)) if (out / OTHER).exists() else []:
        record = read_record(path)
        found += [_compare(row, record, read_record(out / OTHER)) for row in _rows(record)]
    return found


def _rows(record: dict[str, Any]) -> list[Row]:
    kinds = (ONE_BIT, TWO_LEVELS, "fp32", "fp16")
    return [row for row in map(Row.of, record["rows"]) if row.calls and row.kind in kinds]


def _compare(row: Row, record: dict[str, Any], passes: dict[str, Any], rows: Sequence[Row] = ()) -> Compared:
    """passes: where their rates and the latency are from. rows: of the same hosts; none where those are of others."""
    ranks, rates, delay = row.hosts * row.each, passes["pass_bytes_per_s"], rtt_seconds(row.rate) or 0.0
    cores = min(1.0, record["cpu_count"] / ranks)
    cluster = Cluster(
        gpus=ranks,
        gpus_per_node=row.each,
        network=PAYLOAD * float(rate_bits(row.rate) or 0),
        latency=passes["latency_s"],
        rates={name: cores * rate for name, rate in rates.get(str(row.hosts), rates).items()},
        rtt=delay,
        transport="gloo",
        **(_within(row, rows) if row.each > 1 else {}),
    )
    if row.kind in (ONE_BIT, TWO_LEVELS):
        assert row.chunks is not None
        levels: Levels = 2 if row.kind == TWO_LEVELS else 1
        reply: AskedReply = "auto" if row.kind == TWO_LEVELS else 1
        seconds = compressed_all_reduce(row.elements, cluster, row.chunks, reply, levels)
    else:
        seconds = cluster.all_reduce(row.elements * KINDS[row.kind].itemsize)
    where = "several ranks a host" if row.each > 1 else "a rank a host" if rows else f"links of {1e3 * delay:g} ms"
    kind = row.kind if row.kind in (ONE_BIT, TWO_LEVELS) else "uncompressed"
    what = f"{row.kind}, {row.hosts} x {row.each}, {row.rate}, {row.elements:,} elements"
    return Compared(f"{record['device']}, {where}: {kind}", what, 1e3 * seconds, 1e3 * min(row.calls))


def _within(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    """Seconds of a message inside a host, and B/s of its ranks: of rows with as fast links and fewer elements."""
    means = {r.elements: r for r in rows if (r.rate, r.kind) == (row.rate, TWO_LEVELS)}
    small, large, others = means[SMALL], means[row.elements // QUARTER], row.each - 1
    assert small.phases is not None and large.phases is not None
    hop, seconds = small.phases["node mean"] / others, large.phases["node mean"]
    rest = max(seconds - (large.chunks or 1) * others * hop, 0.1 * seconds)
    return {"intra_latency": hop, "intra": others / row.each * 4 * large.elements / rest}


def compressed_all_reduce(elements: int, cluster: Cluster, chunks: int, reply: AskedReply, levels: Levels) -> float:
    """Seconds of a call of CompressedAllReduce, in fp32."""
    groups = Groups.of(cluster, levels)
    mean = groups.node.all_to_all(elements * 4 / chunks) if groups.slices > 1 else 0.0
    exchange_class = exchange_for(reply, groups.replicas.gpus)
    sent, _ = exchange(elements, groups, 4, chunks, exchange_class, use="decode", mean=mean)
    scan = pass_seconds("scan", elements / groups.slices, cluster, 4)
    return scan + sent + agreement(elements, cluster, chunks)

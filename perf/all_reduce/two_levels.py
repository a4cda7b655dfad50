"""What the all-reduce benchmark makes of hosts with several ranks: one level, two levels and fp32, side by side.

Bytes are those of a host's link. Two figures stand for fp32: Gloo's all-reduce over all ranks, as it was measured, and
the least that any fp32 all-reduce between M hosts sends over a link, were the ranks of a host one: 2 (M - 1) / M times
4 bytes an element, computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf import plots
from perf.all_reduce.measure import KINDS, ONE_BIT, TWO_LEVELS, Row, by_kind
from perf.lab.rates import rate_bits
from perf.tables import cell
from perf.targets import Target

STANDARD: dict[str, Any] = {
    "hosts": [2],
    "rates": ["20mbit", "100mbit", "1gbit"],
    "elements": [2**21, 2**22],
    "chunks": "auto",
}
ONE_LEVEL_TARGET, TARGET_EACH = 3.8, 4  # times fewer bytes than one level, with so many ranks a host
FP32_TARGET = 28.0  # times fewer bytes than the least of fp32
TARGET_ELEMENTS = 2**21  # and more: in less, barriers and headers count
LEAST = "fp32, least"
TITLES = {ONE_BIT: "1 bit, one level"}  # of kinds, where two levels stand beside them


def least_fp32(row: Row) -> float:
    """Bytes over a host's link of an fp32 all-reduce between the hosts."""
    return 2 * (row.hosts - 1) / row.hosts * 4 * row.elements


def fewer(group: dict[str, Row], kind: str) -> float | None:
    """How many times fewer bytes than `kind` two levels send over a host's link."""
    ours, theirs = group[TWO_LEVELS].bytes, group[kind].bytes
    return theirs / ours if ours and theirs else None


def fewer_than_least(group: dict[str, Row]) -> float | None:
    own = group[TWO_LEVELS]
    return least_fp32(own) / own.bytes if own.bytes else None


def table(rows: Sequence[Row]) -> str:
    kinds = (*KINDS, ONE_BIT, TWO_LEVELS)
    titles = " ".join(f"{title:>8}" for title in (*KINDS, "one", "two"))
    lines = [
        f"{'':37} | {'milliseconds':^44} | {'MB a call over a link':^27} | two: times fewer than",
        f"{'hosts':>6} {'link':>12} {'elements':>10} {'chunks':>6} | {titles} | {'fp32':>6} {'least':>6} {'one':>6} "
        f"{'two':>6} | {'one':>6} {'least':>7} {'fp32':>8}",
    ]
    for group in by_kind(rows):
        own = group[TWO_LEVELS]
        times = " ".join(cell(group[kind].seconds, "8.1f", 1e3) for kind in kinds)
        sent = " ".join(
            cell(nbytes, "6.2f", 1e-6)
            for nbytes in (group["fp32"].bytes, least_fp32(own), group[ONE_BIT].bytes, own.bytes)
        )
        ratios = f"{cell(fewer(group, ONE_BIT), '6.2f')} {cell(fewer_than_least(group), '7.1f')}"
        hosts, chunks = f"{own.hosts} x {own.each}", f"{group[ONE_BIT].chunks}, {own.chunks}"
        where = f"{hosts:>6} {own.rate or '-':>12} {own.elements:>10,} {chunks:>6}"
        lines.append(f"{where} | {times} | {sent} | {ratios} {cell(fewer(group, 'fp32'), '8.1f')}")
    lines += [
        "hosts: hosts x ranks of each. one, two: levels; chunks are of both.",
        "fp32, fp16, bf16: the backend's all-reduce over all ranks, as measured.",
        "least: an fp32 all-reduce between M hosts, were each one rank: 8 (M - 1) / M bytes an element, computed.",
    ]
    lines += [f"{row.kind} was not measured: {row.error}" for row in {r.error: r for r in rows if r.error}.values()]
    return "\n".join(lines)


def targets(rows: Sequence[Row]) -> list[Target]:
    """Those that these rows are a measurement of."""
    large = [group for group in by_kind(rows) if group[TWO_LEVELS].elements >= TARGET_ELEMENTS]
    found = []
    for group in large:
        own, ratio = group[TWO_LEVELS], fewer(group, ONE_BIT)
        if ratio and own.each == TARGET_EACH:
            where = f"({own.hosts} hosts of {own.each} ranks, {own.rate}, {own.elements:,} elements)"
            found.append(Target(f"fewer bytes over a link than one level {where}", ratio, ONE_LEVEL_TARGET))
    ratios = [ratio for group in large if (ratio := fewer_than_least(group))]
    if ratios:
        where = f"the least of {len(ratios)} networks and sizes, {TARGET_ELEMENTS:,} elements or more"
        found.append(Target(f"fewer bytes than an fp32 all-reduce between hosts ({where})", min(ratios), FP32_TARGET))
    return found


def plot(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Time against the links' rate, a panel a size; bytes over a host's link of the largest."""
    last = by_kind(rows)[-1][TWO_LEVELS]
    groups = [group for group in by_kind(rows) if group[TWO_LEVELS].hosts == last.hosts]
    where = f"{last.hosts} hosts of {last.each} ranks"
    panels = []
    for elements in sorted({group[TWO_LEVELS].elements for group in groups}):
        times: dict[str, list[tuple[float, float]]] = {}
        for group in groups:
            for kind in ("fp32", "fp16", ONE_BIT, TWO_LEVELS):
                row = group[kind]
                if row.elements == elements and row.seconds and (bits := rate_bits(row.rate)):
                    times.setdefault(TITLES.get(kind, kind), []).append((bits / 1e9, 1e3 * row.seconds))
        if times:
            panels.append(plots.lines(f"{where}, {elements:,} elements", "link, Gbit/s", "milliseconds", times))
    biggest = max(reversed(groups), key=lambda group: group[TWO_LEVELS].elements)
    own = biggest[TWO_LEVELS].bytes
    sent = {TITLES.get(kind, kind): nbytes for kind in ("fp32", ONE_BIT, TWO_LEVELS) if (nbytes := biggest[kind].bytes)}
    if own:
        shown = {"fp32": sent.pop("fp32", 0.0), LEAST: least_fp32(biggest[TWO_LEVELS]), **sent}
        values = {name.replace(", ", ",\n"): 1e-6 * nbytes for name, nbytes in shown.items() if nbytes}
        notes = {name: f"{mb:.3g} MB\n{1e6 * mb / own:.1f} x" for name, mb in values.items()}
        what = f"{biggest[TWO_LEVELS].elements:,} elements, {biggest[TWO_LEVELS].rate}"
        panels.append(plots.bars(f"Bytes over a host's link, {what}", "MB a call", values, notes))
    return plots.save(path, panels, title)

"""What the all-reduce benchmark makes of its rows: tables, targets, a record and plots."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onebit.kernels.tuning.machine import provenance
from perf import plots
from perf.all_reduce import delays, two_levels
from perf.all_reduce.measure import DIRECT, KINDS, ONE_BIT, TWO_LEVELS, Row, by_kind
from perf.lab.rates import rate_and_rtt, rate_bits, rtt_seconds
from perf.records import machine, slug, write_record
from perf.tables import cell
from perf.targets import Target, as_json

STANDARD = {
    "hosts": [4],
    "rates": ["100mbit", "300mbit", "1gbit", "3gbit", "10gbit"],
    "elements": [2**16, 2**18, 2**20, 2**22, 25_000_000],
    "chunks": "auto",
}
# Times fp32's speed: 4 hosts, 25 M elements, 2 cores.
SPEED_TARGETS = {"100mbit": 25.0, "1gbit": 11.0, "3gbit": 4.5, "10gbit": 2.0}
SPEED_TARGET_HOSTS, SPEED_TARGET_ELEMENTS = 4, 25_000_000
SMALL_TARGETS = {("1gbit", 2**18): 1.0, ("1gbit", 2**20): 1.0}  # times fp16's speed: latency counts as much as bytes
BYTES_TARGETS = {"fp32": 28.0, "fp16": 14.0}  # times fewer bytes
BYTES_TARGET_ELEMENTS = 2**21  # and more: in less, barriers and headers count


def faster(group: dict[str, Row], kind: str) -> float | None:
    """How many times as fast as `kind` the compressed all-reduce is."""
    ours, theirs = group[ONE_BIT].seconds, group[kind].seconds
    return theirs / ours if ours and theirs else None


def smaller(group: dict[str, Row], kind: str) -> float | None:
    """How many times fewer bytes than `kind` it sends."""
    ours, theirs = group[ONE_BIT].bytes, group[kind].bytes
    return theirs / ours if ours and theirs else None


def table(rows: Sequence[Row]) -> str:
    kinds = (*KINDS, ONE_BIT)
    lines = [
        f"{'':31} | {'milliseconds':^43} | {'times faster than':^20} | {'MB a call and rank':^18} | times fewer than",
        f"{'hosts':5} {'link':>13} {'elements':>11} | {' '.join(f'{kind:>10}' for kind in kinds)} | "
        f"{' '.join(f'{kind:>6}' for kind in KINDS)} | {'fp32':>9} {ONE_BIT:>8} | {'fp32':>7} {'fp16':>7}",
    ]
    for group in by_kind(rows):
        own = group[ONE_BIT]
        times = " ".join(cell(group[kind].seconds, "10.2f", 1e3) for kind in kinds)
        speed = " ".join(cell(faster(group, kind), "6.1f") for kind in KINDS)
        sent = f"{cell(group['fp32'].bytes, '9.3f', 1e-6)} {cell(own.bytes, '8.3f', 1e-6)}"
        fewer = " ".join(cell(smaller(group, kind), "7.2f") for kind in BYTES_TARGETS)
        where = f"{own.hosts:5} {own.rate or '-':>13} {own.elements:>11,}"
        lines.append(f"{where} | {times} | {speed} | {sent} | {fewer}")
    lines += [_direct_line(group) for group in by_kind(rows) if DIRECT in group]
    lines += filter(None, (delays.line(group[ONE_BIT]) for group in by_kind(rows)))
    lines += [f"{row.kind} was not measured: {row.error}" for row in {r.error: r for r in rows if r.error}.values()]
    return "\n".join(lines)


def _direct_line(group: dict[str, Row]) -> str:
    """Direct replies beside two phases."""
    own, two = group[DIRECT], group[ONE_BIT]
    where = f"{own.hosts} hosts, {own.rate or 'this group'}, {own.elements:,} elements"
    times = f"{cell(own.seconds, '.2f', 1e3)} ms for {cell(two.seconds, '.2f', 1e3)} in two phases"
    return f"direct replies ({where}): {times}, {cell(own.bytes, '.3f', 1e-6)} MB for {cell(two.bytes, '.3f', 1e-6)}"


def phase_table(rows: Sequence[Row], kind: str = ONE_BIT) -> str:
    """Milliseconds of each phase alone, beside those of the whole call."""
    measured = [row for row in rows if row.phases and row.kind == kind]
    if not measured:
        return ""
    names = list(measured[0].phases or {})
    lines = [
        f"\n{kind}: milliseconds of each phase alone, unpipelined, and of the call",
        f"{'hosts':5} {'link':>13} {'elements':>11} {'chunks':>6} | {' '.join(f'{n:>10}' for n in names)} |       call",
    ]
    for row in measured:
        parts = " ".join(cell(seconds, "10.2f", 1e3) for seconds in (row.phases or {}).values())
        where = f"{row.hosts:5} {row.rate or '-':>13} {row.elements:>11,} {row.chunks:>6}"
        lines.append(f"{where} | {parts} | {cell(row.seconds, '10.2f', 1e3)}")
    return "\n".join(lines)


def targets(rows: Sequence[Row]) -> list[Target]:
    """Those that these rows are a measurement of."""
    groups = by_kind(rows)
    found = []
    for group in groups:
        own, ratio = group[ONE_BIT], faster(group, "fp32")
        rates = SPEED_TARGETS if rtt_seconds(own.rate) is None else {}
        needed = next((x for rate, x in rates.items() if rate_bits(rate) == rate_bits(own.rate)), None)
        small = next((x for (rate, n), x in SMALL_TARGETS.items() if (rate, n) == (own.rate, own.elements)), None)
        where = f"({own.hosts} hosts, {own.rate}, {own.elements:,} elements)"
        found += delays.targets(own)
        if own.hosts != SPEED_TARGET_HOSTS:
            continue
        if own.elements == SPEED_TARGET_ELEMENTS and needed and ratio:
            found.append(Target(f"as fast as fp32 {where}", ratio, needed))
        if small and (ratio := faster(group, "fp16")):
            found.append(Target(f"as fast as fp16 {where}", ratio, small))
    for kind, needed in BYTES_TARGETS.items():
        large = [group for group in groups if group[ONE_BIT].elements >= BYTES_TARGET_ELEMENTS]
        ratios = [ratio for group in large if (ratio := smaller(group, kind))]
        if ratios:
            where = f"the least of {len(ratios)} networks and sizes, {BYTES_TARGET_ELEMENTS:,} elements or more"
            found.append(Target(f"fewer bytes than {kind} ({where})", min(ratios), needed))
    return found


def plot(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Time against size, speed-up against bandwidth, bytes on the wire: each as far as it was measured."""
    groups = by_kind(rows)
    own = [group[ONE_BIT] for group in groups]
    hosts = SPEED_TARGET_HOSTS if any(row.hosts == SPEED_TARGET_HOSTS for row in own) else own[-1].hosts
    rate = "1gbit" if any(row.rate == "1gbit" for row in own) else own[-1].rate
    largest = max(row.elements for row in own)
    sizes = [group for group in groups if (group[ONE_BIT].hosts, group[ONE_BIT].rate) == (hosts, rate)]
    times = {kind: [(g[kind].elements, 1e3 * s) for g in sizes if (s := g[kind].seconds)] for kind in (*KINDS, ONE_BIT)}
    where = f"{hosts} ranks" + (f", {rate}" if rate else "")
    panels = [plots.lines(f"Time, {where}", "elements", "milliseconds", times)]
    speeds: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        row, bits = group[ONE_BIT], rate_bits(group[ONE_BIT].rate)
        for kind in ("fp32", "fp16"):
            if bits and row.elements == largest and (ratio := faster(group, kind)):
                label = ", ".join(filter(None, (kind, f"{row.hosts} hosts", rate_and_rtt(row.rate)[1])))
                speeds.setdefault(label, []).append((bits / 1e9, ratio))
    if speeds:
        shown = plots.lines(f"Speed-up, {largest:,} elements", "link, Gbit/s", "times as fast as", speeds, logy=False)
        goals = [(rate_bits(r) or 0, x) for r, x in SPEED_TARGETS.items()] if largest == SPEED_TARGET_ELEMENTS else []
        panels.append(plots.with_targets(shown, [(bits / 1e9, x) for bits, x in goals], "target, fp32, 4 hosts"))
    biggest = sizes[-1]
    sent = {kind: 1e-6 * nbytes for kind in (*KINDS, ONE_BIT) if (nbytes := biggest[kind].bytes)}
    if sent:
        notes = {kind: f"{mb:.3g} MB\n{mb / sent[ONE_BIT]:.1f} x" for kind, mb in sent.items()}
        panels.append(
            plots.bars(f"Bytes on the wire, {biggest[ONE_BIT].elements:,} elements", "MB a call and rank", sent, notes)
        )
    return plots.save(path, panels, title)


def standard(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the run that is this one's standard."""
    return STANDARD if arguments.each == 1 else two_levels.STANDARD


def record_name(arguments: argparse.Namespace, group: dict[str, Any]) -> str:
    """The record's file name: the device, and in what it differs from the standard run."""
    parts = ["all_reduce", group["device"]]
    if arguments.each > 1:
        parts += [f"{arguments.each}-ranks-a-host"]
    if not arguments.lab:
        parts += [group["backend"], f"{group['ranks']}-ranks"]
    for name in ("hosts", "rates", "elements") if arguments.lab else ("elements",):
        value = getattr(arguments, name)
        if value != standard(arguments)[name]:
            parts += [name, *map(str, value)]
    if arguments.chunks != STANDARD["chunks"]:
        parts += ["chunks", str(arguments.chunks)]
    if arguments.in_a_row > 1:
        parts += ["in a row", str(arguments.in_a_row)]
    return slug(*parts, *(["direct"] if arguments.direct else []))


def _about(arguments: argparse.Namespace, group: dict[str, Any], load: float | None) -> dict[str, Any]:
    return {
        **group,
        "lab": arguments.lab,
        **machine(),
        "load_before": load,
        "chunks": arguments.chunks,
        "repeats": arguments.repeats,
        "in_a_row": arguments.in_a_row,
        **provenance(),
    }


def report(arguments: argparse.Namespace, rows: list[Row], group: dict[str, Any], load: float | None) -> None:
    """The table, the targets, the record and the plot."""
    where = f"{group['device']}, {os.cpu_count()} cores, {group['backend']}, threads a rank: {group['threads']}"
    several = any(row.each > 1 for row in rows)
    print(f"{where}, load before: {load}\n\n{two_levels.table(rows) if several else table(rows)}")
    for kind in (ONE_BIT, TWO_LEVELS):
        if phases := phase_table(rows, kind):
            print(phases)
    reached = two_levels.targets(rows) if several else targets(rows)
    print("".join(f"\n{target}" for target in reached))
    record: dict[str, Any] = _about(arguments, group, load)
    record["targets"] = as_json(reached)
    record["rows"] = [asdict(row) for row in rows]
    path = arguments.out / f"{record_name(arguments, group)}.json"
    write_record(path, record)
    print(f"\n{path}")
    draw = two_levels.plot if several else plot
    plots.draw_if_possible(lambda: [draw(rows, where, path.with_suffix(".png"))])

"""What the all-reduce benchmark makes of its rows: a table, targets, a record and a plot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from perf import plots
from perf.all_reduce.measure import Row, by_kind
from perf.all_reduce.plots import plot
from perf.all_reduce.targets import faster, round_trips, smaller, targets
from perf.command import differing
from perf.lab.paced import measured_links
from perf.records import machine, provenance, slug, write_record
from perf.tables import cell
from perf.targets import as_json

STANDARD: dict[str, Any] = {
    "hosts": [4],
    "rates": ["100mbit", "300mbit", "1gbit", "3gbit", "10gbit"],
    "elements": [2**16, 2**18, 2**20, 2**22, 25_000_000],
    "chunks": "auto",
    "in_a_row": 1,
    "direct": False,
}
PACED = {**STANDARD, "hosts": [2], "rates": ["100mbit", "1gbit"]}
LEVELS = {**STANDARD, "hosts": [2], "rates": ["20mbit", "100mbit", "1gbit"], "elements": [2**21, 2**22]}


def standard(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the run that is this one's standard."""
    return PACED if arguments.paced else STANDARD if arguments.each == 1 else LEVELS


def table(rows: Sequence[Row]) -> str:
    """Bytes are those of a host's link."""
    lines = [
        f"{'hosts':>6} {'link':>13} {'elements':>11} {'chunks':>6} {'':17} | {'ms':>10} {'times fp32':>10} | "
        f"{'MB a call':>10} {'times fewer':>11} | {'round trips':>11} {'beyond bytes':>12}"
    ]
    for group in by_kind(rows):
        for row in group.values():
            hosts = f"{row.hosts} x {row.each}" if row.each > 1 else f"{row.hosts}"
            where = f"{hosts:>6} {row.rate or '-':>13} {row.elements:>11,} {row.chunks or '-':>6} {row.kind:17}"
            times = f"{cell(row.seconds, '10.2f', 1e3)} {cell(faster(row, group['fp32']), '10.2f')}"
            sent = f"{cell(row.bytes, '10.3f', 1e-6)} {cell(smaller(row, group['fp32']), '11.2f')}"
            trips = f"{cell(round_trips(row), '11.1f')} {cell(round_trips(row, without_bytes=True), '12.1f')}"
            lines.append(f"{where} | {times} | {sent} | {trips}")
    return "\n".join(lines)


def record_name(arguments: argparse.Namespace, group: dict[str, Any]) -> str:
    """The record's file name: the device, and in what it differs from the standard run."""
    parts = ["all_reduce", group["device"]]
    if arguments.each > 1:
        parts += [f"{arguments.each}-ranks-a-host"]
    if arguments.paced:
        parts += ["paced", *([group["backend"]] if group["backend"] != "gloo" else [])]
    elif not arguments.lab:
        parts += [group["backend"], f"{group['ranks']}-ranks"]
    return slug(*parts, *differing(arguments, standard(arguments)))


def report(arguments: argparse.Namespace, rows: list[Row], group: dict[str, Any], load: float | None) -> None:
    """The table, the targets, the record and, of one rank a host, the plot."""
    about = {
        **group,
        "lab": arguments.lab,
        "paced": arguments.paced,
        **machine(),
        "load_before": load,
        "repeats": arguments.repeats,
    }
    about |= {"chunks": arguments.chunks, "in_a_row": arguments.in_a_row, **provenance()}
    where = f"{group['device']}, {about['cpu_count']} cores, {group['backend']}, threads a rank: {group['threads']}"
    print(f"{where}, load before: {load}\n\n{table(rows)}\n{measured_links(rows)}")
    reached = targets(rows)
    print("".join(f"\n{target}" for target in reached))
    path = arguments.out / f"{record_name(arguments, group)}.json"
    write_record(path, {**about, "targets": as_json(reached), "rows": [asdict(row) for row in rows]})
    print(f"\n{path}")
    if arguments.each == 1:
        plots.draw_if_possible(lambda: [plot(rows, where, path.with_suffix(".png"))])

"""What speed the static account predicts for each pass on a GPU, as percent of a copy's bytes a second.

    python -m perf.kernels.prediction [--out perf/results]

It reads the record of `perf.kernels.static_account` and prints a Markdown table. Nothing of it is measured: a run of
`python -m perf.kernels` on a GPU proves it right or wrong. For 2^28 elements, one launch, whole blocks, the account's
warps and one block a program. Three times of an element are compared, each as if the other two were none:

    bytes     the pass's bytes at the copy's rate
    issue     instructions of a thread over what all multiprocessors issue
    waiting   programs that fit on a multiprocessor at a time, each alone for START and the account's cycles

    time = (bytes^4 + issue^4 + waiting^4)^(1/4)        percent of a copy = bytes / time

Assumed:
    a copy moves 2.9 TB/s on an H100 SXM and 4.1 on an H200 (read plus written; 86 % of the memory's rate), and any mix
    of reads and writes moves as many; 132 multiprocessors at 1.7 GHz, which issue 4 instructions of a warp a cycle and
    reach 80 % of that; a load from memory takes 1,100 cycles when memory is busy, one from L2 300 (perf.kernels.
    machine_code); a program takes 600 cycles to start and to end; tables and hyper-parameters are in L2; what one warp
    of a program waits for, all of them do, at the same time; average's look at the flags of its messages (some 30
    instructions and a load from L2) is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebit.kernels.passes import Storage, bytes_per_element
from perf.command import add_out, exit_status
from perf.kernels.static_account import MESSAGES, TARGET, WARPS, Row
from perf.records import read_record

MULTIPROCESSORS, CLOCK, ISSUED, START = 132, 1.7e9, 0.8 * 4 * 32, 600
ELEMENTS = 2048  # of a program
VARIANTS = {"fp32": (4, False), "bf16": (2, True)}  # bytes of a parameter, and whether it has a master copy


@dataclass(frozen=True)
class Device:
    name: str
    copy: float  # bytes a second, read plus written


DEVICES = (Device("H100", 2.9e12), Device("H200", 4.1e12))


@dataclass(frozen=True)
class Times:
    """Of one element on the whole device, in seconds."""

    bytes: float
    issue: float
    waiting: float

    @property
    def percent(self) -> float:
        return 100 * self.bytes / sum(each**4 for each in (self.bytes, self.issue, self.waiting)) ** 0.25


def predicted(rows: Sequence[Row], device: Device) -> Times:
    """The times of a pass: `rows` are its kernels, one after the other."""
    itemsize, master = VARIANTS[rows[0].variant]
    moved = bytes_per_element(rows[0].name, Storage(itemsize, master=master, packed=True, ranks=MESSAGES))
    issue = sum(row.instructions_per_element for row in rows) / (MULTIPROCESSORS * ISSUED * CLOCK)
    lives = sum((START + row.cycles) / (row.occupancy * WARPS / row.warps) for row in rows)
    return Times(moved / device.copy, issue, lives / (MULTIPROCESSORS * CLOCK * ELEMENTS))


def table(record: dict[str, Any]) -> str:
    rows = [Row(**each) for each in record["rows"]]
    heads = [f"{device.name} {variant}" for device in DEVICES for variant in VARIANTS]
    lines = [f"| pass | {' | '.join(heads)} | H100 fp32: issue, waiting |", "| --- |" + " --- |" * (len(heads) + 1)]
    for name in dict.fromkeys(row.name for row in rows):
        found = {
            (device.name, variant): predicted([r for r in rows if (r.name, r.variant) == (name, variant)], device)
            for device in DEVICES
            for variant in VARIANTS
        }
        percents = " | ".join(f"{times.percent:.0f}" for times in found.values())
        first = next(iter(found.values()))
        shares = f"{100 * first.issue / first.bytes:.0f}, {100 * first.waiting / first.bytes:.0f}"
        lines.append(f"| {name} | {percents} | {shares} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2: there is no record."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.kernels.prediction",
        description="Percent of a copy that the static account predicts on a GPU.",
    )
    add_out(parser, "the record of perf.kernels.static_account")
    arguments = parser.parse_args(argv)
    return exit_status("perf.kernels.prediction", lambda: run(arguments.out))


def run(folder: Path) -> None:
    record = read_record(folder / f"static-{TARGET}.json")
    print(f"Predicted, not measured: percent of a copy, from Triton {record['versions']['triton']}'s machine code\n")
    print(table(record))


if __name__ == "__main__":
    sys.exit(main())

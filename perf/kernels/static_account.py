"""What every Triton kernel is made of on sm_90, from PTX and ptxas, without a GPU.

    python -m perf.kernels.static_account [--check] [--out perf/results]

Registers and spills are ptxas' report. Accesses are PTX's global loads and stores by their width in bytes. Occupancy is
the share of a multiprocessor's 64 warps that registers and shared memory leave room for. The rest is read from the
machine code that a warp runs for a whole, aligned block (`perf.kernels.machine_code`): instructions over the elements
that a thread works on; barriers; how many loads wait for one another in a row until the last tile is there; and the
cycles that a warp would take alone.

With --check nothing is written: exit status 1 if a kernel is worse than the record. Compilers differ, so numbers are
compared where Triton's version is the record's; elsewhere no kernel may spill, or have fewer 16-byte accesses.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onebit.cli.progress import Progress
from onebit.kernels import gpu
from onebit.kernels.gpu import aot
from onebit.kernels.gpu.launch import Launch, recorded
from onebit.kernels.tuning.machine import triton_version
from perf.command import add_out, exit_status, make_folder
from perf.kernels import machine_code
from perf.records import provenance, read_record, write_record

TARGET = "sm_90"
WIDE = 16  # bytes: the widest access
# A multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide, technical specifications).
REGISTERS, REGISTER_UNIT, WARPS, PROGRAMS, SHARED, SHARED_UNIT = 65_536, 256, 64, 32, 227 * 1024, 1024


@dataclass(frozen=True)
class Row:
    name: str  # pass
    kernel: str
    variant: str
    warps: int
    registers: int
    spilled: int
    shared: int  # bytes
    loads: dict[str, int]  # by bytes
    stores: dict[str, int]
    instructions_per_element: float
    barriers: int
    loads_in_a_row: int
    cycles: int
    occupancy: float

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.kernel, self.variant


def account(progress: Progress | None = None) -> list[Row]:
    """A row for each kernel of each pass in each variant."""
    rows: dict[tuple[str, str, str], Row] = {}
    for variant, workload in aot.variants().items():
        for name, each in workload.passes(gpu).items():
            if progress is not None:
                progress.tick(f"compiling for {TARGET}: {name}, {variant}")
            with recorded() as launches:
                each.run()
            for launch in launches:
                row = _row(name, variant, launch)
                rows[row.key] = row
    return list(rows.values())


def occupancy(registers: int, warps: int, shared: int) -> float:
    """Share of a multiprocessor's warps that programs of this shape can fill."""
    by_registers = REGISTERS // (-(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT * warps)
    by_shared = SHARED // (-(-shared // SHARED_UNIT) * SHARED_UNIT + SHARED_UNIT)  # the system keeps one unit itself
    return min(by_registers, by_shared, PROGRAMS, WARPS // warps) * warps / WARPS


def accesses(ptx: str, which: str) -> dict[str, int]:
    """How many global accesses a kernel has, by width in bytes: `which` is ld or st."""
    found = re.findall(rf"\b{which}\.global[.\w:]*?(?:\.v(\d))?\.[bsuf](\d+)\s", ptx)
    widths = Counter(int(count or 1) * int(bits) // 8 for count, bits in found)
    return {str(width): widths[width] for width in sorted(widths, reverse=True)}


def worse(row: Row, recorded: Row, same_compiler: bool) -> list[str]:
    """Say in what a kernel is worse than its record."""
    found = []
    for what in ("loads", "stores"):
        now, before = (getattr(r, what).get(str(WIDE), 0) for r in (row, recorded))
        if now < before:
            found.append(f"{now} {what} of {WIDE} bytes, {before} before")
    if not same_compiler:
        return found + [f"{row.spilled} bytes spilled"] * (row.spilled > 0)
    for what in ("loads", "stores"):
        now, before = (sum(n for w, n in getattr(r, what).items() if w != str(WIDE)) for r in (row, recorded))
        if now > before:
            found.append(f"{now} narrower {what}, {before} before")
    for what in ("registers", "spilled", "shared", "instructions_per_element", "barriers", "loads_in_a_row", "cycles"):
        now, before = getattr(row, what), getattr(recorded, what)
        if now > before:
            found.append(f"{what} {now:g}, {before:g} before")
    return found


def compare(rows: Sequence[Row], record: dict[str, Any]) -> list[str]:
    """One line for each kernel that is worse than the record, or is not in it."""
    same = record["versions"]["triton"] == triton_version()
    before = {row.key: row for row in (Row(**each) for each in record["rows"])}
    lines = []
    for row in rows:
        found = worse(row, before[row.key], same) if row.key in before else ["not in the record"]
        lines += [f"{row.kernel} ({row.name}; {row.variant}): {', '.join(found)}"] if found else []
    return lines


def table(rows: Sequence[Row]) -> str:
    figures = f"{'instr/elem':>10} {'barriers':>8} {'in a row':>8} {'cycles':>6} {'occupancy':>9}"
    head = f"{'kernel':<24} {'pass':<16} {'warps':>5} {'regs':>5} {'spilled':>7} {'shared':>6}"
    lines = [f"{head} {'loads':>12} {'stores':>12} {figures}"]
    for i, r in enumerate(rows):
        if i == 0 or rows[i - 1].variant != r.variant:
            lines.append(f"{r.variant}:")
        loads, stores = (f"{sum(x.values())} ({x.get(str(WIDE), 0)} x {WIDE}B)" for x in (r.loads, r.stores))
        lines.append(
            f"{r.kernel:<24} {r.name:<16} {r.warps:>5} {r.registers:>5} {r.spilled:>7} {r.shared:>6} {loads:>12} "
            f"{stores:>12} {r.instructions_per_element:>10.1f} {r.barriers:>8} {r.loads_in_a_row:>8} "
            f"{r.cycles:>6} {r.occupancy:>9.0%}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: with --check, a kernel is worse than the record. 2: no record can be read or written."""
    arguments = _parser().parse_args(argv)
    return exit_status("perf.kernels.static_account", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.out / f"static-{TARGET}.json"
    progress = Progress()
    rows = account(progress)
    progress.clear()
    print(f"Triton {triton_version()}, {TARGET}\n\n{table(rows)}\n")
    if arguments.check:
        lines = compare(rows, read_record(path))
        print("\n".join(lines) if lines else f"No kernel is worse than {path}")
        return int(bool(lines))
    make_folder(arguments.out)
    record = {"target": TARGET, **provenance(), "rows": [asdict(row) for row in rows]}
    write_record(path, record)
    print(path)
    return 0


def _row(name: str, variant: str, launch: Launch) -> Row:
    compiled = aot.compile_launch(launch, TARGET)
    made, ptx, warps = aot.assembled(compiled), compiled.asm["ptx"], launch.config.warps
    path = machine_code.whole_block_path(machine_code.instructions(made.listing))
    elements = launch.config.blocks_per_program * launch.arguments["TILE"] / (32 * warps)
    return Row(
        name, compiled.kernel, variant, warps, made.registers, made.spilled, compiled.shared,
        accesses(ptx, "ld"), accesses(ptx, "st"),
        round(len(path) / elements, 2), sum(each.kind == "BAR" for each in path), machine_code.loads_in_a_row(path),
        machine_code.cycles(path),
        occupancy(made.registers, warps, compiled.shared),
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.kernels.static_account",
        description=f"Registers, accesses and instructions of the kernels on {TARGET}.",
    )
    parser.add_argument("--check", action="store_true", help="compare with the record, and write nothing")
    add_out(parser, "the record")
    return parser


if __name__ == "__main__":
    sys.exit(main())

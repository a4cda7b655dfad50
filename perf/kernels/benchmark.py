"""Every pass against a plain copy: bytes moved, time, GB/s and percent of the copy's GB/s.

    python -m perf.kernels [--device auto] [--elements 2**24] [--dtype float32] [--out perf/results]

The copy is Tensor.copy_ of a buffer of as many fp32 elements, bytes read plus written, timed between the passes. A
CPU has one thread. Nothing is checked: a figure counts where the tests of the passes have passed on the device.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from onebit.cli.arguments import DTYPES, pick_device, whole_number
from onebit.cli.progress import Progress
from onebit.kernels import backend
from onebit.kernels.passes import PASSES
from onebit.kernels.tuning.machine import device_name
from onebit.kernels.tuning.timing import timing
from onebit.kernels.tuning.workload import OF_SHARD, Workload
from perf.command import add_out, exit_status, make_folder
from perf.kernels import local_step
from perf.records import machine, provenance, slug, write_record
from perf.targets import Target, as_json

RANKS = 8
# Percent of the copy's bytes a second that a pass is to reach.
TARGETS = {
    "cpu": {"compress": 65.0, "average": 40.0, "adam_update": 80.0, "lamb_statistics": 65.0, "lamb_update": 75.0},
    "cuda": dict.fromkeys(PASSES, 90.0),
}


@dataclass(frozen=True)
class Row:
    name: str
    bytes: int
    seconds: float
    gb_per_s: float
    percent_of_copy: float
    target_percent: float | None


@dataclass(frozen=True)
class Setting:
    """What is measured, and where."""

    device: torch.device
    elements: int
    dtype: torch.dtype = torch.float32
    repeats: int = 20


def measure(setting: Setting, progress: Progress) -> tuple[float, list[Row]]:
    """The copy's GB/s, and a row for every pass."""
    copies, timings = [], {}
    for i, name in enumerate(PASSES, start=1):
        progress.tick(f"[{i}/{len(PASSES)}] {name}")
        copies.append(_copy_rate(setting))
        # A model whose shard is as large as what other passes work on.
        numel = setting.elements * (RANKS if name in OF_SHARD else 1)
        workload = Workload(numel, setting.device, dtype=setting.dtype, ranks=RANKS)
        work = workload.passes(backend(setting.device))[name]
        timings[name] = work.bytes, timing(work.run, setting.device, setting.repeats).seconds
    copy = statistics.median(copies)
    targets = TARGETS[setting.device.type]
    if setting.elements < _standard_elements(setting.device):
        targets = {}  # a small copy runs from the cache
    rows = [
        Row(name, nbytes, seconds, nbytes / seconds / 1e9, 100 * nbytes / seconds / 1e9 / copy, targets.get(name))
        for name, (nbytes, seconds) in timings.items()
    ]
    return copy, rows


def targets(rows: Sequence[Row]) -> list[Target]:
    return [
        Target(f"a copy's bytes a second: {row.name}", row.percent_of_copy / 100, row.target_percent / 100)
        for row in rows
        if row.target_percent is not None
    ]


def table(copy: float, rows: Sequence[Row]) -> str:
    lines = [f"{'pass':<16} {'MB':>9} {'ms':>9} {'GB/s':>8} {'% of copy':>10}"]
    for r in rows:
        figures = f"{r.seconds * 1e3:>9.3f} {r.gb_per_s:>8.1f} {r.percent_of_copy:>10.1f}"
        lines.append(f"{r.name:<16} {r.bytes / 1e6:>9.1f} {figures}")
    return "\n".join([*lines, f"{'copy':<16} {'':>9} {'':>9} {copy:>8.1f} {100:>10.1f}"])


def record_name(setting: Setting) -> str:
    """The record's file name: the device, and in what it differs from the standard run."""
    extras = [
        (str(setting.dtype).removeprefix("torch."), setting.dtype != torch.float32),
        (f"2-{setting.elements.bit_length() - 1}", setting.elements != _standard_elements(setting.device)),
    ]
    return slug(device_name(setting.device), *(text for text, there in extras if there))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2: this can't be measured here."""
    parser = argparse.ArgumentParser(prog="python -m perf.kernels", description="Every pass against a plain copy.")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index>")
    parser.add_argument("--elements", type=whole_number, help="2**24 on a CPU, 2**28 on a GPU")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of parameters and gradients")
    parser.add_argument("--repeats", type=whole_number, default=20, help="runs in a median (default: %(default)s)")
    add_out(parser, "the record")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    return exit_status("perf.kernels", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    device, progress = pick_device(arguments.device), Progress()
    elements = arguments.elements or _standard_elements(device)
    setting = Setting(device, elements, DTYPES[arguments.dtype], arguments.repeats)
    make_folder(arguments.out)
    print(f"{device_name(device)}; {arguments.dtype}, {elements:,} elements\n")
    copy, rows = measure(setting, progress)
    progress.clear()
    print(table(copy, rows))
    reached = targets(rows)
    about = {"elements": elements, "dtype": arguments.dtype, "ranks": RANKS, "repeats": setting.repeats}
    record: dict[str, Any] = {"device": device_name(device), **machine(), "threads": 1, **about, **provenance()}
    record |= {"copy_gb_per_s": copy, "passes": [asdict(r) for r in rows]}
    if device.type == "cuda" and elements >= _standard_elements(device):
        record["bert_large_step"] = local_step.measure(device, setting.repeats)
        print(f"\n{local_step.table(record['bert_large_step'])}")
        reached += local_step.targets(record["bert_large_step"])
    print(*(f"\n{target}" for target in reached), sep="")
    path = arguments.out / f"{record_name(setting)}.json"
    write_record(path, {**record, "targets": as_json(reached)})
    print(f"\n{path}")


def _copy_rate(setting: Setting) -> float:
    """GB/s, read plus written."""
    source = torch.randn(setting.elements, device=setting.device)
    target = torch.randn(setting.elements, device=setting.device)
    seconds = timing(lambda: target.copy_(source), setting.device, setting.repeats).seconds
    return 2 * source.nbytes / seconds / 1e9


def _standard_elements(device: torch.device) -> int:
    return 2**28 if device.type == "cuda" else 2**24

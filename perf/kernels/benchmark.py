"""Every pass against a plain copy: bytes moved, time, GB/s and percent of the copy's GB/s.

    python -m perf.kernels [--device auto] [--elements 2**24] [--threads 1] [--dtype float32] [--out perf/results]

The copy is Tensor.copy_ of a buffer of as many fp32 elements, bytes read plus written, timed between the passes with
the same threads. A GPU's passes are first checked against the CPU's on a small model: a wrong pass gets no figure. The
CPU's have nothing in the package to be checked against: the tests compare them with a float64 oracle.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any, get_args

import torch

from onebit.cli.arguments import DTYPES, pick_device, whole_number
from onebit.cli.progress import Progress
from onebit.kernels import backend, cpu
from onebit.kernels.data import layout
from onebit.kernels.data.wire import Norm, Scale
from onebit.kernels.passes import PASSES
from onebit.kernels.tuning.machine import device_name, provenance
from onebit.kernels.tuning.timing import median_seconds
from onebit.kernels.tuning.workload import Workload
from perf import plots
from perf.command import WrongResult, add_out, exit_status, make_folder, torch_threads
from perf.kernels import local_step
from perf.records import machine, slug, write_record

RANKS = 8
ODD_SIZES = (1, 7, 63, 1000, 2049, 40_000)
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

    @property
    def missed(self) -> bool:
        return self.target_percent is not None and self.percent_of_copy < self.target_percent


@dataclass(frozen=True)
class Setting:
    """What is measured: where, and which variant of the codec."""

    device: torch.device
    module: ModuleType
    elements: int
    dtype: torch.dtype = torch.float32
    scale: Scale = "block"
    norm: Norm = "l1"
    block_size: int = layout.BLOCK_SIZE
    repeats: int = 20

    def workload(self, numels: int | Sequence[int]) -> Workload:
        return Workload(
            numels, self.device, dtype=self.dtype, scale=self.scale, norm=self.norm, ranks=RANKS,
            block_size=self.block_size,
        )  # fmt: skip


def check(setting: Setting) -> None:
    """Every pass once on small odd sizes, beside the CPU's; every tensor it may write is compared."""
    ours, theirs = setting.workload(ODD_SIZES), replace(setting, device=torch.device("cpu")).workload(ODD_SIZES)
    expected = theirs.passes(cpu)
    for name, run in ours.passes(setting.module).items():
        run.run()
        expected[name].run()
        right = theirs.outputs()
        for what, tensor in ours.outputs().items():
            loose: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if tensor.dtype == torch.float32 else {}
            try:  # a message is NaN until it is written
                torch.testing.assert_close(tensor.cpu(), right[what], **loose, equal_nan=True)
            except AssertionError as error:
                raise WrongResult(f"{name} leaves another {what} than on the CPU:\n{error}") from error


def measure(setting: Setting, progress: Progress | None = None) -> tuple[float, list[Row]]:
    """The copy's GB/s, and a row for every pass."""
    copies, timings = [], {}
    for i, name in enumerate(PASSES, start=1):
        if progress is not None:
            progress.tick(f"[{i}/{len(PASSES)}] {name}")
        copies.append(_copy_rate(setting))
        # average works on one shard: a model that makes this shard as large as what the others work on.
        numel = setting.elements * (RANKS if name == "average" else 1)
        work = setting.workload(numel).passes(setting.module)[name]
        timings[name] = work.bytes, median_seconds(work.run, setting.device, setting.repeats)
    copy = statistics.median(copies)
    targets = TARGETS[setting.device.type]
    if setting.elements < _standard_elements(setting.device):
        targets = {}  # a small copy runs from the cache
    rows = [
        Row(name, nbytes, seconds, nbytes / seconds / 1e9, 100 * nbytes / seconds / 1e9 / copy, targets.get(name))
        for name, (nbytes, seconds) in timings.items()
    ]
    return copy, rows


def table(copy: float, rows: Sequence[Row]) -> str:
    lines = [f"{'pass':<16} {'MB':>9} {'ms':>9} {'GB/s':>8} {'% of copy':>10} {'target':>8}"]
    for r in rows:
        target = "" if r.target_percent is None else f"{r.target_percent:.0f}{' missed' if r.missed else ''}"
        lines.append(
            f"{r.name:<16} {r.bytes / 1e6:>9.1f} {r.seconds * 1e3:>9.3f} {r.gb_per_s:>8.1f} "
            f"{r.percent_of_copy:>10.1f} {target:>8}".rstrip()
        )
    return "\n".join([*lines, f"{'copy':<16} {'':>9} {'':>9} {copy:>8.1f} {100:>10.1f}"])


def panel(rows: Sequence[Row], title: str) -> plots.Draw:
    """Bars of percent of the copy, and the percent to reach."""

    def draw(axes: Any) -> None:
        bars = axes.bar([r.name for r in rows], [r.percent_of_copy for r in rows], color=plots.BLUE)
        axes.bar_label(bars, fmt="%.0f")
        for i, row in enumerate(rows):
            if row.target_percent is not None:
                axes.hlines(row.target_percent, i - 0.45, i + 0.45, color=plots.TARGET, label="target")
        axes.axhline(100, color="#888888", linewidth=1, linestyle=":", label="plain copy")
        named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(named.values(), named.keys(), loc="upper left")
        axes.set(ylabel="bytes a second, percent of a copy", title=title, ylim=(0, None))
        axes.tick_params(axis="x", rotation=20)

    return draw


def record_name(setting: Setting, threads: int) -> str:
    """The record's file name: the device, and in what it differs from the standard run."""
    extras = [
        (str(setting.dtype).removeprefix("torch."), setting.dtype != torch.float32),
        (f"{setting.scale}-scale", setting.scale != "block"),
        (setting.norm, setting.norm != "l1"),
        (f"block-{setting.block_size}", setting.block_size != layout.BLOCK_SIZE),
        (f"{threads}-threads", setting.device.type == "cpu" and threads != 1),
        (f"2-{setting.elements.bit_length() - 1}", setting.elements != _standard_elements(setting.device)),
    ]
    return slug(device_name(setting.device), *(text for text, there in extras if there))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: no figures, since a result is wrong. 2: this can't be measured here."""
    arguments = _parser().parse_args(argv)
    with torch_threads(arguments.threads):
        return exit_status("perf.kernels", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> int:
    setting = _setting(arguments)
    gpu, kind = setting.device.type == "cuda", setting.module.__name__.rpartition(".")[2]
    if kind != "cpu":
        check(setting)
    where = device_name(setting.device) + ("" if gpu else f", threads: {arguments.threads}")
    print(f"{where}; backend {kind}, {arguments.dtype}, {arguments.scale} scales, {setting.elements:,} elements\n")
    progress = Progress()
    copy, rows = measure(setting, progress)
    progress.clear()
    print(table(copy, rows))
    record: dict[str, Any] = _about(setting, arguments, kind)
    record |= {"copy_gb_per_s": copy, "passes": [asdict(r) for r in rows]}
    if gpu:
        record["bert_large_step"] = local_step.measure(setting.device, setting.repeats)
        print(f"\n{local_step.table(record['bert_large_step'])}")
    make_folder(arguments.out)
    path = arguments.out / f"{record_name(setting, arguments.threads)}.json"
    write_record(path, record)
    print(f"\n{path}")
    plots.draw_if_possible(lambda: [plots.save(path.with_suffix(".png"), [panel(rows, where)], size=(9, 4))])
    return 0


def _about(setting: Setting, arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    return {
        "device": device_name(setting.device),
        **machine(),
        "threads": arguments.threads,
        "backend": kind,
        "elements": setting.elements,
        "dtype": arguments.dtype,
        "scale": setting.scale,
        "norm": setting.norm,
        "block_size": setting.block_size,
        "ranks": RANKS,
        "repeats": setting.repeats,
        **provenance(),
    }


def _copy_rate(setting: Setting) -> float:
    """GB/s, read plus written."""
    source = torch.randn(setting.elements, device=setting.device)
    target = torch.randn(setting.elements, device=setting.device)
    seconds = median_seconds(lambda: target.copy_(source), setting.device, setting.repeats)
    return 2 * source.nbytes / seconds / 1e9


def _standard_elements(device: torch.device) -> int:
    return 2**28 if device.type == "cuda" else 2**24


def _setting(arguments: argparse.Namespace) -> Setting:
    device = pick_device(arguments.device)
    return Setting(
        device, backend(device), arguments.elements or _standard_elements(device), DTYPES[arguments.dtype],
        arguments.scale, arguments.norm, arguments.block_size, arguments.repeats,
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.kernels", description="Every pass against a plain copy.")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index>")
    parser.add_argument("--elements", type=whole_number, help="2**24 on a CPU, 2**28 on a GPU")
    parser.add_argument("--threads", type=whole_number, default=1, help="on a CPU (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of parameters and gradients")
    parser.add_argument("--scale", choices=get_args(Scale), default="block")
    parser.add_argument("--norm", choices=get_args(Norm), default="l1")
    parser.add_argument("--block-size", type=whole_number, default=layout.BLOCK_SIZE)
    parser.add_argument("--repeats", type=whole_number, default=20, help="runs in a median (default: %(default)s)")
    add_out(parser, "the record and the plot")
    return parser

"""A language model's step on one device, AdamW(fused) beside onebit's: seconds, and memory at each point.

    python -m perf.profile [--device cuda] [--width 1024] [--layers 8] [--repeats 20] [--out perf/results]

No group: nothing is sent. Memory is what torch's allocator had at most in one step, from stage 1 over the freeze to
compressed steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from onebit import OneBitAdam, OneBitLamb, ZeroOneAdam
from onebit.cli.arguments import pick_device, whole_number
from onebit.cli.demo.model import Text, loss_of
from onebit.cli.progress import Progress
from onebit.kernels.tuning.machine import device_name
from perf.command import add_out, exit_status, make_folder
from perf.records import provenance, slug, write_record
from perf.train_step.measure import Clock
from perf.train_step.variants import Shape

FREEZE = 3
POINTS = ("stage 1", "freeze", "after it")
WARM = 4  # compressed steps that are not counted: the tuner's
Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "1-bit Adam": lambda params: OneBitAdam(params, lr=1e-3, freeze_step=FREEZE),
    "1-bit LAMB": lambda params: OneBitLamb(params, lr=1e-3, freeze_step=FREEZE),
    "0/1 Adam": lambda params: ZeroOneAdam(params, lr=1e-3, var_update_scaler=1),
}


@dataclass(frozen=True)
class Row:
    """Seconds of whole steps and of `optimizer.step` alone, medians; bytes at most allocated, on a GPU."""

    optimizer: str
    step: float
    update: float
    most: dict[str, int]  # by point of the run


class Run:
    """A model and its optimizer on one device."""

    def __init__(self, name: str, shape: Shape, device: torch.device) -> None:
        self.device, self.clock, text = device, Clock(device), Text()
        self.model = shape.plain(text, device)
        self.optimizer = OPTIMIZERS[name](list(self.model.parameters()))
        self.windows = text.batch(shape.batch, torch.Generator().manual_seed(0)).to(device)

    def step(self) -> tuple[float, float]:
        mark = self.clock.mark
        start = mark()
        loss_of(self.model, self.windows).backward()
        before = mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = mark()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock.seconds(start, end), self.clock.seconds(before, end)

    def most_allocated(self) -> int:
        """Take one more step and return its peak of allocated memory."""
        if self.device.type != "cuda":
            self.step()
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step()
        return int(torch.cuda.max_memory_allocated(self.device))


def measure(name: str, shape: Shape, device: torch.device, repeats: int, progress: Progress) -> Row:
    run, most = Run(name, shape, device), {}
    progress.show(f"{name}: stage 1")
    for _ in range(FREEZE):
        most[POINTS[0]] = run.most_allocated()
    most[POINTS[1]] = run.most_allocated()
    for _ in range(WARM):
        run.step()
    most[POINTS[2]] = run.most_allocated()
    timed = []
    for step in range(repeats):
        progress.tick(f"{name}: {step} of {repeats} steps timed")
        timed.append(run.step())
    whole, update = (statistics.median(each) for each in zip(*timed, strict=True))
    return Row(name, whole, update, most)


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'':<16}{'ms a step':>11}{'of it step()':>14}" + "".join(f"{f'MB, {at}':>14}" for at in POINTS)]
    for row in rows:
        memory = "".join(f"{row.most[at] / 1e6:>14.0f}" for at in POINTS)
        lines.append(f"{row.optimizer:<16}{row.step * 1e3:>11.2f}{row.update * 1e3:>14.2f}{memory}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> None:
    make_folder(arguments.out)
    device, progress = pick_device(arguments.device), Progress()
    shape = Shape(arguments.width, arguments.layers, arguments.batch)
    base = arguments.out / slug("profile", device_name(device))
    rows = [measure(name, shape, device, arguments.repeats, progress) for name in OPTIMIZERS]
    progress.clear()
    about = {"device": device_name(device), "width": shape.width, "layers": shape.layers, **provenance()}
    write_record(base.with_suffix(".json"), {**about, "rows": [asdict(row) for row in rows]})
    print(f"{device_name(device)}, {shape.layers} layers of width {shape.width}\n\n{table(rows)}\n\n{base}.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2: this can't be measured here."""
    parser = argparse.ArgumentParser(prog="python -m perf.profile", description="One device's training step.")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--width", type=whole_number, default=1024, help="of the model (default: 1024)")
    parser.add_argument("--layers", type=whole_number, default=8, help="of the model (default: 8)")
    parser.add_argument("--batch", type=whole_number, default=8, help="windows (default: 8)")
    parser.add_argument("--repeats", type=whole_number, default=20, help="steps in a median (default: 20)")
    add_out(parser, "the record")
    arguments = parser.parse_args(argv)
    return exit_status("perf.profile", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""A whole `optimizer.step` beside torch.optim.AdamW's: what a step costs besides the network.

    python -m perf.optimizer_step [--device auto] [--rounds 15] [--out perf/results]

One process, and one thread on a CPU; no group: nothing is sent. In every round each optimizer takes ten steps on a GPU,
which hides the host's work behind the device's, and one on a CPU, in turn; a time is the median over rounds, a ratio
that of two medians. "8 ranks, local work" is what one of 8 ranks does in a step of stage 2: scan and compress
everything (with mean sizes as scales), average an eighth of it from 8 messages, update everything.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from onebit import OneBitAdam, OneBitLamb, OneBitOptimizer
from onebit.cli.arguments import pick_device, whole_number
from onebit.cli.progress import Progress
from onebit.kernels import backend
from onebit.kernels.tuning.machine import device_name
from onebit.kernels.tuning.workload import Workload
from perf.command import add_out, exit_status, make_folder
from perf.records import machine, provenance, slug, write_record
from perf.targets import Target, as_json

RANKS = 8
FUSED, FOREACH = "AdamW(fused)", "AdamW(foreach)"
STAGE_1, STAGE_2, LOCAL = "stage 1", "stage 2", f"stage 2, local work of {RANKS} ranks"
MODELS: dict[str, tuple[str, list[int]]] = {
    "large": ("25 M elements in 105 tensors", [686 * 686] * 53 + [686] * 52),
    "huge": ("336 M elements in 302 tensors", [1512 * 1512] * 147 + [1024] * 155),
    "many": ("5,000 tensors of 200 elements", [200] * 5000),
    "small": ("300 tensors of 64 elements", [64] * 300),  # the host's time: the device has next to nothing to do
}
SHOWN = {"cpu": ("large", "many"), "cuda": ("huge", "many", "small")}  # the models of a device
# Of a model: which step is to take at most so many times the time of which of torch's.
AT_MOST = {
    ("large", f"1-bit Adam, {STAGE_1}"): (FUSED, 1.2),
    ("large", f"1-bit Adam, {LOCAL}"): (FUSED, 1.7),
    ("huge", f"1-bit Adam, {LOCAL}"): (FUSED, 1.0),
    ("many", f"1-bit Adam, {STAGE_1}"): (FOREACH, 1.2),
    ("many", f"1-bit Adam, {STAGE_2}"): (FOREACH, 1.2),
}


@dataclass(frozen=True)
class Row:
    """One optimizer's step on one model."""

    model: str
    step: str
    seconds: float


def steps(numels: Sequence[int], device: torch.device) -> dict[str, Callable[[], object]]:
    """Every step that is timed, by name, each on parameters of its own."""

    def params() -> list[Tensor]:
        return parameters(numels, device)

    found: dict[str, Callable[[], object]] = {
        FUSED: torch.optim.AdamW(params(), fused=True).step,
        FOREACH: torch.optim.AdamW(params(), foreach=True).step,
    }
    for name, optimizer in {"1-bit Adam": OneBitAdam, "1-bit LAMB": OneBitLamb}.items():
        found[f"{name}, {STAGE_1}"] = optimizer(params(), freeze_step=10**6).step
        found[f"{name}, {STAGE_2}"] = _in_stage_2(optimizer(params(), freeze_step=1)).step
        updates = ("lamb_statistics", "lamb_update") if optimizer is OneBitLamb else ("adam_update",)
        found[f"{name}, {LOCAL}"] = local_work(numels, device, ("scan", "compress", "average", *updates))
    return found


def measure(model: str, device: torch.device, rounds: int, progress: Progress) -> list[Row]:
    timed: dict[str, list[float]] = {}
    runs, in_a_row = steps(MODELS[model][1], device), 10 if device.type == "cuda" else 1
    for i in range(-2, rounds):
        progress.tick(f"{MODELS[model][0]}: round {max(i + 1, 0)} of {rounds}")
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(in_a_row):
                run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if i >= 0:
                timed.setdefault(name, []).append((time.perf_counter() - start) / in_a_row)
    return [Row(model, name, statistics.median(times)) for name, times in timed.items()]


def targets(rows: Sequence[Row]) -> list[Target]:
    seconds = {(row.model, row.step): row.seconds for row in rows}
    found = []
    measured = {row.model for row in rows}
    for (model, step), (torchs, most) in AT_MOST.items():
        if model not in measured:
            continue
        what = f"{torchs}'s speed: {step}, {MODELS[model][0]} (at most {most:g} times its time)"
        found.append(Target(what, seconds[model, torchs] / seconds[model, step], 1 / most))
    return found


def table(rows: Sequence[Row]) -> str:
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        of_model = {row.step: row.seconds for row in rows if row.model == model}
        lines.append(f"{MODELS[model][0]:<46} {'ms':>8}   times {FUSED}, {FOREACH}")
        for step, seconds in of_model.items():
            ratios = (seconds / of_model[torchs] for torchs in (FUSED, FOREACH))
            lines.append(f"  {step:<44} {seconds * 1e3:>8.2f}   {'   '.join(f'{r:5.2f}' for r in ratios)}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> None:
    make_folder(arguments.out)
    device, progress, rows = pick_device(arguments.device), Progress(), []
    for model in SHOWN[device.type]:
        rows += measure(model, device, arguments.rounds, progress)
    progress.clear()
    reached, where = targets(rows), device_name(device)
    print(f"{where}\n\n{table(rows)}\n", *reached, sep="\n")
    path = arguments.out / f"{slug('optimizer_step', where)}.json"
    about = {"device": where, **machine(), "rounds": arguments.rounds, **provenance()}
    write_record(path, {**about, "rows": [asdict(row) for row in rows], "targets": as_json(reached)})
    print(f"\n{path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2: this can't be measured here."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.optimizer_step", description="A whole step on one rank, beside torch's AdamW."
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--rounds", type=whole_number, default=15, help="steps in a median (default: %(default)s)")
    add_out(parser, "the record")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    return exit_status("perf.optimizer_step", lambda: run(arguments))


def parameters(numels: Sequence[int], device: torch.device) -> list[Tensor]:
    source = torch.Generator(device).manual_seed(0)
    params = [torch.randn(n, generator=source, device=device, requires_grad=True) for n in numels]
    for p in params:
        p.grad = torch.randn(p.shape, generator=source, device=device)
    return params


def _in_stage_2(optimizer: OneBitOptimizer) -> OneBitOptimizer:
    for _ in range(3):
        optimizer.step()
    return optimizer


def local_work(numels: Sequence[int], device: torch.device, names: Sequence[str]) -> Callable[[], None]:
    """These passes, as one of several ranks runs them."""
    passes = Workload(numels, device, ranks=RANKS).passes(backend(device))

    def step() -> None:
        for name in names:
            passes[name].run()

    return step


if __name__ == "__main__":
    sys.exit(main())

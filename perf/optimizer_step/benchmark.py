"""A whole `optimizer.step` beside torch.optim.AdamW's: what a step costs besides the network.

    python -m perf.optimizer_step [--threads 1] [--rounds 15] [--models large,many] [--out perf/results]

One process on a CPU, no group: nothing is sent. In every round each optimizer takes one step, in turn; a time is the
median over rounds, a ratio that of two medians. "8 ranks, local work" is what one of 8 ranks does in a step of stage 2:
scan and compress everything, average an eighth of it from 8 messages, update everything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from onebit import OneBitAdam, OneBitLamb, OneBitOptimizer
from onebit.cli.arguments import whole_number
from onebit.cli.progress import Progress
from onebit.kernels import backend
from onebit.kernels.tuning.machine import provenance
from onebit.kernels.tuning.workload import Workload
from perf import plots
from perf.command import add_out, exit_status, list_of, make_folder, one_of, torch_threads
from perf.records import cpu_name, machine, slug, write_record
from perf.targets import Target, as_json, check_status

RANKS = 8
FUSED, FOREACH = "AdamW(fused)", "AdamW(foreach)"
STAGE_1, STAGE_2, LOCAL = "stage 1", "stage 2", f"stage 2, local work of {RANKS} ranks"
MODELS: dict[str, tuple[str, list[int]]] = {
    "large": ("25 M elements in 105 tensors", [686 * 686] * 53 + [686] * 52),
    "many": ("5,000 tensors of 200 elements", [200] * 5000),
}
# Of a model: which step is to take at most so many times the time of which of torch's.
AT_MOST = {
    ("large", f"1-bit Adam, {STAGE_1}"): (FUSED, 1.2),
    ("large", f"1-bit Adam, {LOCAL}"): (FUSED, 1.7),
    ("many", f"1-bit Adam, {STAGE_1}"): (FOREACH, 1.2),
    ("many", f"1-bit Adam, {STAGE_2}"): (FOREACH, 1.2),
}


@dataclass(frozen=True)
class Row:
    """One optimizer's step on one model."""

    model: str
    step: str
    seconds: float


def steps(numels: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Every step that is timed, by name, each on parameters of its own."""
    found: dict[str, Callable[[], object]] = {
        FUSED: torch.optim.AdamW(_parameters(numels), fused=True).step,
        FOREACH: torch.optim.AdamW(_parameters(numels), foreach=True).step,
    }
    for name, optimizer in {"1-bit Adam": OneBitAdam, "1-bit LAMB": OneBitLamb}.items():
        found[f"{name}, {STAGE_1}"] = optimizer(_parameters(numels), freeze_step=10**6).step
        found[f"{name}, {STAGE_2}"] = _in_stage_2(optimizer(_parameters(numels), freeze_step=1)).step
        found[f"{name}, {LOCAL}"] = _local_work(numels, lamb=optimizer is OneBitLamb)
    return found


def measure(model: str, rounds: int, progress: Progress | None = None) -> list[Row]:
    timed: dict[str, list[float]] = {}
    runs = steps(MODELS[model][1])
    for i in range(-2, rounds):
        if progress is not None:
            progress.tick(f"{MODELS[model][0]}: round {max(i + 1, 0)} of {rounds}")
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if i >= 0:
                timed.setdefault(name, []).append(time.perf_counter() - start)
    return [Row(model, name, statistics.median(times)) for name, times in timed.items()]


def targets(rows: Sequence[Row]) -> list[Target]:
    seconds = {(row.model, row.step): row.seconds for row in rows}
    found = []
    for (model, step), (torchs, most) in AT_MOST.items():
        if (model, step) in seconds:
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


def run(arguments: argparse.Namespace) -> int:
    make_folder(arguments.out)
    progress, rows = Progress(), []
    for model in arguments.models:
        rows += measure(model, arguments.rounds, progress)
    progress.clear()
    print(f"{cpu_name()}, threads: {arguments.threads}\n\n{table(rows)}\n")
    reached = targets(rows) if arguments.threads == 1 else []
    print(*reached, sep="\n")
    extra = [f"{arguments.threads}-threads"] * (arguments.threads != 1)
    extra += [*arguments.models] * (arguments.models != list(MODELS))
    path = arguments.out / f"{slug('optimizer_step', cpu_name(), *extra)}.json"
    about = {**machine(), "threads": arguments.threads, "rounds": arguments.rounds, **provenance()}
    write_record(path, {**about, "rows": [asdict(row) for row in rows], "targets": as_json(reached)})
    print(f"\n{path}")
    plots.draw_if_possible(lambda: [_plot(rows, path.with_suffix(".png"))])
    return check_status("perf.optimizer_step", reached, arguments.check)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2: this can't be measured here. 1: with --check, a target was missed."""
    arguments = _parser().parse_args(argv)
    with torch_threads(arguments.threads):
        return exit_status("perf.optimizer_step", lambda: run(arguments))


def _parameters(numels: Sequence[int]) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=source, requires_grad=True) for n in numels]
    for p in params:
        p.grad = torch.randn(p.shape, generator=source)
    return params


def _in_stage_2(optimizer: OneBitOptimizer) -> OneBitOptimizer:
    for _ in range(3):
        optimizer.step()
    if not optimizer.compressing:
        raise AssertionError("stage 2 was to begin after a step")
    return optimizer


def _local_work(numels: Sequence[int], *, lamb: bool) -> Callable[[], None]:
    passes = Workload(numels, ranks=RANKS).passes(backend(torch.device("cpu")))
    names = ["scan", "compress", "average", *(["lamb_statistics", "lamb_update"] if lamb else ["adam_update"])]

    def step() -> None:
        for name in names:
            passes[name].run()

    return step


def _plot(rows: Sequence[Row], path: Any) -> Any:
    return plots.save(
        path,
        [_panel(model, rows) for model in dict.fromkeys(row.model for row in rows)],
        f"A step on one rank, {cpu_name()}",
        size=(7.5, 4.2),
    )


def _panel(model: str, rows: Sequence[Row]) -> plots.Draw:
    ms: Mapping[str, float] = {row.step: row.seconds * 1e3 for row in rows if row.model == model}

    def draw(axes: Any) -> None:
        colors = ["#888888" if step in (FUSED, FOREACH) else plots.BLUE for step in ms]
        bars = axes.barh(list(ms), list(ms.values()), color=colors)
        axes.bar_label(bars, labels=[f"{value / ms[FUSED]:.2f} x" for value in ms.values()], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set(xlabel=f"milliseconds (x: times {FUSED})", title=MODELS[model][0])

    return draw


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.optimizer_step", description="A whole step on one rank, beside torch's AdamW."
    )
    models = list(MODELS)
    parser.add_argument("--threads", type=whole_number, default=1, help="(default: 1)")
    parser.add_argument("--rounds", type=whole_number, default=15, help="steps in a median (default: %(default)s)")
    parser.add_argument(
        "--models", type=list_of(one_of("model", models)), default=models, help=f"of {','.join(models)} (default: all)"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    add_out(parser, "the record and the plot")
    return parser

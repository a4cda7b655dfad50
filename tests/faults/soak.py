"""A run that goes on and on: memory, handles and threads stay what they were after the first hundred steps.

python -m tests.faults.soak        20,000 steps of two ranks for each optimizer; a plot in perf/results
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from perf import plots
from tests.limits import HUNG
from tests.onebit.runs import OPTIMIZERS, build
from tests.ranks import group, run_ranks_once

RESULTS = Path(__file__).parents[2] / "perf" / "results"
RANKS = 2
FIRST, MARKS = 100, 40  # the step from which nothing may grow; the number of marks after it
FREEZE = 50
SLACK = {"memory": 4096, "blocks": 2000, "objects": 100, "handles": 0, "threads": 0}  # less than 20,000 leaks
FLAT = 512  # kB, over the second half of a long run: before that torch's flight recorder fills, 2,000 collectives


@dataclass(frozen=True)
class Mark:
    """What a rank holds after a step: kB of its own, blocks allocated by Python, objects of its garbage collector."""

    step: int
    memory: int
    blocks: int
    objects: int
    handles: int
    threads: int
    residual: float


def soak(rank: int, size: int, kind: str, steps: int, aloud: bool = False) -> list[Mark]:
    """Adam with DDP, LAMB alone; gradients are clipped, the learning rate is scheduled, the watch checks."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8))
    if kind == "OneBitAdam":
        model = DistributedDataParallel(model, process_group=group())
    options = {"freeze_step": FREEZE, "check_every": 100, "block_size": 256, "chunks": 1}
    optimizer = build(kind, model.parameters(), lr=1e-3, process_group=group(), **options)
    if kind == "OneBitAdam":
        onebit.attach(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 500)
    source = torch.Generator().manual_seed(rank)
    at = {FIRST, *(FIRST + round(i * (steps - FIRST) / MARKS) for i in range(1, MARKS + 1))}
    marks = []
    gc.freeze()  # what there is by now is not counted again at every mark
    for step in range(1, steps + 1):
        x = torch.randn(16, 32, generator=source)
        loss = (model(x) - x[:, :8].sin()).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step in at:
            marks.append(mark(step, optimizer))
            if aloud and rank == 0:
                print(kind, marks[-1], flush=True)
        elif FREEZE < step < FIRST:
            mark(step, optimizer)  # looking takes some memory too
    return marks


def mark(step: int, optimizer: Any) -> Mark:
    residual = math.hypot(*(row["residual_norm"] for row in optimizer.diagnostics().values()))
    gc.collect()
    (memory,) = re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    handles, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return Mark(step, int(memory), sys.getallocatedblocks(), len(gc.get_objects()), handles, threads, residual)


def problems(marks: list[Mark]) -> list[str]:
    """What grew after the first mark."""
    found = []
    for name, slack in SLACK.items():
        first, *others = (getattr(m, name) for m in marks)
        if max(others) > first + slack:
            found.append(f"{name} grew from {first} to {max(others)}")
    half = len(marks) // 2
    if marks[half].step > 1000 and max(m.memory for m in marks[half:]) > marks[half].memory + FLAT:
        was = marks[half]
        found.append(f"memory goes on growing: {was.memory} kB at step {was.step}, now {marks[-1].memory}")
    norms = [m.residual for m in marks]
    if not all(map(math.isfinite, norms)) or max(norms[half:]) > 1.5 * max(norms[:half]):
        found.append(f"residuals grew from {max(norms[:half]):.3g} to {max(norms[half:]):.3g}")
    return found


def run(kind: str, steps: int, aloud: bool = False) -> list[list[Mark]]:
    return run_ranks_once(RANKS, soak, (kind, steps, aloud), timeout=HUNG + steps)


def draw(what: str, title: str, unit: float, found: dict[str, list[Mark]], axes: Any) -> None:
    for kind, marks in found.items():
        axes.plot([m.step for m in marks], [getattr(m, what) / unit for m in marks], label=kind)
    axes.set(title=title, xlabel="step")
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.soak")
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    with ThreadPoolExecutor() as pool:  # a group of ranks each
        ranks = dict(zip(OPTIMIZERS, pool.map(lambda kind: run(kind, options.steps, True), OPTIMIZERS), strict=True))
    failed = False
    for kind, of_kind in ranks.items():
        wrong = [f"rank {rank}: {text}" for rank, marks in enumerate(of_kind) for text in problems(marks)]
        failed |= bool(wrong)
        print(f"{kind}, {options.steps} steps: {'; '.join(wrong) or 'nothing grew on any rank'}")
    found = {kind: of_kind[0] for kind, of_kind in ranks.items()}
    panels: list[plots.Draw] = [
        partial(draw, "memory", "resident memory (RssAnon), MB", 1e3, found),
        partial(draw, "blocks", "blocks allocated by Python, thousands", 1e3, found),
        partial(draw, "objects", "objects since the start (one a mark)", 1, found),
        partial(draw, "residual", "norm of the residuals", 1, found),
    ]
    title = f"{options.steps:,} steps: memory, objects and residuals of rank 0"
    plots.save(RESULTS / "reliability-soak.png", panels, title)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

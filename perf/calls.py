"""How many of onebit's own functions run in a step and in a load, and how often the next one is in another file.

    python -m perf.calls

Two ranks over Gloo, DDP, a model of four tensors; counted on rank 0 by sys.setprofile, in the thread that calls. What
Numba and Triton have compiled, and what runs in other threads, is not counted.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.cli.progress import Progress
from perf.command import exit_status
from perf.lab.paced import PacedNetwork
from perf.lab.workers import ROOT, print_result, run_worker, run_workers

PRODUCT = tuple(str(ROOT / folder) + "/" for folder in ("kernels", "collectives", "onebit"))
WARM = 6  # compressed steps before one is counted: tuning, and what is decided once
FREEZE = 3
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "1-bit Adam": (onebit.OneBitAdam, {"freeze_step": FREEZE}),
    "1-bit LAMB": (onebit.OneBitLamb, {"freeze_step": FREEZE}),
    "0/1 Adam": (onebit.ZeroOneAdam, {"var_update_scaler": 1}),
}


@dataclass(frozen=True)
class Row:
    optimizer: str
    what: str
    calls: int
    files: int
    changes: int  # of file, from one function of ours to the next, by a call or a return


class Counter:
    """What `run` calls of ours."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.calls, self.changes, self.files = 0, 0, set[str]()
        self._at = ""
        sys.setprofile(self._see)
        try:
            run()
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "return" and frame.f_back is not None:
            name = frame.f_back.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(PRODUCT):
            return
        self.calls += event == "call"
        self.files.add(name)
        self.changes += self._at not in ("", name)
        self._at = name


def measure(name: str, folder: str) -> list[Row]:
    make, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model)
    optimizer: Any = make(ddp.parameters(), lr=1e-3, chunks=1, **options)
    onebit.attach(ddp, optimizer)
    source = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(4, 64, generator=source)).square().mean().backward()
        optimizer.step()

    compressed = 0
    while compressed < WARM or (hasattr(optimizer, "schedule") and optimizer.schedule.kind != "1 bit"):
        compressed += optimizer.compressing
        step()
    rows = [_row(name, "a compressed step", Counter(step))]
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    rows.append(_row(name, "state_dict", Counter(optimizer.state_dict)))
    rows.append(_row(name, "load_state_dict", Counter(lambda: optimizer.load_state_dict(state))))
    rows.append(_row(name, "onebit.save", Counter(lambda: onebit.save(folder, ddp, optimizer))))
    rows.append(_row(name, "onebit.load", Counter(lambda: onebit.load(folder, ddp, optimizer))))
    return rows


def _row(optimizer: str, what: str, found: Counter) -> Row:
    return Row(optimizer, what, found.calls, len(found.files), found.changes)


def work(folder: str) -> None:
    dist.init_process_group("gloo")
    for name in OPTIMIZERS:
        for row in measure(name, f"{folder}/{name.replace('/', '-')}"):
            if dist.get_rank() == 0:
                print_result(row)
    dist.barrier()
    dist.destroy_process_group()


def run(arguments: argparse.Namespace) -> int:
    if arguments.worker:
        return run_worker(lambda: work(arguments.worker))
    progress, rows = Progress(), list[Row]()
    with tempfile.TemporaryDirectory(prefix="onebit-calls-") as folder, PacedNetwork(2) as network:
        run_workers(
            network,
            ("-m", "perf.calls", "--worker", folder),
            progress,
            {"Row": lambda fields: Row(**fields)},
            rows.append,
        )
    progress.clear()
    print(f"{'':12} {'':18} {'calls':>6} {'files':>6} {'changes of file':>16}")
    for row in rows:
        print(f"{row.optimizer:12} {row.what:18} {row.calls:6} {row.files:6} {row.changes:16}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.calls", description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    return exit_status("perf.calls", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())

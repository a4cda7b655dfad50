"""End-to-end volume of 1-bit Adam: bytes of a whole run by the interfaces' counters, against the papers' formula.

    python -m perf.train_step.volume [--out perf/results]      root on Linux

Each run takes the same steps on a network lab's hosts, the first of them in stage 1; 1-bit Adam once with the
replies that it takes by itself, and once with reply=1, the papers'. What an uncompressed run
sends over what 1-bit Adam sends is compared with 1 / (w + (1 - w) / bits), w the share of stage 1, bits the size of a
gradient (1-bit Adam, Tang et al. 2021, section 7.1). Counters include headers, acknowledgements and each run's start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onebit
from onebit.cli.progress import Progress
from onebit.collectives.averaging import average_
from onebit.collectives.reply import AskedReply
from onebit.collectives.transport import transport_for
from perf.command import add_out, exit_status, make_folder
from perf.lab.network import NetworkLab
from perf.lab.workers import run_workers
from perf.records import RESULTS, cpu_name, provenance, write_record
from perf.tables import markdown

DTYPES = {32: torch.float32, 16: torch.float16}
RUNS: dict[str, AskedReply | None] = {"uncompressed": None, "onebit_adam": "auto", "onebit_adam, reply=1": 1}
HOSTS, ELEMENTS, STEPS, FREEZE_STEP = 2, 4_000_000, 50, 10
TOLERANCE = 0.05
RECORD = RESULTS / "volume.json"


def formula(share: float, bits: int) -> float:
    return 1 / (share + (1 - share) / bits)


def take_steps(run: str, bits: int, freeze_step: int, elements: int, steps: int) -> None:
    """One rank: `steps` steps of one of RUNS, on gradients of its own."""
    dist.init_process_group("gloo")
    p = nn.Parameter(torch.zeros(elements, dtype=DTYPES[bits]))
    source = torch.Generator().manual_seed(dist.get_rank())
    p.grad = torch.randn(elements, generator=source).to(p.dtype)
    reply = RUNS[run]
    if reply is None:
        transport = transport_for(None)
        for _ in range(steps):
            average_([p.grad], transport)
    else:
        optimizer = onebit.OneBitAdam([p], freeze_step=freeze_step, chunks=1, reply=reply)
        for _ in range(steps):
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def measure(progress: Progress) -> dict[str, Any]:
    """Bytes that all hosts have sent, of each run."""
    sent = {}
    with NetworkLab(HOSTS) as lab:
        for bits in DTYPES:
            for number, name in enumerate(RUNS):
                before = sum(lab.bytes_sent())
                numbers = (number, bits, FREEZE_STEP, ELEMENTS, STEPS)
                argv = ("-m", "perf.train_step.volume", "--worker", ",".join(map(str, numbers)))
                run_workers(lab, argv, progress)
                sent[f"{name} {bits}"] = sum(lab.bytes_sent()) - before
    progress.clear()
    about = {"hosts": HOSTS, "elements": ELEMENTS, "steps": STEPS, "freeze_step": FREEZE_STEP, "sent": sent}
    return {**about, "cpu": cpu_name(), **provenance()}


def rows(record: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Compare the formula with what was measured, for each size of a gradient and each run of 1-bit Adam."""
    share, sent = record["freeze_step"] / record["steps"], record["sent"]
    return [
        (name.replace("onebit_adam", f"fp{b}"), formula(share, b), sent[f"uncompressed {b}"] / sent[f"{name} {b}"])
        for b in DTYPES
        for name in RUNS
        if f"{name} {b}" in sent and RUNS[name] is not None
    ]


def table(record: dict[str, Any]) -> str:
    lines = []
    for name, expected, found in rows(record):
        off = found / expected - 1
        verdict = "yes" if abs(off) <= TOLERANCE else "no"
        lines.append([name, f"{expected:.2f} x", f"{found:.2f} x", f"{off:+.1%}", verdict])
    return markdown(["gradients", "formula", "measured", "difference", "within 5 %"], lines)


def run(out: Path) -> int:
    make_folder(out)
    record = measure(Progress())
    write_record(out / RECORD.name, record)
    print(f"{table(record)}\n{out / RECORD.name}")
    return int(any(abs(found / expected - 1) > TOLERANCE for _, expected, found in rows(record)))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: beyond 5 %. 2: this can't be measured here."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.train_step.volume", description="Bytes of a whole run by the counters."
    )
    add_out(parser, "the record")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        number, *numbers = map(int, arguments.worker.split(","))
        take_steps(list(RUNS)[number], *numbers)
        return 0
    return exit_status("perf.train_step.volume", lambda: run(arguments.out))


if __name__ == "__main__":
    sys.exit(main())

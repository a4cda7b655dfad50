"""What other ranks without a restart cost: the bytes and seconds of a reform, and the steps of elastic=True.

    torchrun --nproc-per-node 3 -m perf.elastic [--elements 1000000] [--rounds 10]

Bytes are counted as they are handed to the group, by rank. Three ranks become two, then three again, of which one joins
as new; then once more, and that one has followed the other two (`onebit.follow`) for some steps. Last come compressed
steps of two ranks with elastic=True and without, in turn, and these with a `Heartbeat` and without, twice: medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit import Giver, Heartbeat, OneBitAdam, OneBitOptimizer, follow, reform
from onebit.cli.arguments import CommandError, whole_number
from onebit.collectives.transport import TorchTransport, Work
from onebit.kernels.tuning.machine import device_name
from perf.command import exit_status

FREEZE = 3
CPU = torch.device("cpu")


class Counting(TorchTransport):
    """Counts the bytes that this rank sends to others. What ranks compare is gathered, too."""

    sent = 0

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        self.sent += sent.nbytes * (self.size - 1)
        return super().all_gather(out, sent, phase)

    def send(self, values: Tensor, to: int, phase: str) -> Work:
        self.sent += values.nbytes
        return super().send(values, to, phase)


def built(elements: int, group: Any, **options: Any) -> tuple[OneBitOptimizer, list[Tensor]]:
    """The same parameters on every rank."""
    source = torch.Generator().manual_seed(0)
    params = [torch.randn(elements // 2, generator=source, requires_grad=True) for _ in range(2)]
    return OneBitAdam(params, freeze_step=FREEZE, chunks=2, process_group=group, **options), params


def step(optimizer: OneBitOptimizer, params: Sequence[Tensor], source: torch.Generator) -> None:
    for p in params:
        p.grad = torch.randn(p.shape, generator=source)
    optimizer.step()


def timed_reform(optimizer: OneBitOptimizer, ranks: Counting) -> list[float]:
    """Seconds, and bytes sent."""
    start = time.perf_counter()
    reform(optimizer, ranks)
    return [time.perf_counter() - start, ranks.sent]


def reforms(elements: int, two: Any, source: torch.Generator) -> list[list[float]]:
    """Of this rank: from three ranks to two, from two to three, and the same again with one that has followed."""
    found, (optimizer, params) = [], built(elements, None)
    for _ in range(2 * FREEZE):
        step(optimizer, params, source)
    for follows in (False, True):
        dist.barrier()
        found.append(timed_reform(optimizer, Counting(two)) if dist.get_rank() < 2 else [0.0, 0])
        if dist.get_rank() == 2:
            optimizer, params = built(elements, None)
        elif not follows:
            step(optimizer, params, source)
        giver = trained_while_one_follows(optimizer, params, two, source) if follows else None
        dist.barrier()
        found.append(timed_reform(optimizer, Counting()))
        if giver is not None:
            giver.close()
    return found


def trained_while_one_follows(
    optimizer: OneBitOptimizer, params: Sequence[Tensor], two: Any, source: torch.Generator
) -> Giver | None:
    """Until that one has caught up. This rank's giver, for whoever ends it."""
    giver = Giver(optimizer, "127.0.0.1") if dist.get_rank() == 0 else None
    address = [giver and giver.address]
    dist.broadcast_object_list(address)
    if dist.get_rank() == 2:
        follow(optimizer, str(address[0]))
        dist.distributed_c10d._get_default_store().set("caught up", "")
        return None
    left = torch.ones(1)
    while left.item():
        step(optimizer, params, source)
        left.fill_(not dist.distributed_c10d._get_default_store().check(["caught up"]))
        dist.broadcast(left, 0, group=two)
    return giver


def medians(elements: int, two: Any, rounds: int, source: torch.Generator) -> dict[tuple[bool, bool], float]:
    """Seconds of a step, by whether elastic=True, and whether a `Heartbeat` is at work. All three ranks call it, two of
    them take steps."""
    taking = dist.get_rank() < 2
    runs = {elastic: built(elements, two, elastic=elastic, reply=1) for elastic in (True, False)} if taking else {}
    seconds = defaultdict[tuple[bool, bool], list[float]](list)

    def take(optimizer: OneBitOptimizer, params: Sequence[Tensor]) -> float:
        for p in params:
            p.grad = torch.randn(p.shape, generator=source)
        dist.barrier(two)
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    for optimizer, params in runs.values():
        for _ in range(FREEZE + 3):
            take(optimizer, params)
    for beating in (False, True, False, True):
        dist.barrier()
        with Heartbeat(silent_after=60) if beating else nullcontext():
            for _ in range(rounds):
                for elastic, run in runs.items():
                    seconds[elastic, beating].append(take(*run))
            dist.barrier()
    return {case: statistics.median(each) for case, each in seconds.items()}


def run(arguments: argparse.Namespace) -> int:
    if os.environ.get("WORLD_SIZE") != "3":
        raise CommandError("start three ranks: torchrun --nproc-per-node 3 -m perf.elastic")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rank, two = dist.get_rank(), dist.new_group([0, 1])
        source = torch.Generator().manual_seed(rank)
        own = torch.tensor(reforms(arguments.elements, two, source), dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(3)]
        dist.all_gather(rows, own)
        seconds = medians(arguments.elements, two, arguments.rounds, source)
        dist.barrier()
        if rank == 0:
            print(f"{device_name(CPU)}, {arguments.elements:,} elements")
            names = ("3 to 2 ranks", "2 to 3 ranks", "3 to 2 ranks", "2 to 3 ranks, of which the new one has followed")
            for i, name in enumerate(names):
                sent = ", ".join(f"{int(row[i, 1]):,}" for row in rows)
                print(f"{name}: {max(float(row[i, 0]) for row in rows):.3f} s, bytes sent by rank {sent}")
            plain, elastic, watched = (seconds[case] for case in ((False, False), (True, False), (True, True)))
            times = f"{elastic / plain:.2f} times one without, with a Heartbeat {watched / plain:.2f} times"
            print(f"a step of 2 ranks with elastic=True: {elastic * 1e3:.1f} ms, {times}")
        return 0
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2: this can't be measured here."""
    parser = argparse.ArgumentParser(prog="python -m perf.elastic", description="What a reform and elastic=True cost.")
    parser.add_argument("--elements", type=whole_number, default=10**6, help="of the model (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=whole_number, default=10, help="half of a median's steps (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    return exit_status("perf.elastic", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""What other ranks without a restart cost: the bytes and seconds of a reform, and the steps of elastic=True.

    torchrun --nproc-per-node 3 -m perf.elastic [--elements 1000000] [--rounds 10] [--backward 0.5]
    python -m perf.lab --hosts 3 --rate 100mbit -- -m perf.elastic ...

Bytes are counted as they are handed to the group, by rank. Three ranks become two, then three again, of which one joins
as new; then once more, and that one has followed the other two (`onebit.follow`) for some steps. What a rank that joins
costs the other two is the time from its coming to the first step of three ranks, less that of as many usual steps. Last
come compressed steps of two ranks with elastic=True and without, in turn, and these with a `Heartbeat` and without,
twice: medians.
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
from dataclasses import dataclass, replace
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


@dataclass
class Training:
    """Steps of a model whose backward pass takes so many seconds."""

    optimizer: OneBitOptimizer
    params: Sequence[Tensor]
    source: torch.Generator
    backward: float

    def step(self, ranks: Any = None) -> float:
        """Its seconds. ranks: a group that begins it at one time."""
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=self.source)
        if ranks is not None:
            dist.barrier(ranks)
        start = time.perf_counter()
        time.sleep(self.backward)
        self.optimizer.step()
        return time.perf_counter() - start


@dataclass(frozen=True)
class Change:
    """A change of the ranks, as one of them sees it."""

    seconds: float = 0.0  # of the reform
    sent: float = 0.0  # bytes of the reform
    usual: float = 0.0  # seconds of a step before it
    lost: float = 0.0  # seconds by a rank that joins


def changes(elements: int, two: Any, rounds: int, source: torch.Generator, backward: float) -> list[Change]:
    """Measure this rank's changes: from three ranks to two, from two to three, and the same again with one that has
    followed."""
    found, training = [], Training(*built(elements, None), source, backward)
    for _ in range(2 * FREEZE):
        training.step()
    for follows in (False, True):
        stays, steps, giver = dist.get_rank() < 2, [0.0], None
        dist.barrier()
        found.append(reformed(training, Counting(two)) if stays else Change())
        if stays:
            steps = [training.step() for _ in range(rounds)]
        else:
            training = Training(*built(elements, None), source, backward)
        usual, lost = statistics.median(steps), 0.0
        if follows:
            giver, steps = trained_while_one_follows(training, two)
            lost = sum(steps) - usual * len(steps)
        dist.barrier()
        change = reformed(training, Counting())
        lost += change.seconds + training.step() - usual
        found.append(replace(change, usual=usual, lost=lost if stays else 0.0))
        if giver is not None:
            giver.close()
    return found


def reformed(training: Training, ranks: Counting) -> Change:
    start = time.perf_counter()
    reform(training.optimizer, ranks)
    return Change(time.perf_counter() - start, ranks.sent)


def trained_while_one_follows(training: Training, two: Any) -> tuple[Giver | None, list[float]]:
    """Train until the one that follows has caught up. Returns this rank's giver, for whoever ends it, and the seconds
    of the steps."""
    giver = Giver(training.optimizer) if dist.get_rank() == 0 else None
    address = [giver and giver.address]
    dist.broadcast_object_list(address)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 2:
        follow(training.optimizer, str(address[0]))
        store.set("caught up", "")
        return None, [0.0]
    left, steps = torch.ones(1), []
    while left.item():
        steps.append(training.step())
        left.fill_(not store.check(["caught up"]))
        dist.broadcast(left, 0, group=two)
    return giver, steps


def medians(elements: int, two: Any, rounds: int, source: torch.Generator) -> dict[tuple[bool, bool], float]:
    """Seconds of a step, by whether elastic=True, and whether a `Heartbeat` is at work. All three ranks call it, two of
    them take steps."""
    runs, seconds = {}, defaultdict[tuple[bool, bool], list[float]](list)
    for elastic in (True, False) if dist.get_rank() < 2 else ():
        runs[elastic] = Training(*built(elements, two, elastic=elastic, reply=1), source, backward=0.0)
    for run in runs.values():
        for _ in range(FREEZE + 3):
            run.step(two)
    for beating in (False, True, False, True):
        dist.barrier()
        with Heartbeat(silent_after=60) if beating else nullcontext():
            for _ in range(rounds):
                for elastic, run in runs.items():
                    seconds[elastic, beating].append(run.step(two))
            dist.barrier()
    return {case: statistics.median(each) for case, each in seconds.items()}


def run(arguments: argparse.Namespace) -> None:
    if os.environ.get("WORLD_SIZE") != "3":
        raise CommandError("start three ranks: torchrun --nproc-per-node 3 -m perf.elastic")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rank, two = dist.get_rank(), dist.new_group([0, 1])
        source = torch.Generator().manual_seed(rank)
        rows: list[list[Change]] = [[], [], []]
        dist.all_gather_object(rows, changes(arguments.elements, two, arguments.rounds, source, arguments.backward))
        seconds = medians(arguments.elements, two, arguments.rounds, source)
        dist.barrier()
        if rank == 0:
            print(f"{device_name(CPU)}, {arguments.elements:,} elements")
            names = ("3 to 2 ranks", "2 to 3 ranks", "3 to 2 ranks", "2 to 3 ranks, of which the new one has followed")
            for name, ranks in zip(names, zip(*rows, strict=True), strict=True):
                sent = ", ".join(f"{int(change.sent):,}" for change in ranks)
                print(f"{name}: {max(change.seconds for change in ranks):.3f} s, bytes sent by rank {sent}")
                usual, lost = ranks[0].usual, max(change.lost for change in ranks)
                if usual:
                    print(f"    the others lost {lost:.3f} s by it, {lost / usual:.2f} steps of {usual * 1e3:.0f} ms")
            plain, elastic, watched = (seconds[case] for case in ((False, False), (True, False), (True, True)))
            times = f"{elastic / plain:.2f} times one without, with a Heartbeat {watched / plain:.2f} times"
            print(f"a step of 2 ranks with elastic=True: {elastic * 1e3:.1f} ms, {times}")
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2: this can't be measured here."""
    parser = argparse.ArgumentParser(prog="python -m perf.elastic", description="What a reform and elastic=True cost.")
    parser.add_argument("--elements", type=whole_number, default=10**6, help="of the model (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=whole_number, default=10, help="half of a median's steps (default: %(default)s)"
    )
    parser.add_argument("--backward", type=float, default=0.0, help="seconds of a backward pass (default: %(default)s)")
    arguments = parser.parse_args(argv)
    return exit_status("perf.elastic", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())

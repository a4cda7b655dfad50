"""A rank of the demo: trains one model with the original optimizer, and a copy with each of those with 1 bit, in turn.

Started by onebit.cli.demo.ranks as `python -m onebit.cli.demo.train SETTINGS`. All models see the same batches. The
time of a step is the slowest rank's; measuring held-out losses takes no time of a run. Rank 0 prints what happens in
lines of JSON behind a mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.cli.demo.model import Text, Transformer, loss_of
from onebit.cli.paced_link import PacedLink, measured_rate
from onebit.collectives.store import tcp_store
from onebit.collectives.transport.lent import lent
from onebit.optimizers.optimizer import OneBitOptimizer

MARK = "@onebit-demo "
BATCH = 16
HELD_OUT = 256  # windows
NORM = 1.0  # that gradients are clipped to, as is usual for language models
RISING = 0.25  # the part of all steps in which the learning rate rises: the best of 0.1 and 0.25 for Adam
POINTS = 20  # of a curve of held-out losses
BETAS = (0.9, 0.98)
RATE = {"adam": 3e-3, "lamb": 2e-2}
WARMUP = {"adam": 0.25, "lamb": 0.3}  # the part of all steps before the freeze
NAMES = {"adam": ("Adam", "1-bit Adam", "0/1 Adam"), "lamb": ("LAMB", "1-bit LAMB")}  # the first is uncompressed


@dataclass(frozen=True)
class Settings:
    optimizer: str = "adam"
    ranks: int = 2
    steps: int = 190
    seed: int = 0
    link: float | None = 100e6  # bits a second between the ranks; None: as fast as this machine is

    @property
    def freeze_step(self) -> int:
        return max(1, round(WARMUP[self.optimizer] * self.steps))

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[self.optimizer]


@dataclass(frozen=True)
class Start:
    device: str
    backend: str
    elements: int
    rate: float | None = None  # of the link as measured, where it is paced


@dataclass(frozen=True)
class Step:
    """What one step of every optimizer came to. Losses are means over ranks, bytes what rank 0 has sent so far."""

    step: int
    compressing: bool  # whether the second, which has two stages, is in stage 2
    losses: list[float]
    seconds: list[float]
    sent: list[int]
    held_out: list[float] | None = None  # losses after this step on text that nobody trains on, at some steps


@dataclass(frozen=True)
class End:
    reports: list[str]  # of the optimizers but the first, on rank 0
    rate: float | None = None  # of the link as measured once more


class Run:
    """A model, its optimizer, and what it has sent."""

    def __init__(self, settings: Settings, name: str, letters: int, device: torch.device) -> None:
        torch.manual_seed(settings.seed)
        self.model = DistributedDataParallel(Transformer(letters).to(device))
        self.optimizer = _optimizer(settings, name, self.model)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            max_lr=RATE[settings.optimizer],
            total_steps=settings.steps,
            pct_start=max(RISING, 2 / settings.steps),  # with one step of rising rates it divides by zero
            cycle_momentum=False,
        )
        self.elements = sum(p.numel() for p in self.model.parameters())
        self._ring = round(2 * (settings.ranks - 1) / settings.ranks * 4 * self.elements)
        self._steps = 0

    @property
    def compressing(self) -> bool:
        """Return whether stage 2 has begun."""
        return isinstance(self.optimizer, OneBitOptimizer) and self.optimizer.compressing

    @property
    def sent(self) -> int:
        """Bytes: an fp32 ring all-reduce a step without compression, messages with it."""
        if isinstance(self.optimizer, OneBitOptimizer):
            return round(self.optimizer.report().sent)
        return self._steps * self._ring

    def step(self, windows: Tensor) -> tuple[Tensor, float]:
        """The loss, and how long it took all ranks."""
        if isinstance(self.optimizer, OneBitOptimizer):
            self.optimizer.pay_off.restart()  # other models were trained since
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = loss_of(self.model, windows)
        loss.backward()
        if isinstance(self.optimizer, OneBitOptimizer):
            self.optimizer.clip_grad_norm_(NORM)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
        self.optimizer.step()
        loss = loss.detach().cpu()
        dist.barrier()  # nothing of this step is under way any more
        seconds = time.perf_counter() - start
        self.schedule.step()
        self._steps += 1
        return loss, seconds

    @torch.no_grad()
    def held_out_loss(self, windows: Tensor) -> Tensor:
        return torch.stack([loss_of(self.model.module, part) for part in windows.split(BATCH)]).mean().cpu()


def train(settings: Settings, rank: int, device: torch.device) -> None:
    text = Text()
    _compile_passes(settings, text, device)
    with PacedLink(settings.link) if settings.link else contextlib.nullcontext() as link:
        runs = [Run(settings, name, text.letters, device) for name in settings.names]
        source = torch.Generator().manual_seed(1000 * settings.seed + rank)
        held_out = text.held_out(HELD_OUT)[rank :: settings.ranks].to(device)
        rate = measured_rate(link.bits, device) if link else None
        print_line(rank, Start(device.type, dist.get_backend(), runs[0].elements, rate))
        for step in range(1, settings.steps + 1):
            windows = text.batch(BATCH, source).to(device)
            losses, seconds = zip(*(run.step(windows) for run in runs), strict=True)
            sent, point = [run.sent for run in runs], None
            if step % max(1, settings.steps // POINTS) == 0 or step in (1, settings.steps):
                point = _mean([run.held_out_loss(held_out) for run in runs], device)
            means = _mean(list(losses), device)
            print_line(rank, Step(step, runs[1].compressing, means, list(seconds), sent, point))
        reports = [str(run.optimizer.report()) for run in runs[1:] if isinstance(run.optimizer, OneBitOptimizer)]
        print_line(rank, End(reports, measured_rate(link.bits, device) if link else None))


def _compile_passes(settings: Settings, text: Text, device: torch.device) -> None:
    """Step other models, so that no step that counts compiles what it runs: seconds, on a new machine."""
    few = replace(settings, steps=10)
    for run in [Run(few, name, text.letters, device) for name in settings.names]:
        for _ in range(few.steps):
            run.step(text.batch(1, torch.Generator()).to(device))


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = int(os.environ["RANK"])
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    # Over Gloo ranks may share a GPU, and all that they send passes sockets.
    backend = "nccl" if gpus >= settings.ranks and settings.link is None else "gloo"
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=tcp_store("127.0.0.1", int(os.environ["MASTER_PORT"])),
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(minutes=2),
        device_id=device if backend == "nccl" else None,
    )
    train(settings, rank, device)
    dist.barrier()
    dist.destroy_process_group()


def _optimizer(settings: Settings, name: str, model: DistributedDataParallel) -> torch.optim.Optimizer:
    """LAMB that never freezes is uncompressed LAMB."""
    parameters = model.parameters()
    options: dict[str, Any] = {"lr": RATE[settings.optimizer], "betas": BETAS, "weight_decay": 0.01}
    optimizer: OneBitOptimizer
    match name:
        case "Adam":
            return torch.optim.AdamW(parameters, **options)
        case "1-bit Adam":
            optimizer = onebit.OneBitAdam(parameters, **options, freeze_step=settings.freeze_step, chunks=1)
        case "0/1 Adam":
            optimizer = onebit.ZeroOneAdam(parameters, **options, chunks=1)
        case _:
            freeze_step = settings.steps if name == "LAMB" else settings.freeze_step
            optimizer = onebit.OneBitLamb(parameters, **options, freeze_step=freeze_step, chunks=1, max_coeff=1.0)
    onebit.attach(model, optimizer)
    return optimizer


def _mean(losses: list[Tensor], device: torch.device) -> list[float]:
    """Average losses over ranks."""
    total = torch.stack(losses).to(device)
    dist.all_reduce(lent(total))
    return [float(x) for x in total / dist.get_world_size()]


def print_line(rank: int, what: Start | Step | End) -> None:
    if rank == 0:
        print(MARK + json.dumps({type(what).__name__: asdict(what)}), flush=True)


def parse_line(line: str) -> Start | Step | End | None:
    """What rank 0 has printed; None of any other line."""
    if not line.startswith(MARK):
        return None
    ((kind, fields),) = json.loads(line.removeprefix(MARK)).items()
    known: dict[str, type[Start | Step | End]] = {"Start": Start, "Step": Step, "End": End}
    return known[kind](**fields)


def _end_with_parent() -> None:
    os.read(0, 1)  # the parent never writes: this ends when it does
    os._exit(1)


if __name__ == "__main__":
    main()

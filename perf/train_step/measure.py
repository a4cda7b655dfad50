"""A rank of the training-step benchmark: it times the parts of a step, or trains and measures the loss."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.cli.demo.model import Text, loss_of
from onebit.collectives.waits import counted
from onebit.optimizers.optimizer import OneBitOptimizer
from perf.command import WrongResult
from perf.lab.workers import Publish
from perf.ranks import Ranks, Show, check_same, describe_group, process_group
from perf.train_step.variants import GPT2S, VARIANTS, Model, Shape, Trainee, Variant, timed_variants

FREEZE = 2  # of what is timed: PowerSGD cannot begin earlier
TIMED_LR = 1e-4
VALIDATIONS = 20  # in a run's curve
FEW, HELD_OUT = 64, 256  # windows of a point of the curve, and of the final loss
LR_WARMUP = 0.1  # of the steps


@dataclass(frozen=True)
class Row:
    """A variant's step on one network: seconds, and the parts they are made of."""

    rate: str | None  # of each link of the lab: "1gbit", "unshaped"; None outside it
    variant: str
    seconds: float | None = None  # the median of `calls`
    calls: tuple[float, ...] = ()  # the slowest rank's
    forward: float = 0.0
    backward: float = 0.0  # everything but the all-reduce
    all_reduce: float = 0.0
    step: float = 0.0
    bytes: float | None = None  # sent a step, by the rank that sends most
    error: str | None = None
    measured: float | None = None  # rate of the link, bits a second, where it is paced

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Row:
        """Make a row from a record, which may say more."""
        own = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
        return cls(**{**own, "calls": tuple(fields["calls"])})

    @property
    def share(self) -> float:
        """The share of the all-reduce in the step."""
        return self.all_reduce / self.seconds if self.seconds else math.nan


@dataclass(frozen=True)
class Run:
    """A training run: validation loss after steps, and at the end on more windows."""

    variant: str
    seed: int
    steps: int
    freeze: int
    lr: float
    curve: tuple[tuple[int, float], ...]
    loss: float
    clip: float = 0.0  # the norm that gradients are clipped to; 0 for none

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Run:
        """Make a run from JSON."""
        return cls(**{**fields, "curve": tuple((step, loss) for step, loss in fields["curve"])})


class Clock:
    """Marks and the seconds between them: the host's clock, or events on the device's stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between marks that the device has passed."""
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start


class Bench:
    """What the variants have in common: ranks, text, a clock, and a model that never communicates."""

    def __init__(self, ranks: Ranks, shape: Shape) -> None:
        self.ranks, self.shape, self.text, self.clock = ranks, shape, Text(), Clock(ranks.device)
        self.plain = shape.model(self.text, ranks.device)
        self.source = torch.Generator().manual_seed(ranks.rank)
        self.elements = sum(p.numel() for p in self.plain.parameters())

    def windows(self) -> Tensor:
        return self.shape.windows(self.text, self.source).to(self.ranks.device)

    def model(self, variant: Variant, seed: int = 0) -> Model:
        gc.collect()  # the one before
        return self.shape.model(self.text, self.ranks.device, seed, variant.one_bucket)

    def mean(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Average over ranks."""
        total = torch.tensor(values, dtype=torch.float64).to(self.ranks.device)
        dist.all_reduce(total)
        return total.cpu() / self.ranks.size

    def local_backward(self, repeats: int) -> float:
        """Seconds of a backward pass that averages nothing, all ranks at once."""
        seconds = []
        for _ in range(repeats + 1):
            self.plain.zero_grad()
            windows = self.windows()
            self.ranks.barrier()
            with self.plain.no_sync():
                loss = self.shape.loss(self.plain, windows)
                start = self.clock.mark()
                loss.backward()
                end = self.clock.mark()
            self.ranks.synchronize()
            seconds.append([self.clock.seconds(start, end)])
        return float(self.mean(seconds[1:]).median())

    def parts(self, trainee: Trainee, clip: float = 0.0) -> tuple[float, list[float]]:
        """One step: its seconds, and those of forward and of what the optimizer does, clipping included, without
        waiting for others."""
        trainee.optimizer.zero_grad()
        windows, mark, clock = self.windows(), self.clock.mark, self.clock
        self.ranks.barrier()
        began, start = time.perf_counter(), mark()
        loss = self.shape.loss(trainee.model, windows)
        forward = mark()
        loss.backward()
        backward, waits = mark(), trainee.waits
        with counted(waits):
            if clip:
                trainee.clip(clip)
            trainee.optimizer.step()
        end = mark()
        self.ranks.synchronize()
        seconds = time.perf_counter() - began
        return seconds, [clock.seconds(start, forward), clock.seconds(backward, end) - waits.total()]

    def measure(self, name: str, repeats: int, clip: float = 0.0) -> Row:
        """A collective call. The all-reduce is what is left of the step: waiting for the slowest rank is in it."""
        variant, rate = VARIANTS[name], None
        if error := variant.impossible:
            return Row(rate, name, error=error)
        rest = self.local_backward(repeats)
        trainee = variant.build(self.model(variant), TIMED_LR, FREEZE)
        timings: list[tuple[float, list[float]]] = []
        sent = 0.0
        first = (
            variant.last_full(FREEZE) + 1 if variant.compresses else 1
        )  # to count: DDP rebuilds its buckets in the one before
        for step in itertools.count():
            self.ranks.progress(f"{variant.title}, {len(timings)} of {repeats} steps timed")
            counts = step >= first and variant.times in (None, trainee.kind)
            self.ranks.barrier()
            before = self.ranks.bytes_sent()
            found = self.parts(trainee, clip)
            self.ranks.barrier()
            if counts:
                timings.append(found)
                sent += self.ranks.bytes_sent() - before
            if len(timings) == repeats:
                break
        self.check(variant, trainee)
        calls = self.ranks.slowest([seconds for seconds, _ in timings])
        forward, step_alone = self.mean([parts for _, parts in timings]).median(0).values.tolist()
        seconds = statistics.median(calls)
        exchanged = max(0.0, seconds - forward - rest - step_alone)
        sent_a_step = self.ranks.most_bytes(sent / repeats)
        parts = (forward, rest, exchanged, step_alone)
        return Row(rate, name, seconds, calls, *parts, sent_a_step, measured=self.ranks.link_rate)

    def check(self, variant: Variant, trainee: Trainee) -> None:
        """WrongResult unless ranks agree on finite parameters, no step was skipped, and it compresses as it should."""
        trainee.synchronize()
        flat = torch.cat([p.detach().flatten() for p in trainee.model.parameters()])
        check_same(self.ranks, flat, f"after steps with {variant.title}")
        skipped = trainee.optimizer.skipped_steps if isinstance(trainee.optimizer, OneBitOptimizer) else 0
        if skipped or not bool(flat.isfinite().all()):
            raise WrongResult(f"{variant.title}: parameters or gradients are not finite ({skipped} steps were skipped)")
        if trainee.compressing() != variant.compresses:
            raise WrongResult(f"{variant.title} {'has not begun' if variant.compresses else 'began'} to compress")

    def train(self, name: str, seed: int, steps: int, freeze: int, lr: float, clip: float = 0.0) -> Run:
        """The same model, batches and schedule for every variant of a seed. A collective call."""
        variant, ranks = VARIANTS[name], self.ranks
        self.source.manual_seed(1000 * seed + ranks.rank)
        model = self.model(variant, seed)
        trainee = variant.build(model, lr, freeze)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            trainee.optimizer, lr, steps, pct_start=LR_WARMUP, cycle_momentum=False
        )
        curve = [(0, self.held_out_loss(model.module, FEW))]
        for step in range(1, steps + 1):
            ranks.progress(f"{variant.title}, seed {seed}: step {step} of {steps}, loss {curve[-1][1]:.3f}")
            trainee.optimizer.zero_grad()
            loss_of(model, self.windows()).backward()
            if clip:
                trainee.clip(clip)
            trainee.optimizer.step()
            schedule.step()
            if step == steps:
                trainee.synchronize()
            if step % max(1, steps // VALIDATIONS) == 0 or step == steps:
                with trainee.at_last_sync():
                    curve.append((step, self.held_out_loss(model.module, FEW)))
        self.check(variant, trainee)
        return Run(name, seed, steps, freeze, lr, tuple(curve), self.held_out_loss(model.module, HELD_OUT), clip)

    @torch.no_grad()
    def held_out_loss(self, model: torch.nn.Module, windows: int) -> float:
        own = self.text.held_out(windows)[self.ranks.rank :: self.ranks.size].to(self.ranks.device)
        losses = [loss_of(model, part) for part in own.split(self.shape.batch)]
        return float(self.mean([[float(torch.stack(losses).mean())]]))


def run_rank(arguments: argparse.Namespace, show: Show, publish: Publish) -> None:
    """Time or train on this process's group; on rank 0 `publish` gets what is found, as it comes."""
    with process_group(arguments, show) as ranks:
        try:
            _run(arguments, ranks, publish if ranks.rank == 0 else lambda _: None)
        finally:
            gc.collect()  # a model that outlives its group ends Gloo's threads with the lock that they wait for


def _run(arguments: argparse.Namespace, ranks: Ranks, publish: Publish) -> None:
    shape = Shape(arguments.width, arguments.layers, arguments.batch, GPT2S.get(arguments.model))
    bench = Bench(ranks, shape)
    publish({**describe_group(ranks), "elements": bench.elements})
    for name, seed in arguments.runs:
        publish(bench.train(name, seed, arguments.steps, arguments.freeze, arguments.lr, arguments.clip))
    for name in [] if arguments.train else timed_variants(arguments.variants):
        publish(bench.measure(name, arguments.repeats, arguments.clip))

"""A run: an optimizer trains the model on virtual ranks, from the run's checkpoint on, if there is one.

Ranks take turns, from one collective to the next. They share a device and its one stream, so that computing at once
would win nothing, and need memory: logits and their gradients in fp32, 4 x 1,024 x 50,257 elements each, and what
backward needs are some 5 GB, beside 2 to 3 GB of parameters, gradients and state of each rank. With turns it is there
once. (And Triton compiles a kernel once, not on eight threads at the same time.)
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from onebit.cli.demo.model import loss_of
from onebit.optimizers.optimizer import OneBitOptimizer
from perf.command import WrongResult
from perf.convergence.plan import Run
from perf.convergence.runs import (
    batch_of,
    build,
    compressed_bytes,
    full_step_bytes,
    lr_at,
    mean_over_ranks,
    sends,
    share,
    volume,
)
from perf.convergence.virtual import VirtualRank, one_thread_a_rank, run_ranks
from perf.learn.checkpoint import Checkpoint
from perf.learn.model import gpt2
from perf.learn.plan import Setting
from perf.learn.tokens import Tokens

GO_ON, SAVE, STOP = range(3)  # what is due after a step; STOP saves, too
Show = Callable[[int, float], None]  # steps done, held-out loss


@dataclass
class Reached:
    """Counts, on rank 0, how far a run has come. A point of the curve: step, training loss since the point before,
    held-out loss, bytes that a rank has sent."""

    step: int = 0
    full_steps: int = 0
    seconds: float = 0.0
    curve: list[list[float]] = field(default_factory=list)


class Learner:
    """Trains with one setting on one text. due: is asked on rank 0 after each step."""

    def __init__(
        self, setting: Setting, tokens: Tokens, device: torch.device, due: Callable[[], int], show: Show
    ) -> None:
        self._setting, self._device, self._due, self._show = setting, device, due, show
        self._train = (tokens.windows(setting.shape.length),)
        self._held_out = tokens.held_out_windows(setting.shape.length, setting.held_out_at_end)

    def learn(self, run: Run, checkpoint: Checkpoint) -> Mapping[str, Any] | int:
        """Return what a record says of the run, or the last step before it had to stop."""
        gc.collect()  # the models of the run before
        resumes = checkpoint.read()
        torch.manual_seed(run.seed)
        model = gpt2(self._setting.shape)
        with one_thread_a_rank():
            results = run_ranks(
                run.ranks, lambda rank: self._rank(run, deepcopy(model), rank, checkpoint, resumes), turns=True
            )
        return results[0]

    def _rank(
        self, run: Run, model: nn.Module, transport: VirtualRank, checkpoint: Checkpoint, resumes: bool
    ) -> Mapping[str, Any] | int:
        model.to(self._device)
        optimizer = build(run, model, transport)
        if not isinstance(optimizer, OneBitOptimizer):  # in a hook, since the one before it averages
            optimizer.register_step_pre_hook(lambda *_: clip(model, self._setting.clip))
        reached, losses = Reached(), torch.zeros((), device=self._device)
        if resumes:
            reached, summed = restore(model, optimizer, checkpoint.take(transport.rank))
            losses.copy_(summed)
        start = time.perf_counter() - reached.seconds
        while reached.step < run.steps:
            reached.step += 1
            losses += self._step(run, model, optimizer, reached.step, transport)
            if transport.rank == 0:  # what was sent is the same on all, and asking waits for the device
                reached.full_steps += sends(optimizer) == "uncompressed"
            if reached.step % self._setting.every == 0 or reached.step == run.steps:
                reached.curve.append(self._point(model, optimizer, reached, losses, transport))
                losses.zero_()
            due = self._agreed(transport)
            if due != GO_ON:
                reached.seconds = time.perf_counter() - start
                if isinstance(optimizer, OneBitOptimizer):
                    optimizer.synchronize()
                checkpoint.save(state_of(model, optimizer, reached, losses), transport)
            if due == STOP and reached.step < run.steps:
                return reached.step
        reached.seconds = time.perf_counter() - start
        return self._found(run, model, optimizer, reached, transport)

    def _step(self, run: Run, model: nn.Module, optimizer: Optimizer, step: int, transport: VirtualRank) -> Tensor:
        """Take a step; returns the loss on this rank's windows."""
        for group in optimizer.param_groups:
            group["lr"] = lr_at(run, step)
        items, _ = batch_of(self._train, run, step - 1)
        optimizer.zero_grad()
        loss = self._loss(model, share(items, transport.rank, transport.size)[0])
        loss.backward()
        if isinstance(optimizer, OneBitOptimizer):
            optimizer.clip_grad_norm_(self._setting.clip)
        optimizer.step()
        return loss.detach()

    def _loss(self, model: nn.Module, windows: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):
            return loss_of(model, windows.to(self._device, non_blocking=True).long())

    def _point(
        self, model: nn.Module, optimizer: Optimizer, reached: Reached, losses: Tensor, transport: VirtualRank
    ) -> list[float]:
        since = reached.step - (int(reached.curve[-1][0]) if reached.curve else 0)
        trained = mean_over_ranks([float(losses) / since], transport)[0]
        every = max(1, len(self._held_out) // self._setting.held_out)
        held_out = self._validate(model, self._held_out[::every], transport)
        full = reached.full_steps * full_step_bytes(sum(p.numel() for p in model.parameters()), transport.size)
        sent = full + compressed_bytes([optimizer], reached.step - reached.full_steps, transport)
        if transport.rank == 0:
            self._show(reached.step, held_out)
        return [reached.step, trained, held_out, sent]

    @torch.no_grad()
    def _validate(self, model: nn.Module, windows: Tensor, transport: VirtualRank) -> float:
        """Return the mean loss of these windows, of which each rank has its share."""
        own = windows[transport.rank :: transport.size].split(self._setting.windows)
        total = sum((self._loss(model, part).double() * len(part) for part in own if len(part)), torch.zeros(()))
        summed, count = mean_over_ranks([float(total), float(sum(map(len, own)))], transport)
        return summed / count

    def _agreed(self, transport: VirtualRank) -> int:
        """Ask on rank 0 what is due: all ranks get its answer."""
        due = torch.tensor([self._due() if transport.rank == 0 else GO_ON])
        transport.all_max(due, "what is due after a step")
        return int(due)

    def _found(
        self, run: Run, model: nn.Module, optimizer: Optimizer, reached: Reached, transport: VirtualRank
    ) -> dict[str, Any]:
        if isinstance(optimizer, OneBitOptimizer):
            optimizer.synchronize()
        return {
            "loss": self._validate(model, self._held_out, transport),
            "held_out": len(self._held_out),
            "curve": reached.curve,
            "seconds": reached.seconds,
            "windows": len(self._train[0]),
            "parameters": _same_on_all(model, transport),
            **volume(run, [model], [optimizer], reached.full_steps, transport),
        }


def state_of(model: nn.Module, optimizer: Optimizer, reached: Reached, losses: Tensor) -> dict[str, Any]:
    """Return all that a rank needs to go on. losses: their sum since the last point of the curve."""
    own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {**own, "reached": asdict(reached), "losses": losses}


def restore(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> tuple[Reached, Tensor]:
    """Go on from what `state_of` returned."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Reached(**state["reached"]), state["losses"]


def clip(model: nn.Module, norm: float) -> None:
    """Scale gradients down to this norm; the hook of an optimizer returns nothing."""
    clip_grad_norm_(model.parameters(), norm)


def _same_on_all(model: nn.Module, transport: VirtualRank) -> str:
    """Return a digest of the parameters. WrongResult where ranks have others."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().cpu().numpy().tobytes())
    own = int.from_bytes(digest.digest()[:7], "big")
    most_and_least = torch.tensor([own, -own])
    transport.all_max(most_and_least, "comparing parameters")
    if not most_and_least.sum() == 0:
        raise WrongResult("ranks have other parameters than rank 0 at the end of the run")
    return f"{own:014x}"

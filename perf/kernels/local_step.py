"""A step's local work on BERT-Large: onebit's three passes, torch's fused AdamW, and eager operations.

No message is sent: compress, average (one shard of 8) and update run on one GPU, as each of 8 ranks would run them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebit.kernels.tuning.timing import timing
from perf.optimizer_step import RANKS, local_work, parameters
from perf.targets import Target

LR, BETA1, EPS, WEIGHT_DECAY = 1e-3, 0.9, 1e-8, 0.01


def bert_large(hidden: int = 1024, layers: int = 24, vocabulary: int = 30522) -> list[int]:
    """Elements of BERT-Large's 302 parameters, with one matrix for queries, keys and values and both heads."""
    norm = [hidden, hidden]
    square, up = [hidden * hidden, hidden], [4 * hidden * hidden, 4 * hidden]
    layer = [3 * hidden * hidden, 3 * hidden, *square, *norm, *up, 4 * hidden * hidden, hidden, *norm]
    embeddings = [vocabulary * hidden, 512 * hidden, 2 * hidden, *norm]
    heads = [*square, *norm, vocabulary, 2 * hidden, 2]
    return [*embeddings, *layer * layers, *square, *heads]


def measure(device: torch.device, repeats: int = 20, numels: Sequence[int] | None = None) -> dict[str, Any]:
    """Milliseconds a step of the three."""
    numels = bert_large() if numels is None else numels
    own = {"lr": LR, "weight_decay": WEIGHT_DECAY, "fused": True}
    made: dict[str, Callable[[], Callable[[], object]]] = {
        "onebit": lambda: local_work(numels, device, ("compress", "average", "adam_update")),
        "adamw_fused": lambda: torch.optim.AdamW(parameters(numels, device), **own).step,  # type: ignore[arg-type]
        "eager": lambda: EagerOneBitAdam(parameters(numels, device)).step,
    }
    milliseconds = {name: 1e3 * _seconds(make(), device, repeats) for name, make in made.items()}
    return {"parameters": len(numels), "elements": sum(numels), "milliseconds": milliseconds}


def targets(step: dict[str, Any]) -> list[Target]:
    ms = step["milliseconds"]
    return [
        Target("AdamW(fused)'s speed: local work of BERT-Large's step", ms["adamw_fused"] / ms["onebit"], 1.0),
        Target("the eager operations' speed: local work of BERT-Large's step", ms["eager"] / ms["onebit"], 8.0),
    ]


def table(step: dict[str, Any]) -> str:
    head = f"BERT-Large, {step['parameters']} parameters, {step['elements']:,} elements: milliseconds of a step"
    return "\n".join([head, *(f"{name:<12} {ms:8.3f}" for name, ms in step["milliseconds"].items())])


class EagerOneBitAdam:
    """The same step as eager operations on flat buffers, with one scale a message: what a straightforward
    implementation does. No message is sent: this rank gets its own messages back.
    """

    def __init__(self, params: Sequence[Tensor], ranks: int = RANKS) -> None:
        self.params, self.ranks = params, ranks
        self.sizes = [p.numel() for p in params]
        device, numel = params[0].device, sum(self.sizes)
        self.padding = -numel % (8 * ranks)
        self.exp_avg = torch.zeros(numel + self.padding, device=device)
        self.exp_avg_sq = torch.ones(numel, device=device)
        self.residual = torch.zeros_like(self.exp_avg)
        self.server_residual = torch.zeros(len(self.exp_avg) // ranks, device=device)
        self.shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def step(self) -> None:
        grads = torch.cat([p.grad.view(-1) for p in self.params if p.grad is not None])
        grads = torch.nn.functional.pad(grads, (0, self.padding))
        self.exp_avg.mul_(BETA1).add_(grads, alpha=1 - BETA1)
        message, scale = self._compress(self.exp_avg + self.residual, self.residual)
        received = self._decode(message, scale).view(self.ranks, -1).mean(0)
        reply, reply_scale = self._compress(received + self.server_residual, self.server_residual)
        self.exp_avg.copy_(self._decode(reply, reply_scale).repeat(self.ranks))
        m = self.exp_avg[: len(self.exp_avg_sq)]
        update = list((m / (self.exp_avg_sq.sqrt() + EPS)).split(self.sizes))
        values = [p.detach().view(-1) for p in self.params]
        torch._foreach_add_(update, values, alpha=WEIGHT_DECAY)
        torch._foreach_add_(values, update, alpha=-LR)

    def _compress(self, c: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        scale = c.norm() / math.sqrt(len(c))
        positive = c >= 0
        residual.copy_(c - scale * positive.float().mul_(2).sub_(1))
        bits = positive.to(torch.uint8).view(-1, 8) << self.shifts
        return bits.sum(1, dtype=torch.uint8), scale

    def _decode(self, message: Tensor, scale: Tensor) -> Tensor:
        bits = (message[:, None] >> self.shifts) & 1
        return bits.view(-1).float().mul_(2).sub_(1).mul_(scale)


def _seconds(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds a step in a run of ten, which hides the host's work behind the device's: torch's is the larger."""

    def ten() -> None:
        for _ in range(10):
            step()

    return timing(ten, device, repeats).seconds / 10

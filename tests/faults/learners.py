"""What hosts train, and by which optimizer: one of onebit, or torch's AdamW beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onebit
from onebit.collectives import CollectiveError

BATCH = 48  # samples of a step, on 2, 3 or 4 hosts
HELD_OUT = 4096
SILENT = 2.0  # seconds after which a silent host counts as gone
LR = 4e-3
KINDS = ("ZeroOneAdam", "ZeroOneAdam, direct", "ZeroOneAdam, local steps", "OneBitAdam", "OneBitLamb", "AdamW")


def options_of(kind: str, steps: int) -> dict[str, Any]:
    """Options of a kind of optimizer, so that its run of so many steps meets all of its kinds of steps."""
    if kind.startswith("OneBit"):
        return {"freeze_step": steps // 5}
    if kind.endswith("direct"):
        return {"reply": "direct"}
    if kind.endswith("local steps"):
        return {"var_freeze_step": steps // 4, "local_step_scaler": steps // 8}
    return {}


@dataclass(frozen=True)
class Task:
    """What is trained."""

    kind: str  # of KINDS
    seed: int
    steps: int

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def samples(self, number: int, count: int) -> tuple[Tensor, Tensor]:
        """The samples with this number, of a stream that follows from the seed."""
        data = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        x = torch.randn(count, 16, generator=data)
        wave = torch.sin(x @ torch.linspace(-0.5, 0.5, 16)) + x[:, 0] * x[:, 1]
        return x, (wave + 0.1 * torch.randn(count, generator=data)).unsqueeze(1)

    def lr(self, number: int) -> float:
        return LR * (1 - number / self.steps)

    def learner(self, params: list[Tensor]) -> Ours | Theirs:
        return Theirs(params) if self.kind == "AdamW" else Ours(params, self)


class Ours:
    """An optimizer of onebit."""

    def __init__(self, params: list[Tensor], task: Task) -> None:
        of_kind = options_of(task.kind, task.steps)
        algorithm = getattr(onebit, task.kind.partition(",")[0])
        self.optimizer = algorithm(params, lr=LR, weight_decay=0.01, elastic=True, **of_kind)
        self.giver: Any = None

    @property
    def steps(self) -> int:
        return int(self.optimizer.steps + self.optimizer.skipped_steps)

    @property
    def shared(self) -> Any:
        """What all ranks have the same now."""
        with self.optimizer.at_last_sync():
            return [p.detach().clone() for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def address(self) -> str:
        return str(self.giver.address)

    def follow(self, addresses: list[str]) -> None:
        for address in addresses:
            try:
                onebit.follow(self.optimizer, address)
                return
            except CollectiveError:
                pass  # the giver died, or its ranks changed

    def reform(self) -> None:
        onebit.reform(self.optimizer, dist.group.WORLD)
        if self.giver is None:
            self.giver = onebit.Giver(self.optimizer)

    def step(self) -> None:
        self.optimizer.step()

    def end(self) -> None:
        self.optimizer.synchronize()


class Theirs:
    """torch's AdamW with the mean of all gradients. After a change of ranks all get the state of one that is ahead."""

    address = ""

    def __init__(self, params: list[Tensor]) -> None:
        self.params, self.steps = params, 0
        self.optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=0.01)
        for p in params:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[p] = {"step": torch.tensor(0.0), **moments}

    @property
    def shared(self) -> list[Tensor]:
        return [t.detach() for p in self.params for t in (p, *self.optimizer.state[p].values())]

    def follow(self, addresses: list[str]) -> None:
        """The state comes when this rank joins."""

    def reform(self) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.steps)
        state = self.shared
        flat = torch.cat([t.flatten() for t in state])
        dist.broadcast(flat, everyone.index(max(everyone)))
        for t, new in zip(state, flat.split([t.numel() for t in state]), strict=True):
            t.copy_(new.view_as(t))
        self.steps = max(everyone)

    def step(self) -> None:
        flat = torch.cat([p.grad.flatten() for p in self.params if p.grad is not None])
        dist.all_reduce(flat)
        means = (flat / dist.get_world_size()).split([p.numel() for p in self.params])
        for p, mean in zip(self.params, means, strict=True):
            p.grad = mean.view_as(p)
        self.optimizer.step()
        self.steps += 1

    def end(self) -> None:
        """All have the same."""

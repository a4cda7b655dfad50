"""Lightning's Trainer: `Trainer(strategy="ddp", callbacks=[OneBitCallback()])`.

A checkpoint of Lightning is one file that rank 0 writes and all ranks read. This callback puts the residuals of all
ranks into it: of N ranks 4 N bytes an element, which pass through rank 0's memory and, when it is read, every rank's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from onebit.checkpoint.names import rank_of, server_rank_of
from onebit.collectives.agreement import all_gather_json
from onebit.collectives.transport.torch import TorchTransport
from onebit.integrations.whole_state import attach_if_distributed, warn_of_total
from onebit.log import tell
from onebit.optimizers.optimizer import OneBitOptimizer

_SAVING = "gathering the residuals of all ranks (all-gather of their sizes)"


class OneBitCallback(Callback):
    """Attaches the optimizer of onebit that `configure_optimizers` returns to the model that Lightning has wrapped,
    makes checkpoints hold the state of every rank, so that `ckpt_path` goes on bit for bit, and logs
    `optimizer.report()` at the end."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = _optimizers(trainer).values()
        if not found:
            raise TypeError(
                "OneBitCallback needs an optimizer of onebit, such as OneBitAdam: configure_optimizers returned none"
            )
        for optimizer in found:
            attach_if_distributed(trainer.strategy.model, optimizer)
            warn_of_total(optimizer, trainer.estimated_stepping_batches)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        for i, optimizer in _optimizers(trainer).items():
            states[i] = _of_all_ranks(optimizer, states[i])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in _optimizers(trainer).values() if trainer.is_global_zero else ():
            report = optimizer.report()
            for each in trainer.loggers:
                each.log_metrics(report.numbers(), step=trainer.global_step)
            tell("%s", report)


def _optimizers(trainer: Trainer) -> dict[int, OneBitOptimizer]:
    """Those of onebit, by their place among all."""
    return {i: each for i, each in enumerate(trainer.optimizers) if isinstance(each, OneBitOptimizer)}


def _of_all_ranks(optimizer: OneBitOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    """On rank 0 its state, and with it what every other rank has of its own; elsewhere `state`. A collective call."""
    transport, device = optimizer.setup.topology.everyone, optimizer.setup.device
    if not isinstance(transport, TorchTransport):
        return state
    device = torch.device("cpu") if "cpu" in transport.backends else device
    group: Any = transport.group
    first, *others = (dist.get_global_rank(group, rank) for rank in range(transport.size))
    own = {
        (key, name): value
        for key, of_parameter in state["state"].items()
        for name, value in of_parameter.items()
        if rank_of(name) is not None or server_rank_of(name) is not None
    }
    shapes = all_gather_json(
        transport, optimizer.setup.device, [[*each, list(value.shape)] for each, value in own.items()], _SAVING
    )
    if transport.rank > 0:
        for value in own.values():
            dist.send(value.to(device).contiguous(), first, group)
        return state
    merged = {key: dict(of_parameter) for key, of_parameter in state["state"].items()}
    for rank, of_rank in zip(others, shapes[1:], strict=True):
        for key, name, shape in of_rank:
            value = torch.empty(shape, dtype=torch.float32, device=device)
            dist.recv(value, rank, group)
            merged[key][name] = value.cpu()
    return {**state, "state": merged}

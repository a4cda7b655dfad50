"""Lightning's Trainer: `Trainer(strategy="ddp", callbacks=[OneBitCallback()])`.

A checkpoint of Lightning is one file that rank 0 writes and all ranks read. This callback puts the residuals of all
ranks into it: of N ranks 4 N bytes an element, which pass through rank 0's memory and, when it is read, every rank's.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from onebit.collectives.transport.torch import TorchTransport
from onebit.elastic.moving import receive_residuals, send_residuals
from onebit.integrations.whole_state import attach_if_distributed, warn_of_total
from onebit.kernels.log import tell
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.warning import warn


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
        if trainer.gradient_clip_val and not is_overridden("configure_gradient_clipping", pl_module):
            warn(
                f"gradient_clip_val={trainer.gradient_clip_val}: after stage 1 Lightning clips each rank's gradient by "
                f"that rank's norm. For one norm on all ranks define configure_gradient_clipping in the "
                f"LightningModule, and call optimizer.clip_grad_norm_ in it"
            )

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
    if transport.rank > 0:
        send_residuals(transport, 0, transport.rank, state["state"].values(), device)
        return state
    merged = {key: dict(of_parameter) for key, of_parameter in state["state"].items()}
    for rank in range(1, transport.size):
        _, residuals = receive_residuals(transport, rank, device, kept=torch.device("cpu"))
        for of_parameter, theirs in zip(merged.values(), residuals, strict=True):
            of_parameter |= theirs
    return {**state, "state": merged}

"""Lightning's Trainer: `Trainer(strategy="ddp", callbacks=[OneBitCallback()])`.

A checkpoint of Lightning is one file that rank 0 writes and all ranks read. Before it is written, this callback makes
one state of those of all ranks.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from onebit.integrations.attaching import attach_if_distributed, warn_of_total
from onebit.kernels.log import tell
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.warning import warn


class OneBitCallback(Callback):
    """Attaches the optimizer of onebit that `configure_optimizers` returns to the model that Lightning has wrapped,
    synchronizes it before a checkpoint, so that `ckpt_path` goes on bit for bit, and logs `optimizer.report()` at the
    end."""

    def __init__(self) -> None:
        self._optimizers: list[OneBitOptimizer] = []

    def state_dict(self) -> dict[str, Any]:
        """Synchronize the optimizers; the callback itself has no state. Lightning calls this in
        `Trainer.save_checkpoint` alone, which ends in a barrier of all ranks, and before it asks for the optimizers'
        states; of the model it has the tensors themselves by then."""
        for optimizer in self._optimizers:
            optimizer.synchronize()
        return {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._optimizers = found = [each for each in trainer.optimizers if isinstance(each, OneBitOptimizer)]
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

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in self._optimizers if trainer.is_global_zero else ():
            report = optimizer.report()
            for each in trainer.loggers:
                each.log_metrics(report.numbers(), step=trainer.global_step)
            tell("%s", report)

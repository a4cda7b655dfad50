"""HuggingFace's Trainer: `OneBitTrainer` in the place of `Trainer`.

The Trainer tells a callback neither the model that it has wrapped nor the folder that it resumes from, so that this is
a subclass. It is one to mix in as well: `class MyTrainer(OneBitTrainer, SFTTrainer)`.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from onebit.integrations.attaching import attach_if_distributed, warn_of_total
from onebit.kernels.log import tell
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.unwrap import own_optimizer


class OneBitTrainer(Trainer):
    """A Trainer whose optimizer is one of onebit, given as ever: `optimizers=(optimizer, schedule)`, or
    `optimizer_cls_and_kwargs=(onebit.OneBitAdam, {...})`.

    It attaches the optimizer as training begins, and synchronizes it before each checkpoint, so that
    `resume_from_checkpoint` goes on bit for bit. `max_grad_norm` clips by one norm on all ranks. Rank 0 logs
    `optimizer.report()` at the end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_AttachAndReport(self))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The model is written first, and local steps have moved it on every rank alone."""
        own_optimizer(self.optimizer, "OneBitTrainer").synchronize()
        super()._save_checkpoint(model, trial)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Call `optimizer.clip_grad_norm_`: Accelerate's has each rank's own norm in stage 2."""
        self.accelerator.unscale_gradients()
        return own_optimizer(self.optimizer, "OneBitTrainer").clip_grad_norm_(self.args.max_grad_norm)


for _name in ("_save_checkpoint", "_clip_grad_norm"):
    if not hasattr(Trainer, _name):
        raise ImportError(
            f"this version of transformers has no Trainer.{_name}, which OneBitTrainer replaces. Install the newest "
            f"transformers 5, or write a loop of your own with onebit.save and onebit.load"
        )


class _AttachAndReport(TrainerCallback):
    def __init__(self, trainer: OneBitTrainer) -> None:
        self._trainer = trainer
        self._attached: list[Any] = []

    @property
    def _own_optimizer(self) -> OneBitOptimizer:
        return own_optimizer(self._trainer.optimizer, "OneBitTrainer")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = self._trainer.model_wrapped, self._own_optimizer
        warn_of_total(optimizer, state.max_steps)
        if [id(each) for each in self._attached] != [id(model), id(optimizer)]:  # train may be called again
            attach_if_distributed(model, optimizer)
            self._attached = [model, optimizer]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        report = self._own_optimizer.report()
        self._trainer.log(report.numbers())
        if state.is_world_process_zero:
            tell("%s", report)

"""Parameters that the optimizer has and nobody trains: losses stay where they are, and nothing else says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from onebit.optim.param_groups import Groups
from onebit.optim.setup import Setup
from onebit.warning import warn

STEPS = 5  # without a gradient, before that is told
_SHOWN = 3  # names
_PEFT = (
    "A trainer with peft_config (LoRA in trl) freezes the model: give it optimizer_cls_and_kwargs=(onebit.OneBitAdam, "
    "{...}) in place of optimizers, and it builds the optimizer afterwards. Or give no peft_config, call peft's "
    "get_peft_model first, then build the optimizer with [p for p in model.parameters() if p.requires_grad]"
)


class Untrained:
    """Looks at the first steps of a process."""

    def __init__(self, groups: Groups) -> None:
        self._trained = [p for group in groups for p in group["params"] if p.requires_grad]  # as it is built
        self._without = self._trained  # a gradient, in any step so far
        self._steps = 0

    @property
    def is_over(self) -> bool:
        return self._steps == STEPS

    def warnings(self, setup: Setup) -> list[Callable[[], None]]:
        """Return what rank 0 warns of when the step is over. A step calls this before it changes gradients."""
        self._without = [p for p in self._without if p.grad is None and p.requires_grad]
        self._steps += 1
        frozen = [p for p in self._trained if not p.requires_grad] if self._steps == 1 else []
        if setup.topology.everyone.rank > 0:
            return []
        if frozen:
            what = "no step changes anything" if len(frozen) == len(self._trained) else "these do not train"
            why = f"were frozen (requires_grad=False) after the optimizer was built: {what}"
            return [self._warning(setup, frozen, why)]
        if self.is_over and self._without:
            why = f"have had no gradient in {STEPS} steps: these do not train. If that is meant, leave them out"
            return [self._warning(setup, self._without, why)]
        return []

    def _warning(self, setup: Setup, params: Sequence[Tensor], why: str) -> Callable[[], None]:
        names = ", ".join(setup.name_of(p) for p in params[:_SHOWN]) + ", ..." * (len(params) > _SHOWN)
        return partial(warn, f"{len(params)} of {len(self._trained)} parameters ({names}) {why}. {_PEFT}")

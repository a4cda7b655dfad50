"""What an optimizer of this library has to define. All else follows from it: averaging, stages, saving and loading,
the watch over the ranks, overlap with backward.

    stage 1    full_step          on the averaged gradient
    freeze     on_freeze          what stage 2 keeps of the state of stage 1
    stage 2    compressed_step    m = reducer.all_reduce(...), then the update
               spaced_full_step   on the averaged gradient, at the steps for which full_step_due says so

Every method works on one flat state: the parameters of one dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from onebit.kernels.data.hyper import Hyper
from onebit.optim import param_groups
from onebit.optim.fields import MOMENTUM, RESIDUAL, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import FixedStep, FreezeRule
from onebit.optim.options import Options
from onebit.optim.param_groups import Group
from onebit.optim.reducer import MomentumReducer


class Algorithm(ABC):
    """One update rule with 1-bit averaging of its momentum, which is the field "exp_avg" of stage 1.

    At the freeze exp_avg, multiplied by beta1, becomes the field "residual": with no message received yet the first
    compressed step adds it where it would have read the momentum.
    """

    stage_1: ClassVar[tuple[Field, ...]] = (MOMENTUM,)
    stage_2: ClassVar[tuple[Field, ...]] = (RESIDUAL,)

    needs_previous_momentum: ClassVar[bool] = False
    """Whether compressed_step reads `reducer.previous`, the momentum of the step before."""

    uses_step_number: ClassVar[bool] = False
    """Whether a step of stage 2 depends on how many were taken before."""

    @abstractmethod
    def full_step(self, state: FlatState, hyper: Tensor, flags: Tensor) -> None:
        """Stage 1. Where flags, int32 [1], is not 0 nothing may change."""

    @abstractmethod
    def compressed_step(self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        """Stage 2. The replies carry the flag: the passes that read them change nothing where it is set."""

    def full_step_due(self, step: int) -> bool:
        """Stage 2: whether step number `step` is in full precision. It can be with `uses_step_number` alone."""
        return False

    def spaced_full_step(
        self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor, options: Options
    ) -> None:
        """Stage 2, where `full_step_due` says so: a step on the averaged gradient. Where flags is not 0 nothing may
        change."""
        raise NotImplementedError(f"{type(self).__name__} has no full-precision steps in stage 2")

    def hyper(self, group: Group, step: int, bias_correction: bool) -> Hyper:
        """A param group's numbers at step number `step`, of which the first is 1."""
        return param_groups.hyper_of(group, step, bias_correction)

    def freeze_rule(self, options: Options, window: int, states: Sequence[FlatState]) -> FreezeRule:
        """When stage 1 ends. window: steps between what freeze_step="auto" compares."""
        return FixedStep(options.freeze_step, window)

    def scratch(self, state: FlatState) -> dict[str, Tensor]:
        """What passes work in, for the layout as it is now."""
        return {}

    def check_freeze(self, states: Sequence[FlatState], steps: int) -> None:
        """A ValueError where stage 2 can't begin after `steps` steps. Nothing has changed yet."""
        return None

    def on_freeze(self, state: FlatState, rows: Sequence[Hyper], options: Options) -> Mapping[int, int]:
        """Turn the other fields of stage 1 into those of stage 2, with each param group's numbers at this step.

        The result: of each parameter with coordinates that had no variance, how many.
        """
        return {}

    def live(self, state: FlatState) -> Tensor | None:
        """Stage 2: bool [elements], where coordinates take part; None where all do."""
        return None

    def gamma(self, state: FlatState) -> Tensor | None:
        """Stage 2: fp32 [parameters], what the messages of each parameter are multiplied by; None for 1."""
        return None

    def settings(self) -> Mapping[str, float | str]:
        """What all ranks must have in common, beyond the options of every optimizer."""
        return {}

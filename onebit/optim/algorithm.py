"""What an optimizer of this library has to define. All else follows from it: averaging, stages, saving and loading,
the watch over the ranks, overlap with backward.

    stage 1    full_step          on the averaged gradient
    freeze     on_freeze          what stage 2 keeps of the state of stage 1
    stage 2    kind says of each step what it is
               compressed_step    m is reducer.replies, averaged already
               spaced_full_step   on the averaged gradient
               local_steps        on each rank's own gradient, between two exchanges

Every method works on one flat state: the parameters of one dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from onebit.kernels.data.hyper import Hyper
from onebit.optim import param_groups
from onebit.optim.fields import MOMENTUM, RESIDUAL, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import FixedStep, StageRule
from onebit.optim.local_steps import LocalSteps as LocalSteps
from onebit.optim.options import Options
from onebit.optim.param_groups import Group
from onebit.optim.reducer import MomentumReducer

Kind = Literal["full", "1 bit", "local", "sync"]
"""The kind of a step: on the averaged gradient, on the compressed momentum, on a rank's own gradient, and that with an
exchange afterwards, after which all ranks agree again."""


class Algorithm(ABC):
    """One update rule with 1-bit averaging of its momentum, which is the field "exp_avg" of stage 1.

    At the freeze exp_avg, multiplied by beta1, becomes the field "residual": with no message received yet the first
    compressed step adds it where it would have read the momentum.

    Methods get a flat state, which has the parameters of one dtype; the reducer, which averages its momentum; hyper,
    the numbers of param groups, fp32 [groups, numbers]; and flags, int32 [1]: not 0 if the step is to change nothing.
    """

    stage_1: tuple[Field, ...] = (MOMENTUM,)
    stage_2: tuple[Field, ...] = (RESIDUAL,)

    needs_previous_momentum: ClassVar[bool] = False
    """True if compressed_step reads `reducer.previous`, the momentum of the step before."""

    uses_step_number: ClassVar[bool] = False
    """True if a step of stage 2 depends on how many were taken before."""

    shortened_to: ClassVar[float | None] = None
    """A step by m that is longer than so many times what is usual for a parameter, and longer than `trusted_step`, is
    made so long. None: steps are never made shorter. See `onebit.optim.limit`."""

    trusted_step: ClassVar[float] = 0.0
    """A step of at most so many times what is usual is left as it is."""

    def saved_fields(self, compressed: bool) -> list[Field]:
        """What a state has of every parameter: the same in both stages. compressed: whether stage 2 is for it."""
        fields = (*self.stage_1, RESIDUAL, *self.stage_2) if compressed else self.stage_1
        return list({field.name: field for field in fields if field.saved}.values())

    def save_derived(self, state: FlatState, index: int, group: Group, steps: int) -> dict[str, Tensor]:
        """Stage 2: saved fields of stage 1 of one parameter, as they follow from those of stage 2."""
        return {}

    def load_derived(self, state: FlatState, index: int, saved: Mapping[str, Tensor], group: Group, steps: int) -> None:
        """The reverse: fields of stage 2 that are not saved."""
        return None

    @abstractmethod
    def full_step(self, state: FlatState, hyper: Tensor, flags: Tensor) -> None:
        """Stage 1. Where flags, int32 [1], is not 0 nothing may change."""

    @abstractmethod
    def compressed_step(self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        """Stage 2: m has been averaged, `reducer.replies` are the new one. They carry the flag: the passes that read
        them change nothing where it is set."""

    def kind(self, step: int) -> Kind:
        """Stage 2: of step number `step`. Other kinds than this one need `uses_step_number`."""
        return "1 bit"

    def spaced_full_step(
        self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor, options: Options
    ) -> None:
        """Stage 2: a step on the averaged gradient. Where flags is not 0 nothing may change."""
        raise NotImplementedError(f"{type(self).__name__} has no full-precision steps in stage 2")

    def local_steps(self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, step: int) -> LocalSteps:
        """Stage 2: before the first local step, of number `step`, of this process."""
        raise NotImplementedError(f"{type(self).__name__} has no local steps")

    def hyper(self, group: Group, step: int, bias_correction: bool) -> Hyper:
        """A param group's numbers at step number `step`, of which the first is 1."""
        return param_groups.hyper_of(group, step, bias_correction)

    def freeze_rule(self, options: Options, window: int, states: Sequence[FlatState]) -> StageRule:
        """The rule that ends stage 1. window: steps between what a FreezeRule compares."""
        return FixedStep(options.fixed_freeze_step, window)

    def scratch(self, state: FlatState) -> dict[str, Tensor]:
        """What passes work in, for the layout as it is now."""
        return {}

    def check_uncompressed(self) -> None:
        """A ValueError where some param groups can't have compress=False."""
        return None

    def check_freeze(self, states: Sequence[FlatState], steps: int) -> None:
        """A ValueError where stage 2 can't begin after `steps` steps. Nothing has changed yet."""
        return None

    def on_freeze(self, state: FlatState, rows: Sequence[Hyper], options: Options) -> Mapping[int, int]:
        """Turn the other fields of stage 1 into those of stage 2, with each param group's numbers at this step.

        The result: of each parameter with elements that had no variance, how many.
        """
        return {}

    def without_variance(self, state: FlatState, step: int) -> Mapping[int, int]:
        """Stage 2: where no step after this one, of number `step`, updates the variance, of each parameter with
        elements that have none, how many."""
        return {}

    def momentum_becomes_residual(self, state: FlatState, step: int, beta1s: Sequence[float]) -> None:
        """Turn momentum into the residual at the freeze, before step number `step`: beta1 m, a parameter each, is what
        was left out."""
        for i, beta1 in enumerate(beta1s):
            state.view(MOMENTUM.name, i).mul_(beta1)
        state.rename(MOMENTUM.name, RESIDUAL)

    def adopt_variance(self, state: FlatState, steps: int, beta2s: Sequence[float]) -> None:
        """Stage 1, loaded from another optimizer after so many steps, such as torch.optim.AdamW: the weights of all
        gradients in v add up to 1 - beta2^steps, a parameter each."""
        return None

    def live(self, state: FlatState) -> Tensor | None:
        """Stage 2: bool [elements], where elements take part; None where all do."""
        return None

    def sum_squares_of_d(self, state: FlatState, hyper: Tensor) -> Tensor:
        """Stage 2, with `shortened_to`: fp32 [blocks], the squares of d, by which a step multiplies m, added up over
        every block. Asked for again after `UpdateLimit.variance_was_updated`."""
        raise NotImplementedError(f"{type(self).__name__} has shortened_to, and no sum_squares_of_d")

    def gamma(self, state: FlatState) -> Tensor | None:
        """Stage 2: fp32 [parameters], what the messages of each parameter are multiplied by; None for 1."""
        return None

    def last_momentum(self, state: FlatState, reducer: MomentumReducer, into: Tensor | None = None) -> list[Tensor]:
        """Stage 2: m as the last message has it, fp32, a tensor a parameter. into: see `MomentumReducer.momentum`."""
        return reducer.momentum(into)

    def start_from_momentum(self, state: FlatState, reducer: MomentumReducer) -> None:
        """Stage 2: before a local step, where "exp_avg" has m and no message does."""
        raise NotImplementedError(f"{type(self).__name__} has no local steps")

    def settings(self) -> Mapping[str, float | str]:
        """What all ranks must have in common, beyond the options of every optimizer; saved with the state."""
        return {}

    def check_saved_settings(self, saved: Mapping[str, Any], steps: int) -> None:
        """A ValueError where a run of so many steps with these settings can't go on with those that are here."""
        return None

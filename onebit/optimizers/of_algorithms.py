"""The optimizers of the library: each hands over an algorithm and the defaults of its param groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from onebit.optim.adam import Adam
from onebit.optim.algorithm import Kind
from onebit.optim.lamb import Lamb, Ratio
from onebit.optim.options import OptionArguments, shows_options
from onebit.optim.zero_one import ZeroOne
from onebit.optimizers.optimizer import OneBitOptimizer

Rate = float | Tensor
Betas = tuple[float, float]


@shows_options
class OneBitAdam(OneBitOptimizer):
    """AdamW that, once its variance has settled, averages momentum with 1 bit an element instead of gradients.

        optimizer = onebit.OneBitAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        onebit.attach(ddp_model, optimizer)        # with DDP; without it the optimizer communicates alone

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; betas, eps, lr and weight_decay by param group.
    """

    algorithm: ClassVar[type[Adam]] = Adam

    def __init__(
        self, params: Iterable[Any], lr: Rate = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, **options: Unpack[OptionArguments],
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, self.algorithm(), **options)


@shows_options
class OneBitLamb(OneBitOptimizer):
    """LAMB that, once its coefficients have settled, averages momentum with 1 bit an element instead of gradients.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; betas, eps, lr and weight_decay by param group.
    coeff_beta: how the coefficients of stage 1 are averaged. min_coeff, max_coeff: their bounds in stage 1.
    factor_min, factor_max, factor_threshold: bounds of the ratio in stage 2, and of its relative change in a step.
    ratio: of the variances (Algorithm 1, line 17), or of the denominators, as DeepSpeed computes it.
    """

    algorithm: ClassVar[type[Lamb]] = Lamb

    def __init__(
        self, params: Iterable[Any], lr: Rate = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, coeff_beta: float = 0.9, min_coeff: float = 0.01, max_coeff: float = 0.3,
        factor_min: float = 0.5, factor_max: float = 4.0, factor_threshold: float = 0.1, ratio: Ratio = "variance",
        **options: Unpack[OptionArguments],
    ) -> None:  # fmt: skip
        bounds = coeff_beta, min_coeff, max_coeff, factor_min, factor_max, factor_threshold
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, self.algorithm(*bounds, ratio), **options)


class Schedule(NamedTuple):
    """What the coming steps are."""

    step: int  # the number of the coming one
    kind: Kind
    next_full_step: int | None  # the next after it
    next_sync: int | None  # with local steps: this one or the next after it with which ranks agree again


@shows_options
class ZeroOneAdam(OneBitOptimizer):
    """AdamW that averages gradients at a few steps, ever farther apart, and momentum at all others, with 1 bit each.

        optimizer = onebit.ZeroOneAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        onebit.attach(ddp_model, optimizer)        # with DDP; without it the optimizer communicates alone

    The first var_update_scaler + 1 steps are AdamW's. Then compressed steps begin, with var_update_scaler
    full-precision ones 2 steps apart, as many 4 steps apart, and so on: of 1,200 steps 33, where it is 4.

    With local_step_scaler ranks do not communicate in every step after var_freeze_step: each moves by its own gradient
    until the next exchange (`schedule`, `synchronized`), after which all have the same parameters again.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; betas, eps, lr and weight_decay by param group.
    var_update_scaler: how many full-precision steps come before their distance doubles.
    var_freeze_step: no full-precision step comes after this one; None for no end.
    local_step_scaler: after var_freeze_step so many steps are compressed ones; after as many again the distance between
        two exchanges doubles. None: every step communicates.
    local_step_clipper: the most steps from one exchange to the next.
    """

    without_options: ClassVar[frozenset[str]] = frozenset({"freeze_step"})

    def __init__(
        self, params: Iterable[Any], lr: Rate = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, var_update_scaler: int = 4, var_freeze_step: int | None = None,
        local_step_scaler: int | None = None, local_step_clipper: int = 16, **options: Unpack[OptionArguments],
    ) -> None:  # fmt: skip
        self._algorithm = ZeroOne.of(var_update_scaler, var_freeze_step, local_step_scaler, local_step_clipper)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, self._algorithm, **options)

    @property
    def schedule(self) -> Schedule:
        """What the coming step is, the next full-precision one after it, and the next exchange. Reading it waits for
        the device."""
        algorithm, coming = self._algorithm, self.steps + 1
        syncs = algorithm.syncs
        return Schedule(
            coming,
            algorithm.kind(coming),
            algorithm.schedule.next_full(coming),
            None if syncs is None else syncs.next_sync(coming - 1),
        )

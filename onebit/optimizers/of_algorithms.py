"""The optimizers of the library: each passes an algorithm and the defaults of its param groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """AdamW until its variance has settled; from then on ranks average momentum, and send 1 bit for each element.

        optimizer = onebit.OneBitAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        onebit.attach(ddp_model, optimizer)        # with DDP; without DDP the optimizer communicates alone

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; all but params by param group.
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
    """LAMB until its coefficients have settled; from then on ranks average momentum, and send 1 bit for each element.

        optimizer = onebit.OneBitLamb(model.parameters(), lr=2e-3, weight_decay=0.01)
        onebit.attach(ddp_model, optimizer)        # with DDP; without DDP the optimizer communicates alone

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; all but params by param group.
        coeff_beta: how the coefficients of stage 1 are averaged.
        min_coeff, max_coeff: bounds of the coefficients in stage 1.
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
    """AdamW whose ranks average gradients in a few steps, and in all other steps momentum, with 1 bit for each element.

        optimizer = onebit.ZeroOneAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        onebit.attach(ddp_model, optimizer)        # with DDP; without DDP the optimizer communicates alone

    The first var_update_scaler + 1 steps are AdamW's. Compressed steps follow. Among them var_update_scaler steps of
    full precision lie 2 steps apart, then var_update_scaler steps 4 apart, then 8. With var_update_scaler=4 a run of
    1,200 steps has 33 steps of full precision.

    With local_step_scaler ranks do not communicate in every step after var_freeze_step. Each rank then moves by its own
    gradient; after the next exchange all ranks have the same parameters (`schedule`, `synchronized`).

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; all but params by param group.
        var_update_scaler: full-precision steps before their distance doubles.
        var_freeze_step: the last step that may be of full precision; None: there is no last one.
        local_step_scaler: steps after var_freeze_step until local steps begin; after as many steps again, and again,
            the distance of two exchanges doubles. None: every step communicates.
        local_step_clipper: the most steps from one exchange to the next.
    """

    without_options: ClassVar[Mapping[str, str]] = {
        "freeze_step": "stage 1 is short here; var_freeze_step=N ends full-precision steps after step N"
    }

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

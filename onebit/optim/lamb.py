"""1-bit LAMB (paper 003, Algorithm 1).

stage 1    u = mhat / (sqrt(vhat) + eps) + wd x;  c = clip(||x|| / ||u||);  x = x - lr c u
           c_avg = b3 c_avg + (1-b3) c
stage 2    m = compressed_all_reduce(b1 m + (1-b1) g_i);  ghat = (m - b1 m_prev) / (1-b1)
           v = b2 v + (1-b2) ghat^2;  r = clip(max v_T / v);  x = x - lr (r c_avg) (m d + wd x)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor

from onebit.kernels.data.wire import is_one_of
from onebit.optim.flat_state import Space
from onebit.optim.freeze import CoefficientRule
from onebit.optim.lamb_state import LambSpace
from onebit.optim.optimizer import OneBitOptimizer
from onebit.optim.options import is_number

Ratio = Literal["variance", "denominator"]


class OneBitLamb(OneBitOptimizer):
    """LAMB that, once its coefficients have settled, averages momentum with 1 bit an element instead of gradients.

    coeff_beta: how the coefficients of stage 1 are averaged. min_coeff, max_coeff: their bounds in stage 1.
    factor_min, factor_max, factor_threshold: bounds of the ratio in stage 2, and of its relative change in a step.
    ratio: of the variances (Algorithm 1, line 17), or of the denominators, as DeepSpeed computes it.
    The other arguments are those of OneBitAdam; freeze_step="auto" looks at the coefficients.
    """

    _space_type: ClassVar[type[Space]] = LambSpace

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        coeff_beta: float = 0.9,
        min_coeff: float = 0.01,
        max_coeff: float = 0.3,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        ratio: Ratio = "variance",
        **options: Any,
    ) -> None:
        _check(coeff_beta, (min_coeff, max_coeff), (factor_min, factor_max), factor_threshold, ratio)
        self._coeff_beta, self._coefficients_from = coeff_beta, 0
        self._stage_1 = {"coeff_beta": coeff_beta, "min_coeff": min_coeff, "max_coeff": max_coeff}
        self._stage_2 = {"factor_min": factor_min, "factor_max": factor_max, "factor_threshold": factor_threshold}
        self._ratio: Ratio = ratio
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def _new_rule(self) -> CoefficientRule:
        o = self._options
        numels = [n for space in self._spaces for n in space.numels]
        return CoefficientRule(
            o.freeze_step, o.freeze_threshold, self._window, self._coeff_beta, self._coefficients_from, numels
        )

    def _warmup(self, space: Space, hyper: Tensor, flags: Tensor) -> None:
        lamb = cast(LambSpace, space).lamb
        space.backend.lamb_warmup(
            space.layout.all(), space.points, space.grads, space.exp_avg, space.exp_avg_sq, space.master, hyper, flags,
            lamb, **self._stage_1,
        )  # fmt: skip

    def _compressed(self, space: Space, hyper: Tensor, flags: Tensor) -> None:
        space = cast(LambSpace, space)
        whole = space.layout.all()
        replies = self._overlap.all_reduce_momentum(space, hyper, flags)
        space.backend.lamb_statistics(
            whole, replies, space.previous(), space.d, space.exp_avg_sq, hyper, space.lamb, **self._stage_2,
            ratio=self._ratio, live=space.counted, gamma=space.gamma,
        )  # fmt: skip
        coefficient = space.lamb.coefficient
        space.backend.adam_update(whole, space.points, space.d, replies, space.master, hyper, coefficient)

    def _freeze(self) -> None:
        averaged = self._steps - self._coefficients_from
        if averaged == 0:
            raise ValueError(
                f"stage 2 is to begin after {self._steps} steps, none of which was LAMB's: there are no coefficients "
                f"to go on with. Give stage 1 some steps, also after loading a variance: "
                f"freeze_step={self._steps + 100}, say"
            )
        super()._freeze()
        for space in self._lamb_spaces:
            space.lamb.average.div_(1 - self._coeff_beta**averaged)

    @property
    def _lamb_spaces(self) -> list[LambSpace]:
        return cast(list[LambSpace], self._spaces)

    @property
    def _listens(self) -> bool:
        """Until the first compressed step was taken, the host has to hear of it."""
        return super()._listens or any(space.dense_momentum is not None for space in self._lamb_spaces)

    def _taken(self, numbers: Sequence[float]) -> None:
        if self._compressing:
            for space in self._lamb_spaces:
                space.forget_dense_momentum()
        else:
            super()._taken(numbers)

    def _facts(self) -> dict[str, float | str]:
        return {**self._stage_1, **self._stage_2, "ratio": self._ratio}

    def _diagnose_more(self, space: Space) -> dict[str, Tensor]:
        lamb = cast(LambSpace, space).lamb
        return {"coefficient": lamb.coefficient} | ({"ratio": lamb.ratio} if self._compressing else {})

    def _save_more(self, space: Space) -> dict[str, list[Tensor]]:
        averaged = torch.tensor(float(self.steps - self._coefficients_from), dtype=torch.float32, device="cpu")
        return {**cast(LambSpace, space).save(), "coefficient_steps": [averaged] * len(space.params)}

    def _load_more(self, space: Space, saved: Sequence[Mapping[str, Any]]) -> None:
        for i, own in enumerate(saved):
            cast(LambSpace, space).load(i, own)

    def _loaded(self, steps: int, saved: Sequence[Mapping[str, Any]]) -> None:
        self._coefficients_from = steps - max((int(own.get("coefficient_steps", 0)) for own in saved), default=0)


def _check(
    coeff_beta: float,
    coefficients: tuple[float, float],
    factors: tuple[float, float],
    threshold: float,
    ratio: str,
) -> None:
    if not is_number(coeff_beta) or not 0 <= coeff_beta < 1:
        raise ValueError(f"coeff_beta={coeff_beta!r}: it averages coefficients and must be at least 0 and below 1")
    for name, (least, most) in (("coeff", coefficients), ("factor", factors)):
        if not is_number(least) or not is_number(most) or not 0 < least <= most:
            raise ValueError(
                f"min and max of {name} are {least!r} and {most!r}: they bound it, and must be above 0, finite, and in "
                f"this order"
            )
    if not is_number(threshold) or not 0 < threshold < 1:
        raise ValueError(
            f"factor_threshold={threshold!r}: it bounds the change of the ratio in a step and must lie between 0 and 1"
        )
    if not is_one_of(ratio, get_args(Ratio)):
        raise ValueError(f"ratio={ratio!r}: it must be one of {get_args(Ratio)}")

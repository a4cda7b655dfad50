"""1-bit LAMB (Li et al. 2021, Algorithm 1).

stage 1    u = mhat / (sqrt(vhat) + eps) + wd x;  c = clip(||x|| / ||u||);  x = x - lr c u
           c_avg = b3 c_avg + (1-b3) c
stage 2    m = compressed_all_reduce(b1 m + (1-b1) g_i);  ghat = (m - b1 m_prev) / (1-b1)
           v = b2 v + (1-b2) ghat^2;  r = clip(max v_T / v);  x = x - lr (r c_avg) (f m d + wd x)

f bounds the step, by the size of r m d: see `limit`.

State in stage 2: residual, d, v, m, m_prev, E: 4 + 4 + 4 + 1/8 + 1/8 + 4/N B an element. v_T comes back from d, so that
it is not kept. m_prev is a copy of the last message, made before the next one comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from onebit.kernels.data.bits import packed
from onebit.kernels.data.checks import is_finite, is_one_of
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.pieces import in_pieces
from onebit.kernels.passes import AdamUpdate, Gradients, LambStatistics, LambWarmup, Parameters
from onebit.optim.adam import DENOMINATOR, Adam
from onebit.optim.fields import JOINED, MOMENTUM, RESIDUAL, VARIANCE, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import StageRule, raise_to_floor_, variance_to_denominator_
from onebit.optim.limit import USUAL
from onebit.optim.options import LARGEST_FLOAT, Options, to_python_numbers
from onebit.optim.reducer import MomentumReducer

Ratio = Literal["variance", "denominator"]

COEFFICIENT = Field("coefficient", "parameter", initial=1.0, required=False, saved=False, shown_as="coefficient")
AVERAGE = Field("coefficient_average", "parameter", "non-negative", required=False)
AVERAGED_STEPS = Field("coefficient_steps", "parameter", "whole", required=False)
RATIO = Field("ratio", "parameter", "non-negative", initial=1.0, required=False, shown_as="ratio")
GAMMA = Field("gamma", "parameter", "non-negative", initial=1.0, required=False, always=False)
COUNTED = Field("counted", "bit", initial=1.0, required=False, always=False)  # where v_T was not 0, if it was anywhere


@dataclass(frozen=True)
class Lamb(Adam):
    """The two updates of 1-bit LAMB. What d is made of, and which elements it leaves out, is as in 1-bit Adam."""

    coeff_beta: float = 0.9
    min_coeff: float = 0.01
    max_coeff: float = 0.3
    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_threshold: float = 0.1
    ratio: Ratio = "variance"

    stage_1 = (MOMENTUM, VARIANCE, COEFFICIENT, AVERAGE, AVERAGED_STEPS, JOINED)
    stage_2 = (RESIDUAL, DENOMINATOR, VARIANCE, COEFFICIENT, AVERAGE, AVERAGED_STEPS, RATIO, GAMMA, COUNTED, USUAL)
    needs_previous_momentum = True
    shortened_to, trusted_step = 1.5, 4.0

    def __post_init__(self) -> None:
        to_python_numbers(self)
        if not is_finite(self.coeff_beta) or not 0 <= self.coeff_beta < 1:
            raise ValueError(
                f"coeff_beta={self.coeff_beta!r}: it averages coefficients and must be at least 0 and below 1"
            )
        bounds = {"coeff": (self.min_coeff, self.max_coeff), "factor": (self.factor_min, self.factor_max)}
        for name, (least, most) in bounds.items():
            if not is_finite(least, LARGEST_FLOAT) or not is_finite(most, LARGEST_FLOAT) or not 0 < least <= most:
                raise ValueError(
                    f"min and max of {name} are {least!r} and {most!r}: they bound it, and must be above 0, finite, "
                    f"and in this order"
                )
        if not is_finite(self.factor_threshold) or not 0 < self.factor_threshold < 1:
            raise ValueError(
                f"factor_threshold={self.factor_threshold!r}: it bounds the change of the ratio in a step and must lie "
                f"between 0 and 1"
            )
        if not is_one_of(self.ratio, get_args(Ratio)):
            raise ValueError(f"ratio={self.ratio!r}: it must be one of {get_args(Ratio)}")

    def full_step(self, state: FlatState, hyper: Tensor, flags: Tensor) -> None:
        of_wholes = None
        if state.parts is not None:
            of_wholes = partial(self._coefficients_of_wholes, state, state["coefficient_average"].clone(), flags)
        state.backend.run(LambWarmup(
            state.layout.all(), Parameters(state.parameters, state.get("master")),
            Gradients(state.gradients, hyper, flags), state["exp_avg"], state["exp_avg_sq"], _lamb_state(state),
            coeff_beta=self.coeff_beta, min_coeff=self.min_coeff, max_coeff=self.max_coeff, between=of_wholes,
        ))  # fmt: skip
        state["coefficient_steps"].add_(flags == 0)

    def compressed_step(self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        whole, m, lamb, d = state.layout.all(), reducer.replies, _lamb_state(state), state["denominator"]
        before = None if state.parts is None else (lamb.ratio.clone(), lamb.coefficient.clone())
        state.backend.run(LambStatistics(
            whole, m, reducer.previous, d, state["exp_avg_sq"], hyper, lamb,
            factor_min=self.factor_min, factor_max=self.factor_max, factor_threshold=self.factor_threshold,
            ratio=self.ratio, live=state.get("counted"), gamma=state.get("gamma"),
        ))  # fmt: skip
        if before is not None:
            self._ratios_of_wholes(state, lamb, *before, m.flags.max() == 0)
        x, clip = Parameters(state.parameters, state.get("master")), reducer.clip(hyper, lamb.ratio)
        state.backend.run(AdamUpdate(whole, x, d, m, hyper, lamb.coefficient, clip))

    def _coefficients_of_wholes(self, state: FlatState, average: Tensor, flags: Tensor) -> None:
        """c and c_avg once more, from the norms of whole parameters. average: c_avg before the step."""
        lamb, taken = _lamb_state(state), flags == 0
        squares = torch.stack([state.of_parameters(by_block) for by_block in lamb.partial])  # in one order on all ranks
        x, u = state.add_parts(squares).sqrt().float()
        c = torch.where((x > 0) & (u > 0), (x / u).clamp(self.min_coeff, self.max_coeff), 1.0)
        lamb.coefficient.copy_(torch.where(taken, c, lamb.coefficient))
        lamb.average.copy_(torch.where(taken, self.coeff_beta * average + (1 - self.coeff_beta) * c, average))

    def _ratios_of_wholes(
        self, state: FlatState, lamb: LambState, ratio: Tensor, coefficient: Tensor, taken: Tensor
    ) -> None:
        """r and c once more, from the maxima over whole parameters. ratio, coefficient: before the step."""
        assert state.parts is not None
        largest = torch.zeros_like(ratio).scatter_reduce_(0, _owner(state), lamb.partial[0], "amax")
        r = state.parts.max_parts(largest)
        r = torch.where(r > 0, r, 1.0)
        r = torch.clamp(r, (1 - self.factor_threshold) * ratio, (1 + self.factor_threshold) * ratio)
        lamb.ratio.copy_(torch.where(taken, r.clamp(self.factor_min, self.factor_max), ratio))
        lamb.coefficient.copy_(torch.where(taken, lamb.ratio * lamb.average, coefficient))

    def on_freeze(self, state: FlatState, rows: Sequence[Hyper], options: Options) -> Mapping[int, int]:
        gamma = state.add(GAMMA) if options.scale == "tensor" else None
        if gamma is not None:
            gamma.copy_(_momentum_scaling(state))
        state.add(DENOMINATOR)
        state.add(COUNTED).zero_()
        without = {}
        for i, group in enumerate(state.groups):
            v, d = (state.elements_of(state[name], i) for name in ("exp_avg_sq", "denominator"))
            h, fixed = rows[group], state.fixed_indices.get(i)
            raise_to_floor_(v.mul_(h.bias2**2), options.variance_floor, state.add_parts)
            state.view(COUNTED.name, i).copy_(packed(v != 0))
            without[i] = variance_to_denominator_(
                d.copy_(v), h._replace(bias2=1.0), options.zero_variance, state.add_parts, fixed
            )
            if gamma is not None:
                d.div_(gamma[i])
                state.view("exp_avg", i).mul_(gamma[i])
        if not any(without.values()):
            state.remove(COUNTED.name)
        state["coefficient_average"].copy_(_debiased(state, self.coeff_beta))
        state.add(RATIO)
        return without

    def freeze_rule(self, options: Options, window: int, states: Sequence[FlatState]) -> CoefficientRule:
        numels = [n for state in states for n in state.whole_numels]
        threshold = options.freeze_rule.threshold
        return CoefficientRule(options.fixed_freeze_step, threshold, window, self.coeff_beta, numels)

    def check_freeze(self, states: Sequence[FlatState], steps: int) -> None:
        if not any(bool((state["coefficient_steps"] > 0).any()) for state in states):
            raise ValueError(
                f"stage 2 is to begin after {steps} steps, none of which was LAMB's: there are no coefficients to go "
                f"on with. Give stage 1 some steps, also after loading a variance: freeze_step={steps + 100}, say"
            )
        super().check_freeze(states, steps)

    def gamma(self, state: FlatState) -> Tensor | None:
        return state.get("gamma")

    def scratch(self, state: FlatState) -> dict[str, Tensor]:
        blocks, parameters, device = state.layout.blocks, state.layout.parameters, state.device
        return {
            "partial": torch.zeros((2, blocks), dtype=torch.float32, device=device),
            "counter": torch.zeros(parameters, dtype=torch.int32, device=device),
            "ratio": torch.ones(parameters, dtype=torch.float32, device=device),  # stage 1 has none of its own
        }

    def settings(self) -> Mapping[str, float | str]:
        return asdict(self)


def _lamb_state(state: FlatState) -> LambState:
    ratio = state["ratio"] if "ratio" in state else state.scratch["ratio"]
    return LambState(
        state["coefficient"], state["coefficient_average"], ratio, state.scratch["partial"], state.scratch["counter"]
    )


def _owner(state: FlatState) -> Tensor:
    """int64 [blocks]: the parameter of each block."""
    return state.layout.table(state.device).owner.long()


def _debiased(state: FlatState, coeff_beta: float) -> Tensor:
    """c_avg / (1 - b3^t), fp64 [parameters], t the steps that a parameter's coefficients were averaged over."""
    t = state["coefficient_steps"].double()
    return state["coefficient_average"].double() / (1 - coeff_beta ** t.clamp(min=1))


def _momentum_scaling(state: FlatState) -> Tensor:
    """gamma_p = (mean over parameters of rms(m)) / rms(m_p), 1 where rms is 0."""
    norms = torch.stack([_norm(state.elements_of(state["exp_avg"], i)) for i in range(len(state.params))])
    if state.parts is not None:
        norms = state.add_parts(norms.square()).sqrt()
    rms = norms / torch.tensor(state.whole_numels, dtype=torch.float64, device=state.device).clamp(min=1).sqrt()
    return torch.where(rms > 0, rms.mean() / rms, 1.0).float()


def _norm(values: Tensor) -> Tensor:
    """fp64, without a dimension."""
    norm = torch.linalg.vector_norm
    return norm(torch.stack([norm(piece, dtype=torch.float64) for piece in in_pieces(values)]))


class CoefficientRule(StageRule):
    """Stage 1 ends when parameters with 95 % of the elements have stable coefficients: c_avg changed by less than
    1 - threshold over a window. Compared 16 times a window, which is what has to be remembered."""

    share = 0.95

    def __init__(
        self,
        freeze_step: int | None,
        threshold: float,
        window: int,
        coeff_beta: float,
        numels: Sequence[int],
    ) -> None:
        super().__init__(freeze_step, threshold, window, comparisons=16)
        self._coeff_beta, self._numels = coeff_beta, list(numels)
        self.what = f"the share of elements with stable coefficients (stage 2 begins at {self.share:g})"

    def measure(self, states: Sequence[FlatState], groups: int) -> list[Tensor]:
        """The averaged coefficient of every parameter."""
        self._numels = [n for state in states for n in state.whole_numels]
        return [_debiased(state, self._coeff_beta) for state in states]

    def add(self, step: int, numbers: Sequence[float], beta2s: Sequence[float]) -> None:
        self._keep(step, list(numbers))

    def _compare(self, now: Sequence[float], before: Sequence[float]) -> float | None:
        if len(now) != len(before) or len(now) != len(self._numels):
            return None  # parameters were added
        most = 1 - self.threshold
        stable = sum(n for n, a, b in zip(self._numels, now, before, strict=True) if abs(a - b) < most * b)
        return stable / sum(self._numels) if sum(self._numels) else None

    def _stable(self, ratio: float) -> bool:
        return ratio >= self.share

"""1-bit Adam (Tang et al. 2021, Algorithm 1).

stage 1    m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  x = x - lr (mhat / (sqrt(vhat) + eps) + wd x)
freeze     d = 1 / (sqrt(vhat) + eps)
stage 2    m = compressed_all_reduce(b1 m + (1-b1) g_i);  x = x - lr (f_p m d + wd x)        f_p: see `limit`

State: exp_avg, exp_avg_sq, 8 B an element; in stage 2 residual and d in the same buffers, and m, E: 1/8 + 4/N. What is
saved in the place of d is  v = (1/d - eps)^2 (1 - b2^t),  AdamW's variance: d follows from it bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.pieces import in_pieces
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.passes import AdamUpdate, AdamWarmup, Gradients, Parameters, Scan
from onebit.optim.algorithm import Algorithm
from onebit.optim.fields import JOINED, MOMENTUM, RESIDUAL, VARIANCE, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import StageRule, VarianceRule, check_variance, raise_to_floor_, variance_to_denominator_
from onebit.optim.limit import USUAL
from onebit.optim.memory_order import flattened, in_shape
from onebit.optim.options import Options
from onebit.optim.param_groups import Group, betas_of
from onebit.optim.reducer import MomentumReducer

DENOMINATOR = Field("denominator", values="non-negative")


class Adam(Algorithm):
    """The two updates of 1-bit Adam."""

    stage_1: tuple[Field, ...] = (MOMENTUM, VARIANCE, JOINED)
    stage_2: tuple[Field, ...] = (RESIDUAL, replace(DENOMINATOR, saved=False), USUAL)
    shortened_to = 2.0

    def full_step(self, state: FlatState, hyper: Tensor, flags: Tensor) -> None:
        state.backend.run(AdamWarmup(
            state.layout.all(), Parameters(state.parameters, state.get("master")),
            Gradients(state.gradients, hyper, flags), state["exp_avg"], state["exp_avg_sq"], state.scratch["sums"],
        ))  # fmt: skip

    def compressed_step(self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        state.backend.run(AdamUpdate(
            state.layout.all(), Parameters(state.parameters, state.get("master")), state["denominator"],
            reducer.replies, hyper, clip=reducer.clip(hyper),
        ))  # fmt: skip

    def sum_squares_of_d(self, state: FlatState, hyper: Tensor) -> Tensor:
        return sum_squares(state, "denominator")

    def on_freeze(self, state: FlatState, rows: Sequence[Hyper], options: Options) -> Mapping[int, int]:
        without = {}
        for i, group in enumerate(state.groups):
            v = state.elements_of(state["exp_avg_sq"], i)
            raise_to_floor_(v, options.variance_floor, state.add_parts)
            without[i] = variance_to_denominator_(
                v, rows[group], options.zero_variance, state.add_parts, state.fixed_indices.get(i)
            )
        state.rename("exp_avg_sq", DENOMINATOR)
        return without

    def save_derived(self, state: FlatState, index: int, group: Group, steps: int) -> dict[str, Tensor]:
        if VARIANCE.name in state:
            return {}
        d, numbers = state.elements_of(state["denominator"], index), _eps_and_weight(group, steps)
        v = torch.empty_like(d)
        for of_d, of_v in zip(in_pieces(d), in_pieces(v), strict=True):
            of_v.copy_(to_variance(of_d, *numbers))
        return {VARIANCE.name: in_shape(v, state.shapes[index], state.orders[index])}

    def load_derived(self, state: FlatState, index: int, saved: Mapping[str, Tensor], group: Group, steps: int) -> None:
        if VARIANCE.name not in state:
            v, numbers = flattened(saved[VARIANCE.name], state.orders[index]), _eps_and_weight(group, steps)
            for of_v, of_d in zip(in_pieces(v), in_pieces(state.elements_of(state["denominator"], index)), strict=True):
                of_d.copy_(to_denominator(of_v.to(state.device), *numbers))

    def freeze_rule(self, options: Options, window: int, states: Sequence[FlatState]) -> StageRule:
        return VarianceRule(options.fixed_freeze_step, options.freeze_rule.threshold, window)

    def check_freeze(self, states: Sequence[FlatState], steps: int) -> None:
        check_variance(states, steps)

    def live(self, state: FlatState) -> Tensor | None:
        """An element with d = 0 never moves, and stays out of every scale."""
        return nonzero(state, "denominator")

    def scratch(self, state: FlatState) -> dict[str, Tensor]:
        return {"sums": torch.zeros(state.layout.blocks, dtype=torch.float32, device=state.device)}


def to_variance(d: Tensor, eps: float, weight: float) -> Tensor:
    """v with 1 / (sqrt(v / weight) + eps) = d, fp32; 0 where d is."""
    root = (1 / d.double() - eps).clamp(min=0)
    v = (root.square() * weight).float().clamp(min=torch.finfo(torch.float32).tiny)
    return v.masked_fill_(d == 0, 0)


def to_denominator(v: Tensor, eps: float, weight: float) -> Tensor:
    """The d that `to_variance` was given, to the bit: v is rounded by 2^-24 of it, and a root by half of that."""
    d = 1 / ((v.double() / weight).sqrt() + eps)
    return d.float().masked_fill_(v == 0, 0)


def _eps_and_weight(group: Group, steps: int) -> tuple[float, float]:
    """eps as passes have it, and what all gradients in AdamW's variance weigh."""
    eps = float(torch.tensor(float(group["eps"]), dtype=torch.float32, device="cpu"))
    return eps, (1 - betas_of(group)[1] ** steps) or 1.0


def sum_squares(state: FlatState, name: str) -> Tensor:
    """fp32 [blocks]: of a field's elements, added up over every block."""
    layout, flags = state.layout, torch.zeros(1, dtype=torch.int32, device=state.device)
    values = Pointers.to(layout, [state.elements_of(state[name], i) for i in range(len(state.params))])
    as_they_are = hyper_table([Hyper()] * (1 + max(state.groups)), state.device)
    found = torch.zeros(layout.blocks, dtype=torch.float32, device=state.device)
    state.backend.run(Scan(layout.all(), Gradients(values, as_they_are, flags), found))
    return found


def nonzero(state: FlatState, name: str) -> Tensor | None:
    """bool [elements], where a field is not 0; None where it is 0 nowhere."""
    held = any(bool((state.view(name, i) == 0).any()) for i, n in enumerate(state.numels) if n)
    return state[name] != 0 if held else None

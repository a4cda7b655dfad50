"""0/1 Adam (Lu et al. 2023, Algorithm 1): there is no long stage 1. The variance is updated at full-precision steps,
which come ever farther apart; all others are compressed. With `local_step_scaler` ranks then take steps of their own
between two exchanges, which also come ever farther apart: `local_steps`.

dense start    the first kappa + 1 steps are Adam's
full           m = b1 m + (1-b1) g;  v = b v + (1-b) g^2;  x = x - lr (mhat / (u + eps) + wd x);  e = e + b1 m;  m = 0
compressed     m = compressed_all_reduce(b1 m + (1-b1) g_i);  x = x - lr (mhat / (u + eps) + wd x)

b and vhat: see `schedule`. u = sqrt(vhat), at least sqrt(variance_floor) times the root of its parameter's mean, which
it is where v is 0 (zero_variance="floor"); with "hold" such an element does not move. A full step uses the floors of
the one before. m goes into the residuals as at the freeze: what they then hold is what the next message would have had.

State: residual, exp_avg_sq, 8 B an element, and m, E: 1/8 + 4/N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from onebit.kernels.data.bits import packed
from onebit.kernels.data.checks import is_whole
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import WORD
from onebit.kernels.data.pieces import count_nonzero, in_pieces, total
from onebit.kernels.passes import Gradients, Parameters, ZeroOneFull, ZeroOneInverses, ZeroOneUpdate
from onebit.optim import local_steps
from onebit.optim.adam import Adam
from onebit.optim.algorithm import Kind, LocalSteps
from onebit.optim.fields import JOINED, LEAST_ROOT, MOMENTUM, RESIDUAL, ROOT_AT_ZERO, VARIANCE, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import FixedStep, StageRule
from onebit.optim.limit import USUAL
from onebit.optim.options import Options
from onebit.optim.param_groups import Group, betas_of, is_compressed
from onebit.optim.reducer import MomentumReducer
from onebit.optim.schedule import SyncSchedule, VarianceSchedule

_SETTINGS = ("var_update_scaler", "var_freeze_step", "local_step_scaler", "local_step_clipper")


class AfterDenseStart(FixedStep):
    """The end of the dense start: the first compressed step. If a later state was loaded, full steps come before that
    which are taken as those of the dense start: m is dense still."""

    def __init__(self, schedule: VarianceSchedule, window: int) -> None:
        super().__init__(schedule.dense_start, window)
        self._schedule = schedule

    def due(self, step: int) -> bool:
        return super().due(step) and not self._schedule.is_full(step + 1)


class ZeroOne(Adam):
    """The updates of 0/1 Adam; those of the dense start are Adam's."""

    stage_1 = (MOMENTUM, VARIANCE, JOINED)
    stage_2: tuple[Field, ...] = (RESIDUAL, VARIANCE, LEAST_ROOT, ROOT_AT_ZERO, USUAL)
    uses_step_number = True

    def __init__(self, schedule: VarianceSchedule, syncs: SyncSchedule | None) -> None:
        self.schedule, self.syncs = schedule, syncs
        if syncs is not None:
            self.stage_2 = (*self.stage_2, *local_steps.FIELDS)

    @classmethod
    def of(cls, update_scaler: int, freeze_step: int | None, local_scaler: int | None, clipper: int) -> ZeroOne:
        """Make it from the arguments of `onebit.ZeroOneAdam`; a ValueError says which is wrong, and why."""
        for name, value, what, none in (
            ("var_update_scaler", update_scaler, "how many full-precision steps before their distance doubles", ""),
            ("var_freeze_step", freeze_step, "the last step that may update the variance", " or None"),
            ("local_step_clipper", clipper, "the most steps from one exchange to the next", ""),
            ("local_step_scaler", local_scaler, "how many steps before the distance of exchanges doubles", " or None"),
        ):
            if not (value is None and none) and not is_whole(value, least=1):
                raise ValueError(f"{name}={value!r}: it is {what}, 1 or more{none}")
        last = None if freeze_step is None else int(freeze_step)  # NumPy's numbers are neither JSON's nor torch.load's
        schedule = VarianceSchedule(int(update_scaler), last)
        if local_scaler is None:
            return cls(schedule, None)
        if last is None:
            raise ValueError(
                f"local_step_scaler={local_scaler} without var_freeze_step: ranks that move alone need a variance that "
                f"stays as it is. Give var_freeze_step=N, after which local steps may begin"
            )
        return cls(schedule, SyncSchedule(last, int(local_scaler), int(clipper)))

    def kind(self, step: int) -> Kind:
        if self.schedule.is_full(step):
            return "full"
        if self.syncs is None or not self.syncs.is_alone(step):
            return "1 bit"
        return "sync" if self.syncs.is_sync(step) else "local"

    def local_steps(self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, step: int) -> LocalSteps:
        assert self.syncs is not None
        found = local_steps.LocalSteps(state, reducer, self.live(state), self.syncs)
        if step == self.syncs.first_local:
            found.use_units_of_steps(hyper)
        return found

    def spaced_full_step(
        self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor, options: Options
    ) -> None:
        exchange, sums, counts = reducer.exchange, state.scratch["sums"], state.scratch["counts"]
        dense = state.get(MOMENTUM.name)
        assert exchange.live is not None
        for span, replies, residual in exchange.slices():
            blocks = slice(span.first, span.first + span.count)
            state.backend.run(ZeroOneFull(
                span, Parameters(state.parameters, state.part("master", span)),
                Gradients(state.gradients, hyper, flags), span.of(state[VARIANCE.name]),
                replies if dense is None else span.of(dense), residual,
                local_steps.floors_of(state), span.of_bits(exchange.live), sums[blocks], counts[blocks],
            ))  # fmt: skip
        exchange.clear_replies(flags)
        bias2 = hyper[state.scratch["groups"], Hyper._fields.index("bias2")]
        totals = state.add_parts(torch.stack([state.of_parameters(sums), state.of_parameters(counts)], 1))
        for name, root in _floors(totals, bias2, options).items():
            state[name].copy_(torch.where(flags != 0, state[name], root))
        _mark_floored(state, exchange.live)
        if not state.fixed_indices:
            whole = (totals[:, 1] == state.scratch["numels"]) | (state[ROOT_AT_ZERO.name] != 0)
            reducer.mask_was_updated(whole.all().view(1))
        if reducer.limit is not None:
            reducer.limit.variance_was_updated(flags)

    def compressed_step(self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        bias1 = hyper[state.scratch["groups"], Hyper._fields.index("bias1")]
        state.backend.run(ZeroOneUpdate(
            state.layout.all(), Parameters(state.parameters, state.get("master")), state[VARIANCE.name],
            reducer.replies, hyper, local_steps.floors_of(state), reducer.clip(hyper, bias1),
        ))  # fmt: skip

    def sum_squares_of_d(self, state: FlatState, hyper: Tensor) -> Tensor:
        found = torch.zeros(state.layout.blocks, dtype=torch.float32, device=state.device)
        work = ZeroOneInverses(state.layout.all(), state[VARIANCE.name], hyper, local_steps.floors_of(state), found)
        state.backend.run(work)
        return found

    def on_freeze(self, state: FlatState, rows: Sequence[Hyper], options: Options) -> Mapping[int, int]:
        variances = [state.elements_of(state[VARIANCE.name], i) for i in range(len(state.params))]
        totals = torch.stack([torch.stack([total(v), count_nonzero(v).double()]) for v in variances])
        bias2 = torch.tensor([rows[g].bias2 for g in state.groups], dtype=torch.float64, device=state.device)
        for field in self.stage_2:
            if field.name not in state and field is not RESIDUAL and field.always:
                state.add(field)
        for name, root in _floors(state.add_parts(totals), bias2, options).items():
            state[name].copy_(root)
        return {}

    def check_freeze(self, states: Sequence[FlatState], steps: int) -> None:
        if self.schedule.next_full(steps) is None:  # else one may still come: where it is 0 nothing moves until then
            super().check_freeze(states, steps)

    def without_variance(self, state: FlatState, step: int) -> Mapping[int, int]:
        if self.schedule.next_full(step) is not None:
            return {}
        v, fixed = state[VARIANCE.name], state.fixed_indices  # where v is 0
        up_to = torch.cat([(piece != 0).view(-1, WORD).sum(1) for piece in in_pieces(v)]).cumsum(0)  # each word's end
        ends = torch.from_numpy(state.layout.offset // WORD).to(up_to.device)
        up_to = torch.cat([up_to.new_zeros(1), up_to])[torch.cat([ends, ends.new_tensor([len(up_to)])])]
        may_move = up_to.new_tensor([n - len(fixed.get(i, ())) for i, n in enumerate(state.numels)])
        return dict(enumerate(map(int, state.add_parts((may_move - up_to.diff()).double()).tolist())))

    def momentum_becomes_residual(self, state: FlatState, step: int, beta1s: Sequence[float]) -> None:
        """Let every rank go on with m itself, and nothing left out, if a state of another optimizer was loaded between
        two exchanges."""
        if self.kind(step) in ("local", "sync"):
            state[local_steps.OWN_MOMENTUM.name].copy_(state[MOMENTUM.name])
            state[local_steps.FACTOR.name].zero_()  # there was no exchange
            state[MOMENTUM.name].zero_()
        super().momentum_becomes_residual(state, step, beta1s)

    def adopt_variance(self, state: FlatState, steps: int, beta2s: Sequence[float]) -> None:
        for i, beta2 in enumerate(beta2s):
            state.view(VARIANCE.name, i).mul_(self.schedule.weight(steps, beta2) / (1 - beta2**steps))

    def freeze_rule(self, options: Options, window: int, states: Sequence[FlatState]) -> StageRule:
        return AfterDenseStart(self.schedule, window)

    def hyper(self, group: Group, step: int, bias_correction: bool) -> Hyper:
        h, beta2 = super().hyper(group, step, bias_correction), betas_of(group)[1]
        if not is_compressed(group):  # every step is one in full precision
            return h
        b, weight = self.schedule.decay(step, beta2), self.schedule.weight(step, beta2)
        return h._replace(beta2=b, one_minus_beta2=1 - b, bias2=weight**-0.5 if bias_correction else 1.0)

    def live(self, state: FlatState) -> Tensor:
        """An element that could not move takes no part."""
        live, floored = state[VARIANCE.name] != 0, state[ROOT_AT_ZERO.name] != 0
        for i in range(len(state.params)):
            state.elements_of(live, i).logical_or_(floored[i])
        free = state.free
        return live if free is None else live & free

    def scratch(self, state: FlatState) -> dict[str, Tensor]:
        groups = torch.tensor(state.groups, dtype=torch.int64, device=state.device)
        starts = [*(state.layout.offset // 8).tolist(), state.layout.elements // 8]
        own = [-(-n // 8) for n in state.numels]
        lengths = [n for i, (a, b) in enumerate(pairwise(starts)) for n in (own[i], b - a - own[i])]
        counts = torch.zeros(state.layout.blocks, dtype=torch.float32, device=state.device)
        in_bytes = torch.tensor(lengths, dtype=torch.int64, device=state.device)
        numels = torch.tensor(state.whole_numels, dtype=torch.float64, device=state.device)
        found = {"counts": counts, "groups": groups, "bytes": in_bytes, "numels": numels}
        return {**super().scratch(state), **found}

    def check_uncompressed(self) -> None:
        if self.syncs is not None:
            raise ValueError(
                "a param group has compress=False, which sends gradients in every step, and local_step_scaler is there "
                "to have steps that send nothing. Leave out one of them"
            )

    def settings(self) -> Mapping[str, float | str]:
        syncs = self.syncs
        local = (None, None) if syncs is None else (syncs.scaler, syncs.clipper)
        values = (self.schedule.kappa, self.schedule.last, *local)
        return {name: "none" if value is None else value for name, value in zip(_SETTINGS, values, strict=True)}

    def last_momentum(self, state: FlatState, reducer: MomentumReducer, into: Tensor | None = None) -> list[Tensor]:
        m = super().last_momentum(state, reducer, into)
        factors = state.get(local_steps.FACTOR.name)
        return m if factors is None else [each.mul_(factor) for each, factor in zip(m, factors, strict=True)]

    def start_from_momentum(self, state: FlatState, reducer: MomentumReducer) -> None:
        own, m = state[local_steps.OWN_MOMENTUM.name], state[MOMENTUM.name]
        own.copy_(m).masked_fill_(self.live(state).logical_not_(), 0)
        reducer.momentum_is_own = True

    def check_saved_settings(self, saved: Mapping[str, Any], steps: int) -> None:
        """What decides of coming steps alone may differ."""
        here, last = self.settings(), self.schedule.last
        for name in _SETTINGS:
            was: Any = saved.get(name)
            if name == "var_update_scaler":
                still_to_come = is_whole(was, least=1) and steps <= min(was, self.schedule.kappa) + 1
            elif name == "var_freeze_step":
                still_to_come = all(end == "none" or is_whole(end, least=steps) for end in (was, here[name]))
            else:
                still_to_come = name.startswith("local") and (last is None or steps <= last)
            if was != here[name] and not still_to_come:
                raise ValueError(
                    f"the state is of step {steps} of a run with {name}={was}, here it is {here[name]}: the schedule "
                    f"of the steps so far, and what they weigh in the variance, would be another. Build the optimizer "
                    f"with {name}={was}"
                )


def _floors(totals: Tensor, bias2: Tensor, options: Options) -> dict[str, Tensor]:
    """fp32 [parameters] each, from the sum of v over every parameter and how many in it are not 0. bias2: of every
    parameter."""
    root = (totals[:, 0] / totals[:, 1].clamp(min=1)).sqrt() * bias2.double()
    at_zero = root if options.zero_variance == "floor" else torch.zeros_like(root)
    return {LEAST_ROOT.name: (options.variance_floor**0.5 * root).float(), ROOT_AT_ZERO.name: at_zero.float()}


def _mark_floored(state: FlatState, live: Tensor) -> None:
    """A bit for all elements of a parameter that have a variance in any case."""
    floored = (state[ROOT_AT_ZERO.name] != 0).to(torch.uint8) * 255
    by_parameter = torch.stack([floored, torch.zeros_like(floored)], 1).view(-1)  # no bit for what fills blocks
    start = int(state.layout.offset[0]) // 8
    live[start:].bitwise_or_(by_parameter.repeat_interleave(state.scratch["bytes"], output_size=len(live) - start))
    free = state.free
    if free is not None:
        live.bitwise_and_(packed(free))

"""0/1 Adam (Lu et al. 2023, Algorithm 1), without local steps: there is no long stage 1. The variance is updated at
full-precision steps, which come ever farther apart; all others are compressed.

dense start    the first kappa + 1 steps are Adam's
full           m = b1 m + (1-b1) g;  v = b v + (1-b) g^2;  x = x - lr (mhat / (u + eps) + wd x);  e = e + b1 m;  m = 0
compressed     m = compressed_all_reduce(b1 m + (1-b1) g_i);  x = x - lr (mhat / (u + eps) + wd x)

b and vhat: see `schedule`. u = sqrt(vhat), at least sqrt(variance_floor) times the root of its parameter's mean, which
it is where v is 0 (zero_variance="floor"); with "hold" such a coordinate does not move. A full step uses the floors of
the one before. m goes into the residuals as at the freeze: what they then hold is what the next message would have had.

State: residual, exp_avg_sq, 8 B an element, and m, E: 1/8 + 4/N.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from onebit.collectives.exchange import Chunk
from onebit.kernels.data.checks import is_whole
from onebit.kernels.data.hyper import Hyper
from onebit.optim.adam import VARIANCE, Adam
from onebit.optim.fields import MOMENTUM, RESIDUAL, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import FixedStep, FreezeRule
from onebit.optim.optimizer import OneBitOptimizer
from onebit.optim.options import OptionArguments, Options, shows_options
from onebit.optim.param_groups import Group
from onebit.optim.reducer import MomentumReducer
from onebit.optim.schedule import VarianceSchedule

LEAST_ROOT = Field("least_root", per="parameter", values="non-negative")
ROOT_AT_ZERO = Field("root_at_zero", per="parameter", values="non-negative")


class Schedule(NamedTuple):
    """What the coming steps are."""

    step: int  # the number of the coming one
    kind: Literal["full", "1 bit"]
    next_full_step: int | None  # the next after it


class ZeroOne(Adam):
    """The updates of 0/1 Adam; those of the dense start are Adam's."""

    stage_1 = (MOMENTUM, VARIANCE)
    stage_2 = (RESIDUAL, VARIANCE, LEAST_ROOT, ROOT_AT_ZERO)
    uses_step_number = True

    def __init__(self, var_update_scaler: int, var_freeze_step: int | None) -> None:
        self.schedule = VarianceSchedule(var_update_scaler, var_freeze_step)

    def full_step_due(self, step: int) -> bool:
        return self.schedule.is_full(step)

    def spaced_full_step(
        self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor, options: Options
    ) -> None:
        exchange, sums, counts = reducer.exchange, state.scratch["sums"], state.scratch["counts"]
        assert exchange.live is not None
        for span, replies, residual in exchange.slices():
            blocks = slice(span.first, span.first + span.count)
            state.backend.zero_one_full(
                span, state.parameters, state.gradients, span.of(state[VARIANCE.name]), replies, residual,
                state.part("master", span), hyper, flags, state[LEAST_ROOT.name], state[ROOT_AT_ZERO.name],
                _of_blocks(exchange.live, state, blocks), sums[blocks], counts[blocks],
            )  # fmt: skip
        exchange.clear_replies(flags)
        bias2 = hyper[state.scratch["groups"], Hyper._fields.index("bias2")]
        for name, root in _floors(state, sums, counts, bias2, options).items():
            state[name].copy_(torch.where(flags != 0, state[name], root))
        _mark_floored(state, exchange.live)

    def compressed_step(self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        def update(chunk: Chunk) -> None:
            v, x = chunk.span.of(state[VARIANCE.name]), state.part("master", chunk.span)
            state.backend.zero_one_update(
                chunk.span, state.parameters, v, chunk.replies, x, hyper, state[LEAST_ROOT.name],
                state[ROOT_AT_ZERO.name],
            )  # fmt: skip

        reducer.all_reduce(hyper, flags, update)

    def on_freeze(self, state: FlatState, rows: Sequence[Hyper], options: Options) -> Mapping[int, int]:
        by_block = state[VARIANCE.name].view(state.layout.blocks, -1)
        bias2 = torch.tensor([rows[g].bias2 for g in state.groups], dtype=torch.float64, device=state.device)
        sums, counts = by_block.sum(1), (by_block != 0).sum(1).float()
        for field in (LEAST_ROOT, ROOT_AT_ZERO):
            state.add(field)
        for name, root in _floors(state, sums, counts, bias2, options).items():
            state[name].copy_(root)
        return {}

    def freeze_rule(self, options: Options, window: int, states: Sequence[FlatState]) -> FreezeRule:
        return FixedStep(self.schedule.dense_start, window)

    def hyper(self, group: Group, step: int, bias_correction: bool) -> Hyper:
        h, beta2 = super().hyper(group, step, bias_correction), group["betas"][1]
        b, weight = self.schedule.decay(step, beta2), self.schedule.weight(step, beta2)
        return h._replace(beta2=b, one_minus_beta2=1 - b, bias2=weight**-0.5 if bias_correction else 1.0)

    def live(self, state: FlatState) -> Tensor:
        """A coordinate that could not move takes no part."""
        live = (state[VARIANCE.name] != 0).view(state.layout.blocks, -1)
        return (live | _is_floored(state)).view(-1)

    def scratch(self, state: FlatState) -> dict[str, Tensor]:
        groups = torch.tensor(state.groups, dtype=torch.int64, device=state.device)
        ends = [*state.layout.first.tolist(), state.layout.used_blocks]
        blocks = torch.tensor([b - a for a, b in pairwise(ends)], dtype=torch.int64, device=state.device)
        counts = torch.zeros(state.layout.blocks, dtype=torch.float32, device=state.device)
        return {**super().scratch(state), "counts": counts, "groups": groups, "blocks": blocks}

    def settings(self) -> Mapping[str, float | str]:
        return {"var_update_scaler": self.schedule.kappa, "var_freeze_step": str(self.schedule.last)}


def _of_blocks(packed: Tensor, state: FlatState, blocks: slice) -> Tensor:
    """The part of packed bits that belongs to some blocks."""
    width = state.block_size // 8
    return packed[blocks.start * width : blocks.stop * width]


def _floors(state: FlatState, sums: Tensor, counts: Tensor, bias2: Tensor, options: Options) -> dict[str, Tensor]:
    """fp32 [parameters] each, from the sum of v over every block and how many in it are not 0. bias2: of every
    parameter. Sums are in the order of the blocks, the same on every rank."""
    by_block = torch.stack([sums, counts], 1)[: state.layout.used_blocks].double()
    totals = state.add_parts(torch.segment_reduce(by_block, "sum", lengths=state.scratch["blocks"], initial=0))
    root = (totals[:, 0] / totals[:, 1].clamp(min=1)).sqrt() * bias2.double()
    at_zero = root if options.zero_variance == "floor" else torch.zeros_like(root)
    return {LEAST_ROOT.name: (options.variance_floor**0.5 * root).float(), ROOT_AT_ZERO.name: at_zero.float()}


def _is_floored(state: FlatState) -> Tensor:
    """bool [blocks, 1]: whether its parameter's coordinates have a variance in any case."""
    owner = state.layout.table(state.device).owner.long()
    return (state[ROOT_AT_ZERO.name] != 0)[owner][:, None]


def _mark_floored(state: FlatState, live: Tensor) -> None:
    live.view(state.layout.blocks, -1).masked_fill_(_is_floored(state), 255)


@shows_options
class ZeroOneAdam(OneBitOptimizer):
    """AdamW that averages gradients at a few steps, ever farther apart, and momentum at all others, with 1 bit each.

        optimizer = onebit.ZeroOneAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        onebit.attach(ddp_model, optimizer)        # with DDP; without it the optimizer communicates alone

    The first var_update_scaler + 1 steps are AdamW's. Then compressed steps begin, with var_update_scaler
    full-precision ones 2 steps apart, as many 4 steps apart, and so on: of 1,200 steps 33, where it is 4.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them; betas, eps, lr and weight_decay by param group.
    var_update_scaler: how many full-precision steps come before their distance doubles.
    var_freeze_step: no full-precision step comes after this one; None for no end.
    process_group: a torch.distributed group, an mpi4py communicator, or None for the default group, if there is one.
    node_group: the ranks of this rank's node, which average uncompressed, and are one rank to the network: a group, or
        "auto" for the ranks of a host, where there are several hosts and each has equally many; None for one level.
    """

    without_options: ClassVar[frozenset[str]] = frozenset({"freeze_step", "freeze_threshold", "freeze_window"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_update_scaler: int = 4,
        var_freeze_step: int | None = None,
        process_group: Any = None,
        node_group: Any = "auto",
        **options: Unpack[OptionArguments],
    ) -> None:
        if not is_whole(var_update_scaler, least=1):
            raise ValueError(
                f"var_update_scaler={var_update_scaler!r}: it is how many full-precision steps come before their "
                f"distance doubles, 1 or more"
            )
        if var_freeze_step is not None and not is_whole(var_freeze_step, least=1):
            raise ValueError(
                f"var_freeze_step={var_freeze_step!r}: it is the last step that may update the variance, 1 or more, "
                f"or None"
            )
        self._algorithm = ZeroOne(var_update_scaler, var_freeze_step)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, self._algorithm, process_group=process_group, node_group=node_group, **options
        )

    @property
    def schedule(self) -> Schedule:
        """What the coming step is, and the next full-precision one after it. Reading it waits for the device."""
        coming, schedule = self.steps + 1, self._algorithm.schedule
        return Schedule(coming, "full" if schedule.is_full(coming) else "1 bit", schedule.next_full(coming))

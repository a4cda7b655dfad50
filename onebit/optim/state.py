"""All data that changes while an optimizer trains. `onebit.optim.run` acts on it; a load builds another.

At the freeze nothing is copied. With no message received yet the momentum of the first compressed step must still
come from exp_avg: c = beta1 m + (1 - beta1) g + e with e = 0 is the same sum as with m = 0 and e = beta1 m. So
exp_avg, times beta1, becomes the first residual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from torch import Tensor

from onebit.collectives.flags import travel_in_messages
from onebit.collectives.undo import Undo
from onebit.kernels.data.bits import packed
from onebit.kernels.data.pieces import count_nonzero
from onebit.optim.algorithm import Algorithm, LocalSteps
from onebit.optim.fields import FOLDED_MOMENTUM, JOINED, LAST_MOMENTUM, MASTER, MOMENTUM, RESIDUAL
from onebit.optim.flat_state import FlatState
from onebit.optim.limit import LEAST, USUAL, UpdateLimit
from onebit.optim.mean_norm import MeanNorm
from onebit.optim.param_groups import check_parameters
from onebit.optim.reducer import MomentumReducer
from onebit.optim.setup import Setup
from onebit.optim.stages import Stages

MomentumAt = Literal["messages", "exp_avg", "folded_momentum"]


@dataclass
class Part:
    """One flat state, and in stage 2 its reducer."""

    state: FlatState
    reducer: MomentumReducer | None = None  # None too in stage 2, where the state is not compressed
    local: LocalSteps | None = None  # once this process has taken one
    gathered: Tensor | None = None  # residuals of all of a node, fp32 [elements] on the host, until the next step

    def start_reducer(self, setup: Setup) -> None:
        """Begin stage 2 from the field "residual"."""
        state, options, algorithm = self.state, setup.options, setup.algorithm
        form = options.scale, setup.norm
        exchange = setup.exchange_class(setup.topology, state.layout, state.device, *form, value=state[RESIDUAL.name])
        live, limit = algorithm.live(state), options.update_limit
        exchange.live = None if live is None else packed(live)
        exchange.all_live = live is not None and int(count_nonzero(live)) == sum(state.numels)
        self.reducer = MomentumReducer(state, exchange, algorithm.gamma(state), algorithm.needs_previous_momentum)
        if limit is not None and (times := algorithm.shortened_to) is not None:
            if USUAL not in algorithm.stage_2:
                raise TypeError(f"{type(algorithm).__name__} has shortened_to: its stage_2 must have the field USUAL")
            sum_squares = partial(algorithm.sum_squares_of_d, state)
            bounds = (LEAST, times, algorithm.trusted_step) if isinstance(limit, str) else (limit, 0.0, 0.0)
            self.reducer.limit = UpdateLimit(state, exchange.replies, *bounds, sum_squares)

    def last_momentum(self, algorithm: Algorithm) -> list[Tensor]:
        """Return m of the last step, in stage 2: fp32, a tensor a parameter."""
        state = self.state
        for name in (MOMENTUM.name, FOLDED_MOMENTUM.name, LAST_MOMENTUM.name):
            if name in state:
                return [state.view(name, i) for i in range(len(state.params))]
        assert self.reducer is not None
        return algorithm.last_momentum(state, self.reducer)

    def residuals(self) -> list[Tensor]:
        """Return what `merge` has left of every parameter: fp32, in its shape."""
        state, flat = self.state, self.gathered
        if flat is None:
            return [state.view(RESIDUAL.name, i) for i in range(len(state.params))]
        return [state.cut(flat, i) for i in range(len(state.params))]

    def parameters_at_last_sync(self) -> list[Tensor]:
        """Return this rank's part of every parameter, as all ranks had it after the last exchange."""
        moved = self.local is not None and self.local.taken
        return self.local.last_parameters() if moved and self.local else self.state.values_now()

    def shared_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what parameters have in common and every rank has the same."""
        for name, each in self.state.fields.items():
            if each.per != "element" and each.same_on_all_ranks:
                yield name, self.state[name]
        if self.reducer is not None:
            yield "the last message", self.reducer.replies.buffer
            if self.reducer.exchange.live is not None:
                yield "the mask of live elements", self.reducer.exchange.live


@dataclass
class UnderWay:
    """Exchanges of which the first has begun, and whose step has not ended."""

    undo: list[Undo]  # what takes it back; none where nothing was kept
    by_flags: bool  # whether replies tell that it must be taken back


@dataclass(eq=False)
class State:
    parts: list[Part]
    stages: Stages
    mean_norm: MeanNorm
    bytes_before: int = 0  # sent in compressed messages before the state was saved that this run goes on from
    merged: bool = False  # in stage 2 until the next step begins: whether all ranks have one state, as it is saved
    momentum_at: MomentumAt = "messages"  # in stage 2, the last step's; if folded, the residual has beta1 m, too
    late: list[tuple[int, int]] = field(default_factory=list)  # rows of numbers: see `Setup.late_rows`
    ranks_agree: bool = False  # whether all ranks were found to have the same model and options
    ddp_averages: bool = False  # whether all ranks had the same gradients before any averaging
    at_last_sync: bool = False  # whether the model has the parameters of the last exchange
    under_way: UnderWay | None = None
    half_frozen: bool = False  # whether a freeze has begun, and not ended
    half_loaded: bool = False  # whether a load has begun, and not ended
    kept_undo: list[Undo] = field(default_factory=list)  # of each reducer, once one was needed

    @classmethod
    def of(cls, setup: Setup, before: State | None = None) -> State:
        """Begin stage 1 of the parameters as they are now. before: where the state of those is that were there."""
        if before is not None and before.stages.compressing:
            raise ValueError(
                "the parameters changed after the freeze (one was added or removed, or its requires_grad, its memory "
                "format or its group's compress was switched): stage 2 has no variance for others, and messages are in "
                "the order of the memory. Put them back, or build a new optimizer"
            )
        for group in setup.groups:
            check_parameters(group["params"])
        for old in before.states if before else []:
            old.take_over_writes()
        known = {p: (old, i) for old in (before.states if before else []) for i, p in enumerate(old.params)}
        joined = {p: int(old[JOINED.name][i]) for p, (old, i) in known.items() if JOINED.name in old}
        if before is not None and before.stages.steps:
            trained = (p for group in setup.groups for p in group["params"] if p.requires_grad)
            joined |= {p: before.stages.steps for p in trained if p not in known}
        states = setup.flat_states(joined=joined)
        for state in states:
            for each in setup.algorithm.stage_1:
                if each.always or (each is JOINED and any(joined.values())):
                    state.add(each)
            state.scratch = setup.algorithm.scratch(state)
            for i, p in enumerate(state.params):
                if p in known:
                    state.copy_parameter_from(i, *known[p])
                if JOINED.name in state:
                    state.view(JOINED.name, i).fill_(joined.get(p, 0))
        late = setup.late_rows(joined)
        stages = before.stages if before else Stages(setup.freeze_rule(states), setup.device)
        mean_norm = before.mean_norm if before else MeanNorm(setup.device)
        return cls([Part(state) for state in states], stages, mean_norm, late=late)

    def let_go(self) -> State:
        """Return what there is of a run while another state is built in the place of this one: no tensors."""
        return State([], self.stages, self.mean_norm, half_loaded=True)

    @cached_property
    def states(self) -> list[FlatState]:
        return [part.state for part in self.parts]

    @cached_property
    def compressed(self) -> list[FlatState]:
        """The states that stage 2 is for."""
        return [state for state in self.states if state.compressed]

    @cached_property
    def uncompressed(self) -> list[FlatState]:
        """The states that stay in stage 1 for good: of param groups with compress=False."""
        return [state for state in self.states if not state.compressed]

    @cached_property
    def compressed_parts(self) -> list[Part]:
        """The parts that have a reducer: none in stage 1."""
        return [part for part in self.parts if part.reducer is not None]

    @cached_property
    def reducers(self) -> list[MomentumReducer]:
        """The reducers of the compressed parts, in their order."""
        return [part.reducer for part in self.parts if part.reducer is not None]

    @cached_property
    def limits(self) -> list[UpdateLimit]:
        """The limits of steps by m."""
        return [reducer.limit for reducer in self.reducers if reducer.limit is not None]

    @cached_property
    def messages_are_small(self) -> bool:
        return travel_in_messages([reducer.exchange for reducer in self.reducers])

    def stage_2_has_begun(self) -> None:
        """Parts have reducers now."""
        self.stages.compressing, self.half_frozen = True, False
        for name in ("compressed_parts", "reducers", "limits", "messages_are_small"):
            self.__dict__.pop(name, None)

    @property
    def synchronized(self) -> bool:
        """Return whether no local step was taken since the last exchange."""
        return not any(part.local.taken for part in self.parts if part.local is not None)

    @property
    def local_steps_taken(self) -> int:
        """How many local steps were taken since the last exchange."""
        return max((part.local.taken for part in self.parts if part.local is not None), default=0)

    @property
    def local_progress(self) -> list[Any]:
        """What is the same on all ranks, of every part that has local steps."""
        return [part.local.progress for part in self.parts if part.local is not None]

    @property
    def wire_bytes(self) -> int:
        return self.bytes_before + sum(reducer.exchange.wire_bytes for reducer in self.reducers)

    @property
    def undo(self) -> list[Undo]:
        """What takes an exchange back whose messages had flags of their own, of each reducer."""
        self.kept_undo = self.kept_undo or [Undo(reducer.exchange) for reducer in self.reducers]
        return self.kept_undo

    def masters_at_last_sync(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameters that have a master copy and have moved since the last exchange, and the copy as it was."""
        for part in self.parts:
            if part.local is not None and part.local.taken and MASTER.name in part.state:
                yield from zip(part.state.params, part.local.last_parameters(), strict=True)

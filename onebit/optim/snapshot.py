"""All that changes while an optimizer trains. Loading builds another snapshot; installing it swaps one reference.

At the freeze nothing is copied. With no message received yet the momentum of the first compressed step must still
come from exp_avg: c = beta1 m + (1 - beta1) g + e with e = 0 is the same sum as with m = 0 and e = beta1 m. So
exp_avg, times beta1, becomes the first residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from onebit.collectives.flags import read_flags, travel_in_messages
from onebit.collectives.undo import Undo
from onebit.kernels.data.bits import packed
from onebit.optim import held
from onebit.optim.algorithm import LocalSteps
from onebit.optim.fields import FIRST_MOMENTUM, MOMENTUM
from onebit.optim.flat_state import FlatState
from onebit.optim.limit import USUAL, UpdateLimit
from onebit.optim.reducer import MomentumReducer
from onebit.optim.setup import Setup
from onebit.optim.stages import Stages

ZeroCounts = list[tuple[str, int, int]]  # parameters with coordinates that had no variance: name, how many, of how many


@dataclass
class Part:
    """One flat state, and in stage 2 its reducer."""

    state: FlatState
    reducer: MomentumReducer | None = None  # None too in stage 2, where the state is not compressed
    local: LocalSteps | None = None  # once this process has taken one
    fold_momentum_again: Callable[[], None] | None = None  # after a load: puts m into a residual that was cleared

    def start_reducer(self, setup: Setup) -> None:
        """Stage 2, from the field "residual"."""
        live = setup.algorithm.live(self.state)
        self.reducer = MomentumReducer(
            self.state,
            setup.topology,
            setup.way,
            scale=setup.options.scale,
            norm=setup.norm,
            live=None if live is None else packed(live),
            gamma=setup.algorithm.gamma(self.state),
            keep_previous=setup.algorithm.needs_previous_momentum,
        )
        limit, algorithm = setup.options.update_limit, setup.algorithm
        if limit is not None and algorithm.limits_updates:
            if USUAL not in algorithm.stage_2:
                raise TypeError(f"{type(algorithm).__name__} has limits_updates: its stage_2 must have the field USUAL")
            sum_squares = partial(algorithm.sum_squares_of_d, self.state)
            most = None if isinstance(limit, str) else limit
            self.reducer.limit = UpdateLimit(self.state, self.reducer.replies, most, sum_squares)

    def shared_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What parameters have in common and every rank has the same."""
        yield from self.state.shared_tensors()
        if self.reducer is not None:
            yield "the last message", self.reducer.replies.buffer
            if self.reducer.exchange.live is not None:
                yield "the mask of live coordinates", self.reducer.exchange.live


@dataclass
class Snapshot:
    """Where a run has come to."""

    parts: list[Part]
    stages: Stages
    bytes_before: int = 0  # sent in compressed messages before the state was saved that this run goes on from
    compressed_steps: int = 0  # since this process made it, or loaded it: the same on all ranks
    residuals_missing: bool = False  # whether a loaded state lacked this rank's residuals
    ranks_agree: bool = field(default=False)  # whether all ranks were found to have the same model and options
    ddp_averages: bool = field(default=False)  # whether all ranks had the same gradients before any averaging
    _undo: list[Undo] = field(default_factory=list)  # of each reducer, once messages of this process had flags

    @property
    def states(self) -> list[FlatState]:
        return [part.state for part in self.parts]

    @property
    def compressed(self) -> list[FlatState]:
        """Those that stage 2 is for."""
        return [state for state in self.states if state.compressed]

    @property
    def uncompressed(self) -> list[FlatState]:
        """Those that stay in stage 1 for good: of param groups with compress=False."""
        return [state for state in self.states if not state.compressed]

    @property
    def reducers(self) -> list[MomentumReducer]:
        """Of the compressed parts, in their order; none in stage 1."""
        return [part.reducer for part in self.parts if part.reducer is not None]

    @property
    def synchronized(self) -> bool:
        """Whether no local step was taken since the last exchange."""
        return not any(part.local.taken for part in self.parts if part.local is not None)

    @property
    def shortened(self) -> Tensor | None:
        """See `UpdateLimit.share`: of all parts. None where there is no limit."""
        limits = [reducer.limit for reducer in self.reducers if reducer.limit is not None]
        if not limits:
            return None
        shares = torch.stack([limit.share * limit.elements for limit in limits])
        return shares.sum(0) / max(1, sum(limit.elements for limit in limits))

    @property
    def wire_bytes(self) -> int:
        return self.bytes_before + sum(reducer.exchange.wire_bytes for reducer in self.reducers)

    @property
    def needs_step_number(self) -> bool:
        """Whether a step depends on its number: in stage 1, in which some parameters stay, and until the first
        compressed step was taken."""
        in_stage_1 = not self.stages.compressing or bool(self.uncompressed)
        return in_stage_1 or any(FIRST_MOMENTUM.name in state for state in self.states)

    def flags_travel(self, setup: Setup) -> bool:
        """Whether messages are so small that they leave before anyone has asked for the other ranks' flags. Ranks with
        other parts of sharded parameters have to be asked: no message of this rank reaches them."""
        return setup.topology.shard is None and travel_in_messages([reducer.exchange for reducer in self.reducers])

    def exchange(self, hyper: Tensor, flags: Tensor, ranks_agreed: bool) -> list[Undo]:
        """All messages of a compressed step. Where ranks have not agreed on `flags` the messages carry this rank's, and
        `flags` become those of all; what takes the exchange back, if they say so."""
        reducers = self.reducers
        if ranks_agreed:
            for reducer in reducers:
                reducer.all_reduce(hyper, flags)
            return []
        self._undo = self._undo or [Undo(reducer.exchange) for reducer in reducers]
        for reducer, undo in zip(reducers, self._undo, strict=True):
            reducer.all_reduce(hyper, flags, undo)
        self.read_flags(flags)
        return self._undo

    def read_flags(self, flags: Tensor) -> None:
        """After all messages of a compressed step, which had flags of their own: those of all ranks, and `flags` as
        they are."""
        read_flags([reducer.exchange for reducer in self.reducers], flags)

    def freeze(self, setup: Setup) -> ZeroCounts:
        """Stage 2 begins with the coming step: a collective call where chunks="auto" has to be measured."""
        steps, algorithm = self.stages.steps, setup.algorithm
        algorithm.check_freeze(self.compressed, steps)
        rows = setup.hyper_rows(max(1, steps))
        zeros: ZeroCounts = []
        for part in (part for part in self.parts if part.state.compressed):
            state = part.state
            state.set_chunks(setup.choose_chunks(state))
            held.clear_fields(state)
            without = algorithm.on_freeze(state, rows, setup.options)
            zeros += _named(setup, state, without)
            if algorithm.needs_previous_momentum:
                state.add(FIRST_MOMENTUM).copy_(state[MOMENTUM.name])
            algorithm.momentum_becomes_residual(state, steps + 1, [rows[group].beta1 for group in state.groups])
            state.scratch = algorithm.scratch(state)
            part.start_reducer(setup)
        self.stages.compressing = True
        return zeros + self.without_variance(setup, steps)

    def without_variance(self, setup: Setup, step: int) -> ZeroCounts:
        """After a full-precision step of stage 2, if it was the last one."""
        found = [(state, setup.algorithm.without_variance(state, step)) for state in self.compressed]
        return [one for state, without in found for one in _named(setup, state, without)]

    def drop_first_momentum(self) -> bool:
        """A compressed step was taken: from here on messages hold the momentum. Whether there was another."""
        there = [state for state in self.states if FIRST_MOMENTUM.name in state]
        for state in there:
            state.remove(FIRST_MOMENTUM.name)
        return bool(there)


def _named(setup: Setup, state: FlatState, without: Mapping[int, int]) -> ZeroCounts:
    return [(setup.name_of(state.params[i]), n, state.whole_numels[i]) for i, n in without.items() if n]

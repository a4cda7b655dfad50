"""What acts on the state of a run: exchanges, the count of steps, the freeze, and what is refused when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor

from onebit.collectives.flags import read_flags
from onebit.collectives.undo import Undo
from onebit.kernels.streams import capturing
from onebit.optim import masks, merging
from onebit.optim.algorithm import Kind
from onebit.optim.fields import FOLDED_MOMENTUM, JOINED, MOMENTUM
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import correct_joined_, report_freeze, warn_of_zeros
from onebit.optim.limit import UpdateLimit
from onebit.optim.param_groups import betas_of
from onebit.optim.setup import Setup
from onebit.optim.state import State, UnderWay

ZeroCounts = list[tuple[str, int, int]]  # parameters with elements that had no variance: name, how many, of how many
Reports = list[Callable[[], None]]  # what is due when a step is over


@dataclass(frozen=True, eq=False)
class Run:
    """What stays while an optimizer trains, and what changes."""

    setup: Setup
    state: State

    def kind(self, ahead: int = 1) -> Kind:
        """Return the kind of the coming step, or of one so far ahead if all before it are taken; those of stage 1 are
        "full". It is the same on all ranks, and known from `begin_step` on."""
        stages = self.state.stages
        return self.setup.algorithm.kind(stages.steps + ahead) if stages.compressing else "full"

    @property
    def needs_step_number(self) -> bool:
        """Return whether the coming step depends on its number: in stage 1, in which some parameters stay, and when it
        reads a momentum that no message has."""
        state = self.state
        in_stage_1 = not state.stages.compressing or bool(state.uncompressed)
        return in_stage_1 or state.momentum_at != "messages" or self.setup.algorithm.uses_step_number

    @property
    def flags_travel(self) -> bool:
        """Return whether messages are so small that they leave before anyone has asked for the other ranks' flags.
        Ranks with other parts of sharded parameters have to be asked: no message of this rank reaches them."""
        return self.setup.topology.shard is None and self.state.messages_are_small

    def exchange(self, hyper: Tensor, flags: Tensor, ranks_agreed: bool) -> None:
        """Exchange all messages of a compressed step. Where ranks have not agreed on `flags` the messages carry this
        rank's, and `flags` become those of all. `under_way` then has what takes the exchange back, if they say so."""
        undo = self.state.undo if self.setup.options.elastic or not ranks_agreed else []
        self.begin_exchanges(undo, by_flags=not ranks_agreed)
        for reducer, own in zip_longest(self.state.reducers, undo):
            reducer.all_reduce(hyper, flags, own)
        if not ranks_agreed:
            self.read_flags(flags)

    def exchange_local_steps(self, hyper: Tensor) -> None:
        """Exchange all messages of what ranks owe after local steps."""
        undo = self.state.undo if self.setup.options.elastic else []
        self.begin_exchanges(undo, by_flags=False)
        for local, own in zip_longest((part.local for part in self.state.parts if part.local is not None), undo):
            local.exchange(hyper, own)

    def begin_exchanges(self, undo: list[Undo], by_flags: bool) -> None:
        """Note what is under way from here on: see `UnderWay`. An exchange that does not end needs its `undo`."""
        for reducer in self.state.reducers:
            reducer.exchange.begin()
        self.state.under_way = UnderWay(undo, by_flags)

    def take_back_exchanges(self) -> None:
        """Undo exchanges that did not all end, as far as each had come."""
        assert self.state.under_way is not None
        for undo in self.state.under_way.undo:
            undo.take_back()
        self.state.under_way = None

    def read_flags(self, flags: Tensor) -> None:
        """Turn `flags` into those of all ranks, after all messages of a compressed step, which had flags of their
        own."""
        read_flags([reducer.exchange for reducer in self.state.reducers], flags)

    def synchronize_local_steps(self, hyper: Tensor, bound: bool, arrived: bool = False) -> None:
        """Exchange what ranks owe after local steps, and move by it. bound: whether flat states know the gradients.
        arrived: whether the replies are there."""
        states = self.state.states
        with masks.fixed_kept(states):
            for state in () if bound else states:
                state.bind_tensors()
            if not arrived:
                self.exchange_local_steps(hyper)
            for part in self.state.parts:
                if part.local is not None:
                    part.local.synchronize(hyper)
                    part.state.parameters_were_written()
            self.state.under_way = None
            for state in () if bound else states:
                state.release_gradients()

    def continue_local_steps(self, hyper: Tensor, progress: Sequence[Any], before: State | None) -> None:
        """Go on between two exchanges, with another set of ranks: see `LocalSteps.go_on`."""
        merging.use_momentum(self.setup, self.state, "local")
        for i, part in enumerate(self.state.parts):
            assert part.reducer is not None
            step = self.state.stages.steps + 1
            part.local = self.setup.algorithm.local_steps(part.state, part.reducer, hyper, step)
            part.local.go_on(progress[i], None if before is None else before.parts[i].local)

    def count(self, flags: Tensor, limits: Sequence[UpdateLimit] = (), alone: bool = False) -> None:
        """End a step: see `Stages.count`. Parameters have been written."""
        state = self.state
        state.stages.count(flags, state.compressed, len(self.setup.groups), alone=alone, limits=limits)
        for each in state.states:
            each.parameters_were_written()
            each.release_gradients()

    def read_last_step(self) -> None:
        """Take over what the host has to know of it. If it was taken in stage 2, messages hold the momentum now."""
        state, setup = self.state, self.setup
        for reducer in state.reducers:
            reducer.read_mask()
        betas = list[float]()
        if not state.stages.compressing:
            betas = [betas_of(group)[1] if setup.options.bias_correction else 0.0 for group in setup.groups]
        if not state.stages.read_last_step(betas):
            return
        if not state.stages.compressing and setup.topology.everyone.rank == 0:
            state.stages.log_progress()
        merging.drop_dense_momentum(state)

    def freeze(self, chunks: Sequence[int] = ()) -> Reports:
        """Begin stage 2 with the coming step: a collective call where chunks="auto" has to be measured, before all
        changes. chunks: of each compressed part, as other ranks have measured."""
        setup, state, algorithm = self.setup, self.state, self.setup.algorithm
        steps = state.stages.steps
        algorithm.check_freeze(state.compressed, steps)
        chosen = list(chunks) or [setup.choose_chunks(each) for each in state.compressed]
        rows = setup.hyper_rows(max(1, steps))
        zeros: ZeroCounts = []
        state.half_frozen = True
        for part in (part for part in state.parts if part.state.compressed):
            flat = part.state
            flat.rows = flat.groups
            flat.set_chunks(chosen.pop(0))
            masks.clear_fields(flat)
            if JOINED.name in flat:
                correct_joined_(flat, rows, steps)
            zeros += self._named(flat, algorithm.on_freeze(flat, rows, setup.options))
            if algorithm.needs_previous_momentum:
                state.momentum_at = "folded_momentum"
                flat.add(FOLDED_MOMENTUM).copy_(flat[MOMENTUM.name])
            algorithm.momentum_becomes_residual(flat, steps + 1, [rows[group].beta1 for group in flat.groups])
            flat.scratch = algorithm.scratch(flat)
            part.start_reducer(setup)
        state.stage_2_has_begun()
        zeros += self._without_variance(steps)
        if setup.topology.everyone.rank > 0:
            return []
        asked = state.stages.rule.freeze_step
        at_once = asked is not None and asked < steps == state.stages.steps_before
        return [partial(report_freeze, steps, at_once, zeros, setup.options.zero_variance, state.ddp_averages)]

    def warn_of_variance(self, flags: Tensor) -> Reports:
        """Warn after a full-precision step of stage 2, if it was the last one and was taken."""
        step = self.state.stages.steps + 1
        zeros = self._without_variance(step)
        if not zeros or self.setup.topology.everyone.rank > 0 or flags.any():
            return []
        when = f"after step {step}, the last one that updates it"
        return [partial(warn_of_zeros, when, zeros, self.setup.options.zero_variance)]

    def _without_variance(self, step: int) -> ZeroCounts:
        """Count elements without variance after a full-precision step, if it was the last one."""
        found = [(state, self.setup.algorithm.without_variance(state, step)) for state in self.state.compressed]
        return [one for state, without in found for one in self._named(state, without)]

    def _named(self, state: FlatState, without: Mapping[int, int]) -> ZeroCounts:
        return [(self.setup.name_of(state.params[i]), n, state.whole_numels[i]) for i, n in without.items() if n]

    @contextmanager
    def keep_last_sync(self) -> Iterator[None]:
        """Give the model, within it, the parameters that all ranks had after the last exchange."""
        self.check_own_parameters("at_last_sync")
        restore: list[Callable[[], object]] = []
        try:
            for part in self.state.parts:
                if part.local is not None and part.local.taken:
                    for p, last in zip(part.state.values_now(), part.local.last_parameters(), strict=True):
                        value = p.data  # whose version is its own: it is no change by the user
                        restore.append(partial(value.copy_, value.clone()))
                        value.copy_(last)
                    restore.append(part.state.parameters_were_written)
                    part.state.parameters_were_written()
            self.state.at_last_sync = True
            yield
        finally:
            self.state.at_last_sync = False
            for put_back in restore:
                put_back()

    def check_captured(self) -> None:
        """Raise a ValueError where a CUDA graph can't hold the coming step."""
        if capturing(self.setup.device) and self.needs_step_number:
            raise ValueError(
                f"a CUDA graph can't hold this step of {self.setup.name}: the host chooses what kind of step it is, "
                f"and a replay asks no host. Capture forward and backward alone, or steps of stage 2 of OneBitAdam or "
                f"OneBitLamb"
            )

    def check_stage_1(self, what: str) -> None:
        if self.state.stages.compressing:
            raise ValueError(
                f"{what}: stage 2 has begun, and new parameters would have no frozen variance. Add all of them before "
                f"the freeze, or build a new optimizer"
            )

    def check_whole(self, what: str) -> None:
        """Raise a ValueError after a freeze, a load or an exchange that did not end."""
        if self.state.under_way is not None:
            raise ValueError(
                f"{what} after a step that an error or an interrupt has ended while messages were exchanged: residuals "
                f"are half of that step, half of the one before. Load the last saved state (load_state_dict); where a "
                f"rank died, and the optimizer has elastic=True, call onebit.reform"
            )
        if self.state.half_frozen:
            raise ValueError(
                f"{what} after a freeze that an error or an interrupt has ended: one part of the state is that of "
                f"stage 1, another that of stage 2. Load the last saved state (load_state_dict)"
            )
        if self.state.half_loaded:
            raise ValueError(
                f"{what} after a load that an error or an interrupt has ended: the state before it is gone, and the "
                f"new one was not built. Load a saved state (load_state_dict)"
            )

    def check_synchronized(self) -> None:
        self.check_whole("state_dict")
        if not self.state.synchronized:
            raise ValueError(
                "state_dict between two exchanges: ranks have taken local steps, each to parameters of its own. Save "
                "when optimizer.synchronized is True (optimizer.schedule.next_sync says after which step), or call "
                "optimizer.synchronize() on every rank first"
            )

    def check_own_parameters(self, what: str) -> None:
        """Raise a ValueError within `keep_last_sync`."""
        if self.state.at_last_sync:
            raise ValueError(f"{what} within at_last_sync(): there the model is not this rank's. Leave the block first")

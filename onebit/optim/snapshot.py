"""All that changes while an optimizer trains. Loading builds another snapshot; installing it swaps one reference.

At the freeze nothing is copied. With no message received yet the momentum of the first compressed step must still
come from exp_avg: c = beta1 m + (1 - beta1) g + e with e = 0 is the same sum as with m = 0 and e = beta1 m. So
exp_avg, times beta1, becomes the first residual.

A save makes one state of those of all ranks (`Snapshot.merge`), from which the run goes on as one that loads it:

    e_i = mean_j(e_j) + E;  E = 0;  exp_avg = m;  no message
    and as the next step begins, if it sends 1 bit an element:  e_i = e_i + beta1 m
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from onebit.collectives.flags import read_flags, travel_in_messages
from onebit.collectives.undo import Undo
from onebit.kernels.data.bits import packed
from onebit.kernels.streams import capturing
from onebit.optim import masks
from onebit.optim.algorithm import Algorithm, Kind, LocalSteps
from onebit.optim.fields import FOLDED_MOMENTUM, JOINED, LAST_MOMENTUM, MASTER, MOMENTUM, RESIDUAL
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import correct_joined_, report_freeze, warn_of_zeros
from onebit.optim.limit import LEAST, USUAL, UpdateLimit
from onebit.optim.mean_norm import MeanNorm
from onebit.optim.memory_order import flattened, in_shape
from onebit.optim.param_groups import betas_of, check_parameters
from onebit.optim.reducer import MomentumReducer
from onebit.optim.setup import Setup
from onebit.optim.stages import Stages

ZeroCounts = list[tuple[str, int, int]]  # parameters with elements that had no variance: name, how many, of how many
Reports = list[Callable[[], None]]  # what is due when a step is over


@dataclass
class Part:
    """One flat state, and in stage 2 its reducer."""

    state: FlatState
    reducer: MomentumReducer | None = None  # None too in stage 2, where the state is not compressed
    local: LocalSteps | None = None  # once this process has taken one
    gathered: Tensor | None = None  # residuals of all of a node, fp32 [elements] on the host, until the next step

    def start_reducer(self, setup: Setup) -> None:
        """Stage 2, from the field "residual"."""
        state, options, algorithm = self.state, setup.options, setup.algorithm
        form = options.scale, setup.norm
        exchange = setup.exchange_class(setup.topology, state.layout, state.device, *form, value=state[RESIDUAL.name])
        live, limit = algorithm.live(state), options.update_limit
        exchange.live = None if live is None else packed(live)
        exchange.all_live = live is not None and int(live.sum()) == sum(state.numels)
        self.reducer = MomentumReducer(state, exchange, algorithm.gamma(state), algorithm.needs_previous_momentum)
        if limit is not None and (times := algorithm.shortened_to) is not None:
            if USUAL not in algorithm.stage_2:
                raise TypeError(f"{type(algorithm).__name__} has shortened_to: its stage_2 must have the field USUAL")
            sum_squares = partial(algorithm.sum_squares_of_d, state)
            bounds = (LEAST, times, algorithm.trusted_step) if isinstance(limit, str) else (limit, 0.0, 0.0)
            self.reducer.limit = UpdateLimit(state, exchange.replies, *bounds, sum_squares)

    def last_momentum(self, algorithm: Algorithm) -> list[Tensor]:
        """Stage 2: m of the last step, fp32, a tensor a parameter."""
        state = self.state
        for name in (MOMENTUM.name, FOLDED_MOMENTUM.name, LAST_MOMENTUM.name):
            if name in state:
                return [state.view(name, i) for i in range(len(state.params))]
        assert self.reducer is not None
        return algorithm.last_momentum(state, self.reducer)

    def residuals(self) -> list[Tensor]:
        """What `merge` has left of every parameter: fp32, in its shape."""
        state, flat = self.state, self.gathered
        if flat is None:
            return [state.view(RESIDUAL.name, i) for i in range(len(state.params))]
        return [state.cut(flat, i) for i in range(len(state.params))]

    def make_momentum_dense(self, setup: Setup) -> None:
        """The field "exp_avg" has m, and no message has it any more."""
        state, reducer = self.state, self.reducer
        assert reducer is not None
        if MOMENTUM.name not in state:
            m = self.last_momentum(setup.algorithm)
            state.add(MOMENTUM)
            for i, of_parameter in enumerate(m):
                state.view(MOMENTUM.name, i).copy_(of_parameter)
        reducer.exchange.clear_replies(torch.zeros(1, dtype=torch.int32, device=state.device))
        self.local = None

    def merge_residuals(self, setup: Setup) -> None:
        """A collective call."""
        assert self.reducer is not None
        exchange = self.reducer.exchange
        exchange.merge_residuals(setup.options.gradient_dtype)
        if self.state.slices > 1:
            self.gathered = exchange.gathered_residual().cpu()

    def separate_momentum(self, setup: Setup) -> None:
        """Take m out of the residual again, where no step was taken since it was added."""
        state = self.state
        if self.reducer is not None and FOLDED_MOMENTUM.name in state:
            self.reducer.add_to_residual(state[FOLDED_MOMENTUM.name], [-beta1 for beta1 in self._beta1s(setup)])
            state.rename(FOLDED_MOMENTUM.name, MOMENTUM)

    def use_momentum(self, setup: Setup, kind: Kind) -> None:
        """As a step begins: m goes where the step reads it. A full step reads "exp_avg" itself."""
        state, reducer, algorithm = self.state, self.reducer, setup.algorithm
        assert reducer is not None
        self.gathered = None
        if kind == "full":
            return
        if kind != "1 bit":
            algorithm.start_from_momentum(state, reducer)
            state.rename(MOMENTUM.name, LAST_MOMENTUM)
            return
        reducer.add_to_residual(state[MOMENTUM.name], self._beta1s(setup))
        if algorithm.needs_previous_momentum or setup.options.elastic:
            state.rename(MOMENTUM.name, FOLDED_MOMENTUM)
        else:
            state.remove(MOMENTUM.name)

    def _beta1s(self, setup: Setup) -> list[float]:
        return [betas_of(setup.groups[group])[0] for group in self.state.groups]

    def parameters_at_last_sync(self) -> list[Tensor]:
        """This rank's part of every parameter, as all ranks had it after the last exchange."""
        moved = self.local is not None and self.local.taken
        return self.local.last_parameters() if moved and self.local else self.state.values_now()

    def shared_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What parameters have in common and every rank has the same."""
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


@dataclass
class Snapshot:
    """Where a run has come to."""

    parts: list[Part]
    stages: Stages
    mean_norm: MeanNorm
    bytes_before: int = 0  # sent in compressed messages before the state was saved that this run goes on from
    merged: bool = False  # in stage 2 until the next step begins: whether all ranks have one state, as it is saved
    momentum_is_dense: bool = False  # in stage 2: whether "exp_avg" has m, and no message does
    momentum_is_folded: bool = False  # in stage 2: whether "folded_momentum" has it, and the residual beta1 m
    ranks_agree: bool = False  # whether all ranks were found to have the same model and options
    ddp_averages: bool = False  # whether all ranks had the same gradients before any averaging
    at_last_sync: bool = False  # whether the model has the parameters of the last exchange
    under_way: UnderWay | None = None
    half_frozen: bool = False  # whether a freeze has begun, and not ended
    _undo: list[Undo] = field(default_factory=list)

    @classmethod
    def of(cls, setup: Setup, before: Snapshot | None = None) -> Snapshot:
        """Stage 1 of the parameters as they are now. before: where the state of those is that were there."""
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
        states = setup.flat_states()
        known = {p: (old, i) for old in (before.states if before else []) for i, p in enumerate(old.params)}
        for state in states:
            steps = before.stages.steps if before else 0
            late = [i for i, p in enumerate(state.params) if steps and p not in known]
            kept = late or any(JOINED.name in old for old, _ in known.values())
            for each in setup.algorithm.stage_1:
                if each.always or (each is JOINED and kept):
                    state.add(each)
            state.scratch = setup.algorithm.scratch(state)
            for i, p in enumerate(state.params):
                if p in known:
                    state.copy_parameter_from(i, *known[p])
                elif JOINED.name in state:
                    state.view(JOINED.name, i).fill_(steps)
        stages = before.stages if before else Stages(setup.freeze_rule(states), setup.device)
        return cls([Part(state) for state in states], stages, before.mean_norm if before else MeanNorm(setup.device))

    @cached_property
    def states(self) -> list[FlatState]:
        return [part.state for part in self.parts]

    @cached_property
    def compressed(self) -> list[FlatState]:
        """Those that stage 2 is for."""
        return [state for state in self.states if state.compressed]

    @cached_property
    def uncompressed(self) -> list[FlatState]:
        """Those that stay in stage 1 for good: of param groups with compress=False."""
        return [state for state in self.states if not state.compressed]

    @cached_property
    def compressed_parts(self) -> list[Part]:
        """Those that have a reducer: none in stage 1."""
        return [part for part in self.parts if part.reducer is not None]

    @cached_property
    def reducers(self) -> list[MomentumReducer]:
        """Those of the compressed parts, in their order."""
        return [part.reducer for part in self.parts if part.reducer is not None]

    @property
    def synchronized(self) -> bool:
        """Whether no local step was taken since the last exchange."""
        return not any(part.local.taken for part in self.parts if part.local is not None)

    @property
    def local_steps_taken(self) -> int:
        """Since the last exchange."""
        return max((part.local.taken for part in self.parts if part.local is not None), default=0)

    @property
    def local_progress(self) -> list[Any]:
        """Of every part that has local steps: what is the same on all ranks."""
        return [part.local.progress for part in self.parts if part.local is not None]

    def go_on_with_local_steps(
        self, setup: Setup, hyper: Tensor, progress: Sequence[Any], before: Snapshot | None
    ) -> None:
        """Between two exchanges, with another set of ranks: see `LocalSteps.go_on`."""
        self.use_momentum(setup, "local")
        for i, part in enumerate(self.parts):
            assert part.reducer is not None
            part.local = setup.algorithm.local_steps(part.state, part.reducer, hyper, self.stages.steps + 1)
            part.local.go_on(progress[i], None if before is None else before.parts[i].local)

    def merge(self, setup: Setup) -> None:
        """Stage 2: one state of those of all ranks, as it is saved and loaded. A collective call.

        Where it does not end, since a rank died, this rank has its own residuals still, or the mean, chunk by chunk.
        Messages are as they were: others may need them to finish the exchange before, see onebit.elastic.halfway.
        """
        self.separate_momentum(setup)
        for part in self.compressed_parts:
            part.merge_residuals(setup)
        for part in self.compressed_parts:
            part.make_momentum_dense(setup)
        self.merged = self.momentum_is_dense = True

    def separate_momentum(self, setup: Setup) -> None:
        """See `Part.separate_momentum`."""
        for part in self.compressed_parts:
            part.separate_momentum(setup)
        self.momentum_is_dense, self.momentum_is_folded = self.momentum_is_dense or self.momentum_is_folded, False

    def use_momentum(self, setup: Setup, kind: Kind) -> None:
        """A step begins, of this kind: see `Part.use_momentum`."""
        self.merged = False
        if self.momentum_is_dense:
            for part in self.compressed_parts:
                part.use_momentum(setup, kind)
            self.momentum_is_dense = kind == "full"
            self.momentum_is_folded = any(FOLDED_MOMENTUM.name in part.state for part in self.compressed_parts)

    def residual_shares(self, setup: Setup) -> dict[Tensor, Tensor]:
        """What this rank has left out of the mean of every parameter, fp32, in the parameter's shape."""
        found = {}
        self.separate_momentum(setup)
        for reducer in self.reducers:
            state = reducer.state
            for i, p in enumerate(state.params):
                found[p] = in_shape(reducer.residual_share(i), state.shapes[i], state.orders[i])
        return found

    def add_residual_shares(self, shares: Mapping[Tensor, Tensor]) -> None:
        """After a change of ranks: add `residual_shares`, times the number of ranks that send, to the residuals. With
        two levels each rank of a node gets what lies in its slice: then a collective call."""
        self.merged = False
        for part in self.compressed_parts:
            assert part.reducer is not None
            state, exchange = part.state, part.reducer.exchange
            for i, p in enumerate(state.params):
                own = torch.zeros(state.numels[i], dtype=torch.float32, device=state.device)
                if p in shares:
                    own.add_(flattened(shares[p].to(state.device), state.orders[i]), alpha=exchange.transport.size)
                if exchange.node.size > 1:
                    exchange.node.all_sum(own, "adding up the residuals of a node (all-reduce)").wait()
                for span, e in state.parts_of(RESIDUAL.name, i):
                    e.add_(own[span])

    def masters_at_last_sync(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters that have a master copy and have moved since the last exchange, and the copy as it was then."""
        for part in self.parts:
            if part.local is not None and part.local.taken and MASTER.name in part.state:
                yield from zip(part.state.params, part.local.last_parameters(), strict=True)

    @cached_property
    def limits(self) -> list[UpdateLimit]:
        """Of steps by m."""
        return [reducer.limit for reducer in self.reducers if reducer.limit is not None]

    @property
    def wire_bytes(self) -> int:
        return self.bytes_before + sum(reducer.exchange.wire_bytes for reducer in self.reducers)

    def needs_step_number(self, setup: Setup) -> bool:
        """Whether the coming step depends on its number: in stage 1, in which some parameters stay, and where it reads
        a momentum that no message has."""
        in_stage_1 = not self.stages.compressing or bool(self.uncompressed)
        dense = self.momentum_is_dense or self.momentum_is_folded
        return in_stage_1 or dense or setup.algorithm.uses_step_number

    def flags_travel(self, setup: Setup) -> bool:
        """Whether messages are so small that they leave before anyone has asked for the other ranks' flags. Ranks with
        other parts of sharded parameters have to be asked: no message of this rank reaches them."""
        return setup.topology.shard is None and self.messages_are_small

    @cached_property
    def messages_are_small(self) -> bool:
        return travel_in_messages([reducer.exchange for reducer in self.reducers])

    def exchange(self, hyper: Tensor, flags: Tensor, ranks_agreed: bool, keep: bool) -> None:
        """All messages of a compressed step. Where ranks have not agreed on `flags` the messages carry this rank's, and
        `flags` become those of all. `under_way` then has what takes the exchange back, if they say so. keep: it has it
        in any case, for an exchange that does not end."""
        undo = self.undo if keep or not ranks_agreed else []
        self.exchanges_begin(undo, by_flags=not ranks_agreed)
        for reducer, own in zip_longest(self.reducers, undo):
            reducer.all_reduce(hyper, flags, own)
        if not ranks_agreed:
            self.read_flags(flags)

    def exchange_local_steps(self, hyper: Tensor, keep: bool) -> None:
        """All messages of what ranks owe after local steps. keep: as in `exchange`."""
        undo = self.undo if keep else []
        self.exchanges_begin(undo, by_flags=False)
        for local, own in zip_longest((part.local for part in self.parts if part.local is not None), undo):
            local.exchange(hyper, own)

    def exchanges_begin(self, undo: list[Undo], by_flags: bool) -> None:
        """What is under way from here on: see `UnderWay`."""
        for reducer in self.reducers:
            reducer.exchange.begin()
        self.under_way = UnderWay(undo, by_flags)

    def take_back_exchange(self) -> None:
        """Of exchanges that did not all end: as far as each had come."""
        assert self.under_way is not None
        for undo in self.under_way.undo:
            undo.take_back()
        self.under_way = None

    @property
    def undo(self) -> list[Undo]:
        """Of each reducer: takes back an exchange whose messages had flags of their own."""
        self._undo = self._undo or [Undo(reducer.exchange) for reducer in self.reducers]
        return self._undo

    def forget_undo(self) -> None:
        """Its memory."""
        self._undo = []

    def read_flags(self, flags: Tensor) -> None:
        """After all messages of a compressed step, which had flags of their own: those of all ranks, and `flags` as
        they are."""
        read_flags([reducer.exchange for reducer in self.reducers], flags)

    def check_captured(self, setup: Setup) -> None:
        """A ValueError where a CUDA graph can't hold the coming step."""
        if capturing(setup.device) and self.needs_step_number(setup):
            raise ValueError(
                f"a CUDA graph can't hold this step of {setup.name}: the host chooses what kind of step it is, and a "
                f"replay asks no host. Capture forward and backward alone, or steps of stage 2 of OneBitAdam or "
                f"OneBitLamb"
            )

    def count(self, setup: Setup, flags: Tensor, limits: Sequence[UpdateLimit] = (), alone: bool = False) -> None:
        """A step ends: see `Stages.count`. Parameters have been written."""
        self.stages.count(flags, self.compressed, len(setup.groups), alone=alone, limits=limits)
        for state in self.states:
            state.parameters_were_written()
            state.release_gradients()

    def read_last_step(self, setup: Setup) -> None:
        """What the host has to know of it. If it was taken in stage 2, messages hold the momentum from here on."""
        for reducer in self.reducers:
            reducer.read_mask()
        betas = list[float]()
        if not self.stages.compressing:
            betas = [betas_of(group)[1] if setup.options.bias_correction else 0.0 for group in setup.groups]
        if not self.stages.read_last_step(betas):
            return
        if not self.stages.compressing and setup.topology.everyone.rank == 0:
            self.stages.log_progress()
        if self.momentum_is_dense or self.momentum_is_folded:
            for state in (part.state for part in self.compressed_parts):
                for name in {FOLDED_MOMENTUM.name, MOMENTUM.name} & state.fields.keys():
                    state.remove(name)
            self.momentum_is_dense = self.momentum_is_folded = False

    def check_stage_1(self, what: str) -> None:
        if self.stages.compressing:
            raise ValueError(
                f"{what}: stage 2 has begun, and new parameters would have no frozen variance. Add all of them before "
                f"the freeze, or build a new optimizer"
            )

    def check_whole(self, what: str) -> None:
        """A ValueError after a freeze that did not end."""
        if self.half_frozen:
            raise ValueError(
                f"{what} after a freeze that an error or an interrupt has ended: one part of the state is that of "
                f"stage 1, another that of stage 2. Load the last saved state (load_state_dict)"
            )

    def check_synchronized(self) -> None:
        self.check_whole("state_dict")
        if not self.synchronized:
            raise ValueError(
                "state_dict between two exchanges: ranks have taken local steps, each to parameters of its own. Save "
                "when optimizer.synchronized is True (optimizer.schedule.next_sync says after which step), or call "
                "optimizer.synchronize() on every rank first"
            )

    def check_own_parameters(self, what: str) -> None:
        """A ValueError within `keep_last_sync`."""
        if self.at_last_sync:
            raise ValueError(f"{what} within at_last_sync(): there the model is not this rank's. Leave the block first")

    @contextmanager
    def keep_last_sync(self) -> Iterator[None]:
        """Within it the model has the parameters that all ranks had after the last exchange."""
        self.check_own_parameters("at_last_sync")
        restore: list[Callable[[], object]] = []
        try:
            for part in self.parts:
                if part.local is not None and part.local.taken:
                    for p, last in zip(part.state.values_now(), part.local.last_parameters(), strict=True):
                        value = p.data  # whose version is its own: it is no change by the user
                        restore.append(partial(value.copy_, value.clone()))
                        value.copy_(last)
                    restore.append(part.state.parameters_were_written)
                    part.state.parameters_were_written()
            self.at_last_sync = True
            yield
        finally:
            self.at_last_sync = False
            for put_back in restore:
                put_back()

    def synchronize(self, hyper: Tensor, bound: bool, keep: bool = False, arrived: bool = False) -> None:
        """The exchange after local steps. bound: whether flat states know the gradients. keep: as in `exchange`.
        arrived: whether the replies are there."""
        with masks.fixed_kept(self.states):
            for state in () if bound else self.states:
                state.bind_tensors()
            local = [part.local for part in self.parts if part.local is not None]
            if not arrived:
                self.exchange_local_steps(hyper, keep)
            for each, state in zip(local, self.states, strict=True):
                each.synchronize(hyper)
                state.parameters_were_written()
            self.under_way = None
            for state in () if bound else self.states:
                state.release_gradients()

    def freeze(self, setup: Setup, chunks: Sequence[int] = ()) -> Reports:
        """Stage 2 begins with the coming step: a collective call where chunks="auto" has to be measured, before all
        changes. chunks: of each compressed part, as other ranks have measured."""
        steps, algorithm = self.stages.steps, setup.algorithm
        algorithm.check_freeze(self.compressed, steps)
        chosen = list(chunks) or [setup.choose_chunks(state) for state in self.compressed]
        rows = setup.hyper_rows(max(1, steps))
        zeros: ZeroCounts = []
        self.half_frozen = True
        for part in (part for part in self.parts if part.state.compressed):
            state = part.state
            state.set_chunks(chosen.pop(0))
            masks.clear_fields(state)
            if JOINED.name in state:
                correct_joined_(state, rows, steps)
            without = algorithm.on_freeze(state, rows, setup.options)
            zeros += _named(setup, state, without)
            if algorithm.needs_previous_momentum:
                self.momentum_is_folded = True
                state.add(FOLDED_MOMENTUM).copy_(state[MOMENTUM.name])
            algorithm.momentum_becomes_residual(state, steps + 1, [rows[group].beta1 for group in state.groups])
            state.scratch = algorithm.scratch(state)
            part.start_reducer(setup)
        self.stages.compressing, self.half_frozen = True, False
        for name in ("compressed_parts", "reducers", "limits", "messages_are_small"):
            self.__dict__.pop(name, None)
        zeros += self._without_variance(setup, steps)
        if setup.topology.everyone.rank > 0:
            return []
        asked = self.stages.rule.freeze_step
        at_once = asked is not None and asked < steps == self.stages.steps_before
        return [partial(report_freeze, steps, at_once, zeros, setup.options.zero_variance, self.ddp_averages)]

    def warn_of_variance(self, setup: Setup, flags: Tensor) -> Reports:
        """After a full-precision step of stage 2, if it was the last one and was taken."""
        step = self.stages.steps + 1
        zeros = self._without_variance(setup, step)
        if not zeros or setup.topology.everyone.rank > 0 or flags.any():
            return []
        when = f"after step {step}, the last one that updates it"
        return [partial(warn_of_zeros, when, zeros, setup.options.zero_variance)]

    def _without_variance(self, setup: Setup, step: int) -> ZeroCounts:
        """After a full-precision step, if it was the last one."""
        found = [(state, setup.algorithm.without_variance(state, step)) for state in self.compressed]
        return [one for state, without in found for one in _named(setup, state, without)]


def _named(setup: Setup, state: FlatState, without: Mapping[int, int]) -> ZeroCounts:
    return [(setup.name_of(state.params[i]), n, state.whole_numels[i]) for i, n in without.items() if n]

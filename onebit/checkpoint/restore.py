"""How a saved state comes back: what `onebit.checkpoint.schema` describes, or what torch.optim.AdamW has saved.

    residuals    this rank's own bit for bit, or the mean of all; where ranks have left or come, what they owe
    momentum     the same messages, or folded into the residual

Which of the two is decided once, by a comparison of the `Cut` of the state with that of the run. Everything is built
and checked beside the present state: a state that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.checks import (
    check_options,
    check_own,
    check_states,
    check_structure,
    checked_numbers,
    shaped,
    steps_of,
)
from onebit.checkpoint.elements import (
    BITS,
    ORDER,
    SCALES,
    Saved,
    blocks_of_momentum,
    is_by_element,
    lengths_of,
    message_name,
    momentum,
    rank_of,
    residual_name,
    saved_order,
    server_residual_name,
    spread,
)
from onebit.checkpoint.schema import progress
from onebit.collectives.reply import WAYS
from onebit.kernels.data.bits import packed, unpacked
from onebit.kernels.data.layout import Layout, Span
from onebit.optim.fields import FIRST_MOMENTUM, JOINED, MASTER, RESIDUAL, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.held import clear_fields
from onebit.optim.limit import USUAL
from onebit.optim.mean_norm import ANEW, MeanNorm
from onebit.optim.memory_order import Order, flattened, order_of, reordered
from onebit.optim.options import KEYS_OF_OTHERS, OF_ADAMW, check_group
from onebit.optim.param_groups import COMPRESS, PROGRESS, betas_of, is_compressed
from onebit.optim.reducer import MomentumReducer
from onebit.optim.setup import Setup
from onebit.optim.sharding import local, part_of
from onebit.optim.snapshot import Part, Snapshot
from onebit.optim.stages import Stages
from onebit.warning import warn


@dataclass(frozen=True)
class Cut:
    """How a run cuts parameters and messages for its ranks. A load compares that of a state with that of the run."""

    nodes: int
    slices: int  # ranks a node
    shards: int  # into which FSDP cuts parameters
    reply: Any  # a key of WAYS
    scale: str
    block_size: int
    chunks: tuple[int, ...]  # of the parameters of each dtype
    orders: Mapping[int, Order]  # of parameters that are permuted in memory

    @classmethod
    def of_state(cls, numbers: Mapping[str, Any], orders: Mapping[int, Order]) -> Cut:
        slices, chunks = int(numbers["slices"]), tuple(map(int, numbers["chunks"]))
        return cls(
            int(numbers["ranks"]) // slices, slices, int(numbers["shards"]), numbers["reply"], numbers["scale"],
            numbers["block_size"], chunks, orders,
        )  # fmt: skip

    @classmethod
    def of_run(cls, setup: Setup, saved: Cut) -> Cut:
        """Of a run that is to go on from a state."""
        options, topology = setup.options, setup.topology
        chunks = saved.chunks if options.chunks == "auto" else (options.chunks,) * len(saved.chunks)
        params = [(p, group) for group in setup.groups for p in group["params"]]
        orders = {
            i: order_of(local(p)) for i, (p, group) in enumerate(params) if p.requires_grad and is_compressed(group)
        }
        return cls(
            topology.nodes, topology.slices, topology.shards, setup.way.way, options.scale, options.block_size, chunks,
            {i: order for i, order in orders.items() if order is not None},
        )  # fmt: skip

    def keeps_residuals_of(self, saved: Cut) -> bool:
        """Whether this rank's own residuals are all that it needs. Those of servers lie where the cut has them, or go
        into the rank's own, where replies are direct."""
        own, its = ((c.reply, c.block_size, c.chunks, c.orders) for c in (self, saved))
        whole = self.slices == 1 and "direct" in (self.reply, saved.reply)
        return self._ranks == saved._ranks and (own == its or whole)

    def keeps_messages_of(self, saved: Cut) -> bool:
        """Whether the last messages of the state are messages of this run."""
        own, its = ((c.shards, c.reply, c.scale, c.block_size, c.orders) for c in (self, saved))
        same_rows = self.reply != "direct" or self._ranks == saved._ranks
        same_scales = self.scale == "block" or (self._ranks, self.chunks) == (saved._ranks, saved.chunks)
        return own == its and same_rows and same_scales

    @property
    def _ranks(self) -> tuple[int, int, int]:
        return self.nodes, self.slices, self.shards


def from_state_dict(
    setup: Setup, current: Snapshot, state_dict: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Snapshot]:
    """What `restored` returns, from what an optimizer's `state_dict` did."""
    groups = _checked_groups(setup, state_dict)
    keys = chain.from_iterable(g["params"] for g in groups)
    params = chain.from_iterable(g["params"] for g in setup.groups)
    state = {p: state_dict["state"].get(key, {}) for key, p in zip(keys, params, strict=True)}
    reached = groups[0].get(PROGRESS, {})
    names = str(reached.get("fields")).split() if isinstance(reached, Mapping) else []
    if JOINED.name in names and not any(JOINED.name in own for own in state.values()):
        raise ValueError(
            f"the state has no {JOINED.name}, with which it was saved: parameters were added to the run, and their "
            f"variance would be frozen too small. torch fills only what this optimizer has: call onebit.make_room first"
        )
    return restored(setup, current, state, reached, groups)


def adopted(setup: Setup, current: Snapshot, state: Mapping[Tensor, Saved]) -> Snapshot:
    """Where a run of stage 1 goes on from with `state`, which a user has put into `optimizer.state`."""
    check_states({p: own for p, own in state.items() if own})
    for each in current.states:
        each.take_over_writes()
    return restored(setup, current, state, progress(setup, current), setup.groups)[1]


def restored(
    setup: Setup,
    current: Snapshot,
    state: Mapping[Tensor, Saved],
    reached: object,
    groups: Sequence[Mapping[str, Any]],
    kept: Sequence[int] | None = None,
    fold: bool = False,
) -> tuple[list[dict[str, Any]], Snapshot]:
    """What each param group is updated with, and where the run had come to. Nothing changes.

    reached, groups: how far the run had come, and what every param group had beside its parameters. kept: where ranks
    have left or come, the places of those whose residuals this rank goes on with, once `Snapshot.collect_residuals` was
    called. fold: whether m goes into the residuals in any case.
    """
    # without empty dicts: torch's get_optimizer_state_dict puts them where a flattened state lacks a name
    saved = {
        p: {name: v for name, v in (state.get(p) or {}).items() if not isinstance(v, Mapping) or v}
        for group in setup.groups
        for p in group["params"]
    }
    numbers = _numbers(setup, checked_numbers(reached), saved)
    merged = _merged_options(setup, groups, numbers["compressing"])
    betas = [betas_of(group) for group in merged]
    return merged, _Restoration(setup, numbers, saved, betas, kept, fold).snapshot(len(current.compressed))


@dataclass
class _Restoration:
    """New parts, filled from what was saved."""

    setup: Setup
    numbers: Mapping[str, Any]
    saved: Mapping[Tensor, Saved]
    betas: Sequence[tuple[float, float]]  # of each param group that was saved
    kept: Sequence[int] | None = None
    fold: bool = False
    residuals_missing: bool = False

    def snapshot(self, dtypes: int) -> Snapshot:
        """dtypes: of the parameters that are compressed."""
        setup, numbers = self.setup, self.numbers
        chunks = numbers["chunks"] if self.numbers["compressing"] else []
        if self.numbers["compressing"] and len(chunks) != dtypes:
            raise ValueError(
                f"the state was saved with parameters of {len(chunks)} dtypes, here they have {dtypes}: messages of "
                f"stage 2 are made for each. Cast the model as it was when it was saved"
            )
        parts = [Part(state) for state in setup.flat_states(chunks)]
        saved = [self._checked(part.state) for part in parts]
        for part, own in zip(parts, saved, strict=True):
            self._load_fields(part.state, own)
        if self.numbers["compressing"]:
            self._load_stage_2([each for each in zip(parts, saved, strict=True) if each[0].state.compressed])
        for part in parts:
            part.state.scratch = setup.algorithm.scratch(part.state)
        rule = setup.freeze_rule([part.state for part in parts])
        rule.restore(numbers["trace"])
        steps, skipped = int(numbers["steps"]), int(numbers["skipped_steps"])
        stages = Stages(rule, setup.device, steps=steps, skipped=skipped, compressing=self.numbers["compressing"])
        return Snapshot(
            parts,
            stages,
            MeanNorm(setup.device, self._mean_norm()),
            int(numbers["wire_bytes"]),
            residuals_missing=self.residuals_missing,
            momentum_was_folded=self.fold,
        )

    def _mean_norm(self) -> list[float]:
        """With another number of senders F is not known: a mean of more gradients is shorter."""
        full, *others = map(float, self.numbers["mean_norm"])
        same = int(self.numbers["ranks"]) // int(self.numbers["slices"]) == self.setup.topology.nodes
        return [full if same else 0.0, *others]

    def _in_stage_2(self, state: FlatState) -> bool:
        return self.numbers["compressing"] and state.compressed

    def _fields(self, state: FlatState) -> tuple[Field, ...]:
        algorithm = self.setup.algorithm
        if not self._in_stage_2(state):
            return (*algorithm.stage_1, MASTER)
        first = (FIRST_MOMENTUM,) if algorithm.needs_previous_momentum else ()
        return (*algorithm.stage_2, *first, MASTER)

    def _checked(self, state: FlatState) -> list[Saved]:
        """Of every parameter what was saved of this rank's part, as far as its fields say what that can be."""
        fields, numbers = self._fields(state), self.setup.algorithm.numbers()
        of_bits = [field.name for field in fields if field.per == "bit"]
        saved: list[Saved] = []
        for i, p in enumerate(state.params):
            own = {name: part_of(v, None if name in numbers else p) for name, v in self.saved[p].items()}
            if is_by_element(own):
                own |= {name: packed(own[name].view(-1)) for name in of_bits if name in own}
            elif self._in_stage_2(state) and self.setup.topology.shard is not None:
                raise ValueError(
                    "the state is one of whole parameters in stage 2, the parameters here are sharded: load it into a "
                    "model without FSDP. Or what brought it (torch's broadcast_from_rank0, say) looks only for what "
                    "this optimizer has: then call onebit.make_room first"
                )
            if "fields" in self.numbers:  # torch's set_optimizer_state_dict adds what this optimizer has beside them
                others = {ORDER, *(field.name for field in fields)} - set(self.numbers["fields"].split())
                own = {name: value for name, value in own.items() if name not in others}
            if own or self.numbers["compressing"]:
                check_own(own, fields, state.shapes[i], self.setup.name_of(p))
            saved.append(own)
        return saved

    def _load_fields(self, state: FlatState, saved: Sequence[Saved]) -> None:
        for field in self._fields(state):
            there = field.always or any(field.name in own for own in saved)
            if there and field is not MASTER:  # which a flat state has from the start, or does without
                state.add(field)
        for i, own in enumerate(saved):
            for field in state.fields.values():
                if not (field.saved and field.same_on_all_ranks):
                    continue
                if field.name in own:
                    self._load_field(state, field, i, own)
                elif field.required and own:
                    shaped(own, field.name, None, self.setup.name_of(state.params[i]), field.values)
        algorithm, steps = self.setup.algorithm, int(self.numbers["steps"])
        state.master_is_current = all(MASTER.name in own for own in saved)
        if "optimizer" not in self.numbers and state.compressed and steps:
            algorithm.adopt_variance(state, steps, [self.betas[group][1] for group in state.groups])

    def _load_field(self, state: FlatState, field: Field, index: int, own: Saved) -> None:
        value, saved = state.view(field.name, index), own[field.name]
        there, here = saved_order(own), state.orders[index]
        if field.per == "bit" and there != here:
            flags = unpacked(saved)[: state.numels[index]]
            saved = packed(reordered(flags, state.shapes[index], there, here))
        value.copy_(saved.view(value.shape))

    def _load_stage_2(self, parts: Sequence[tuple[Part, Sequence[Saved]]]) -> None:
        """Messages and residuals of the compressed parts, each with what was saved of it."""
        places = {p: i for i, p in enumerate(self.saved)}
        owns = chain.from_iterable(zip(part.state.params, saved, strict=True) for part, saved in parts)
        there = Cut.of_state(self.numbers, {places[p]: saved_order(own) for p, own in owns if ORDER in own})
        here, place = Cut.of_run(self.setup, there), self.setup.topology.place
        own_residuals = here.keeps_residuals_of(there)
        self.fold = self.fold or not here.keeps_messages_of(there)
        for (part, saved), saved_chunks, chunks in zip(parts, there.chunks, here.chunks, strict=True):
            part.state.set_chunks(chunks)
            clear_fields(part.state)
            part.start_reducer(self.setup)
            assert part.reducer is not None
            messages = _Messages(part.state, saved, there, saved_chunks)
            messages.check(self.setup)
            if self.kept is not None:
                part.collect_residuals = messages.keep_residuals(part.reducer, self.kept)
            elif own_residuals and messages.has_residuals([place]):
                messages.add_residuals(part.reducer, [place])
            elif messages.has_residuals(messages.places):
                messages.add_residuals(part.reducer, messages.places)
            else:
                self._warn_of_missing(len(messages.places))
            if self.fold:
                self._fold_momentum(part, messages)
            else:
                messages.put_momentum(part.reducer)

    def _fold_momentum(self, part: Part, messages: _Messages) -> None:
        """What messages of another shape held goes where the next messages of this run take it from."""
        state, algorithm = part.state, self.setup.algorithm
        if USUAL.name in state:  # it is of the messages that there were
            state[USUAL.name].zero_()
        beta1s = [self.betas[group][0] for group in state.groups]
        field, factors = algorithm.where_momentum_goes(state, int(self.numbers["steps"]) + 1, beta1s)
        if algorithm.needs_previous_momentum and FIRST_MOMENTUM.name not in state:
            state.add(FIRST_MOMENTUM)
            messages.add_momentum(FIRST_MOMENTUM.name, [1.0] * len(factors))
        fold = partial(messages.add_momentum, field.name, factors)
        fold()
        if field is RESIDUAL:  # which is cleared where another rank has none
            part.fold_momentum_again = fold

    def _warn_of_missing(self, ranks: int) -> None:
        if not self.residuals_missing:
            warn(
                f"the state does not hold the residuals of all {ranks} ranks that saved it, nor those of this rank for "
                f"as many: they start from zero, and what compression had left out is lost. Save on every rank; for "
                f"another number of ranks load onebit.merge_states of all of them"
            )
        self.residuals_missing = True


@dataclass(frozen=True)
class _Messages:
    """Residuals and momentum of one flat state's parameters, as they were saved. A place is that of a rank."""

    state: FlatState
    saved: Sequence[Saved]
    cut: Cut
    chunks: int

    @cached_property
    def layout(self) -> Layout:
        """By which the state was cut."""
        shards = self.cut.slices * WAYS[self.cut.reply].shards(self.cut.nodes)
        return Layout(self.state.numels, block_size=self.cut.block_size, ranks=shards, chunks=self.chunks)

    @property
    def places(self) -> Sequence[int]:
        return range(self.cut.nodes * self.cut.slices)

    def spans(self, place: int) -> dict[str, list[Span]]:
        """Where each residual of a place lies: that of its slice, and that of the shards that it averages for all."""
        node, index = divmod(place, self.cut.slices)
        found = {residual_name(place): self.layout.parts(index, self.cut.slices)}
        if self.cut.reply != "direct":
            found[server_residual_name(place)] = self.layout.parts(index * self.cut.nodes + node, self.layout.ranks)
        return found

    def check(self, setup: Setup) -> None:
        copies = self.cut.nodes if self.cut.reply == "direct" else 1
        rows, size = () if copies == 1 else (copies,), self.cut.block_size
        present = {place for own in self.saved for name in own if (place := rank_of(name)) in self.places}
        spans = {place: self.spans(place) for place in present if place is not None}
        for i, own in enumerate(self.saved):
            name, shape = setup.name_of(self.state.params[i]), self.state.shapes[i]
            if is_by_element(own):
                for copy in range(copies):
                    shaped(own, message_name(copy), shape, name, "finite")
                if message_name(copies) in own:
                    raise ValueError(f"the state has more than {copies} messages for parameter {name}: it is damaged")
            else:
                lengths = lengths_of(self.state.numels[i], size)
                shaped(own, BITS, (*rows, int(lengths.sum()) // 8), name, "bits")
                shaped(own, SCALES, (*rows, len(lengths)), name, "non-negative")
            for place in (place for place in spans if residual_name(place) in own):
                for what, its_spans in spans[place].items():
                    kept = _elements_in(its_spans, i)
                    whole = is_by_element(own) or (what == residual_name(place) and self.cut.slices == 1)
                    if whole or kept:
                        shaped(own, what, shape if whole else (kept,), name, "finite")

    def has_residuals(self, places: Sequence[int]) -> bool:
        return all(
            name in own or not _elements_in(self.spans(place)[name], i)
            for place, name in ((place, residual_name(place)) for place in places)
            for i, own in enumerate(self.saved)
        )

    def add_residuals(self, reducer: MomentumReducer, places: Sequence[int]) -> None:
        """The mean over nodes of what these places, all or one, have left out of their slices, and what they have left
        out as servers."""
        state, nodes = self.state, len({place // self.cut.slices for place in places})
        for i in range(len(self.saved)):
            e, of_servers = self._left_out(i, places, 1 / nodes)
            if not reducer.served_spans:  # nobody else sends what servers have left out, and messages are averaged
                e = e.add(of_servers, alpha=self.cut.nodes / nodes)
            for part, own_e in state.parts_of(RESIDUAL.name, i):
                own_e.add_(e[part].to(own_e.device))
            for part, own_of_server in reducer.served(i):
                own_of_server.copy_(of_servers[part])

    def keep_residuals(self, reducer: MomentumReducer, places: Sequence[int]) -> Callable[[], None]:
        """What these places owe is owed by this rank, of N' senders where there were N: e N' / N, and N' E on what they
        have averaged. With two levels a rank of the node owes what lies in its slice. Residuals change, and ranks of a
        node send, when the result is called."""
        exchange, state = reducer.exchange, self.state
        senders = exchange.transport.size
        all_owed: list[Tensor] = []
        if places:  # else nothing is kept
            for i in range(len(self.saved)):
                e, of_servers = self._left_out(i, places, senders / self.cut.nodes)
                all_owed.append(e.add(of_servers, alpha=senders).to(state.device))

        def collect_residuals() -> None:
            for i, numel in enumerate(state.numels):
                owed = all_owed[i] if all_owed else torch.zeros(numel, dtype=torch.float32, device=state.device)
                if exchange.node.size > 1:
                    exchange.node.all_sum(owed, "collecting what the ranks of a node owe (all-reduce)").wait()
                for part, own_e in state.parts_of(RESIDUAL.name, i):
                    own_e.add_(owed[part])

        return collect_residuals

    def _left_out(self, index: int, places: Sequence[int], share: float) -> tuple[Tensor, Tensor]:
        """Of one parameter what these places have left out of their slices, each times share, and what they have left
        out as servers: fp32, as the parameter lies here, 0 where they had nothing."""
        state, own = self.state, self.saved[index]
        there, here, shape = saved_order(own), state.orders[index], state.shapes[index]
        e, of_servers = torch.zeros((2, state.numels[index]), dtype=torch.float32, device="cpu")
        for place in places:
            spans = self.spans(place)
            for name in spans.keys() & own.keys():
                values = spread(flattened(own[name].cpu(), there), spans[name], index, len(e))
                if name == residual_name(place):
                    e.add_(values, alpha=share)
                else:
                    of_servers.add_(values)
        return reordered(e, shape, there, here), reordered(of_servers, shape, there, here)

    def put_momentum(self, reducer: MomentumReducer) -> None:
        """m as the replies of the last step, and as what this rank sent of them."""
        layout, device, replies = reducer.state.layout, reducer.state.device, reducer.replies
        all_bits = torch.zeros((replies.copies, layout.elements // 8), dtype=torch.uint8, device=device)
        all_scales = torch.zeros((replies.copies, layout.blocks), dtype=torch.float32, device=device)
        for i, own in enumerate(self.saved):
            bits, scales = blocks_of_momentum(own, self.cut.block_size)
            start = int(layout.offset[i]) // 8
            all_bits[:, start : start + bits.shape[-1]] = bits.to(device)
            all_scales[:, layout.blocks_of(i)] = scales.to(device)
        replies.put(layout.all(), all_bits, all_scales)
        exchange = reducer.exchange
        of_slice = exchange.transport.size
        for chunk in exchange.chunks:
            chunk.own_reply.buffer.copy_(chunk.replies.buffer[exchange.own_row][None])
            chunk.arriving.buffer.copy_(chunk.replies.buffer[exchange.node.rank * of_slice :][:of_slice])

    def add_momentum(self, name: str, factors: Sequence[float]) -> None:
        """Add m, each parameter's multiplied by its factor, to a field."""
        state = self.state
        for i, own in enumerate(self.saved):
            m = momentum(own, state.shapes[i], self.cut.block_size).mean(0).to(state.device)
            for part, kept in state.parts_of(name, i):
                kept.add_(flattened(m, state.orders[i])[part], alpha=factors[i])


def _elements_in(spans: Sequence[Span], index: int) -> int:
    """How many elements of one parameter lie in spans."""
    return sum(part.stop - part.start for span in spans for part, _ in span.of_parameter(index))


def clear_residuals(current: Snapshot) -> None:
    for part in current.parts:
        if part.reducer is not None:
            exchange = part.reducer.exchange
            for residual in exchange.residuals.values():
                residual.materialize()
                residual.value.zero_()
            if part.fold_momentum_again is not None:
                part.fold_momentum_again()


def _checked_groups(setup: Setup, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    check_structure(state_dict)
    groups = list(state_dict["param_groups"])
    here, there = ([len(g["params"]) for g in each] for each in (setup.groups, groups))
    if here != there:
        raise ValueError(
            f"the state has param groups of {there} parameters, this optimizer of {here}: give it the parameters in "
            f"the groups it was saved with"
        )
    check_options(groups)
    if any(g.get("maximize") for g in groups):
        raise ValueError("the state was saved with maximize=True, which onebit does not know: negate the loss instead")
    if any(g.get("amsgrad") for g in groups):
        warn("the state was saved with amsgrad=True: its maximum of variances is not used")
    return groups


def _merged_options(setup: Setup, groups: Sequence[Mapping[str, Any]], compressing: bool) -> list[dict[str, Any]]:
    """Options that this optimizer has, and what others (schedulers) have left in the groups."""
    merged, not_options = [], {"params", COMPRESS} | OF_ADAMW
    for i, (group, saved) in enumerate(zip(setup.groups, groups, strict=True)):
        if compressing and is_compressed(group) != is_compressed(saved):  # in stage 1 it may be another from here on
            raise ValueError(
                f"the state is one of stage 2, of a run with compress={is_compressed(saved)} in param group {i}, and "
                f"here it is {is_compressed(group)}: what the one keeps the other has no use for. Give the group what "
                f"it had"
            )
        given = {k: v for k, v in saved.items() if k not in not_options}
        new = deepcopy({k: v for k, v in given.items() if k in group or k in KEYS_OF_OTHERS})
        if unknown := sorted(given.keys() - new.keys()):
            warn(f"the state's param groups have {', '.join(unknown)}, with which nothing is done here: left out")
        if isinstance(new["betas"], list):  # as JSON and torch.distributed.checkpoint have it
            new["betas"] = tuple(new["betas"])
        check_group({**group, **new})
        merged.append(new)
    return merged


def _numbers(setup: Setup, numbers: dict[str, Any], saved: Mapping[Tensor, Saved]) -> Mapping[str, Any]:
    """How far the run had come that saved the state: as it says, or as torch.optim.AdamW's does."""
    if numbers and numbers["compressing"]:
        if numbers["optimizer"] != setup.name:
            raise ValueError(
                f"the state is one of {numbers['optimizer']} in stage 2: {setup.name} can't continue it. Build "
                f"{numbers['optimizer']}, or load onebit.adamw_state(state), with which {setup.name} goes on from the "
                f"moments"
            )
        setup.algorithm.check_saved_settings(numbers["settings"], int(numbers["steps"]))
        if any("step" in own for own in saved.values()) and _steps_of(saved) != numbers["steps"]:
            raise ValueError(
                f"the state is one of step {numbers['steps']}, and its parameters have taken {_steps_of(saved)}: it is "
                f"damaged, or nothing was loaded into what make_room has made. Load another"
            )
        return numbers
    steps = _steps_of(saved)
    if numbers and numbers["steps"] == steps and numbers["optimizer"] == setup.name:
        setup.algorithm.check_saved_settings(numbers["settings"], steps)
        return numbers
    return {
        "ranks": 1, "slices": 1, "steps": steps, "skipped_steps": 0, "compressing": False, "chunks": [],
        "wire_bytes": 0, "mean_norm": ANEW, "trace": [],
    }  # fmt: skip


def _steps_of(saved: Mapping[Tensor, Saved]) -> int:
    without = [i for i, own in enumerate(saved.values()) if own and "step" not in own]
    if without:
        raise ValueError(
            f"the state has moments of parameter {without[0]} and no step: how often they were updated decides of the "
            f"next update. Load a state with its steps, or add step, a tensor of one number, to each parameter's"
        )
    steps = {steps_of(own) for own in saved.values() if "step" in own}
    if len(steps) > 1:
        raise ValueError(
            f"the parameters have taken different numbers of steps ({sorted(steps)}): onebit counts the same for all. "
            f"Some had no gradient at times; set every state's step to {max(steps)} to continue with that"
        )
    return max(steps, default=0)

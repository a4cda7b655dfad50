"""How a saved state comes back: what `onebit.checkpoint.schema` describes, or what torch.optim.AdamW has saved.

Everything is built and checked beside the present state: a state that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.checks import check_numbers, check_options, check_own, check_structure, shaped, steps_of
from onebit.checkpoint.elements import decoded, lengths_of, saved_order, scattered
from onebit.checkpoint.names import BITS, DENSE, ORDER, SCALES, rank_of, residual_name, server_residual_name
from onebit.checkpoint.schema import Saved, progress, progress_of
from onebit.checkpoint.sharded import as_folded, as_it_was, is_by_element
from onebit.collectives.direct import Direct
from onebit.collectives.exchange import Exchange
from onebit.collectives.reply import WAYS
from onebit.kernels.data.bits import packed, unpacked
from onebit.kernels.data.layout import Layout, Span
from onebit.optim.fields import FIRST_MOMENTUM, MASTER, RESIDUAL, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.held import clear_fields
from onebit.optim.limit import USUAL
from onebit.optim.memory_order import flattened, reordered
from onebit.optim.options import check_group, is_known_key
from onebit.optim.param_groups import COMPRESS, PROGRESS, betas_of, is_compressed
from onebit.optim.reducer import MomentumReducer
from onebit.optim.setup import Setup
from onebit.optim.sharding import part_of
from onebit.optim.snapshot import Part, Snapshot
from onebit.optim.stages import Stages
from onebit.warning import warn

_NOT_OPTIONS = {
    "params", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "decoupled_weight_decay",
}  # fmt: skip


def restored(setup: Setup, current: Snapshot, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Snapshot]:
    """What each param group is updated with, and where the run had come to. Nothing changes."""
    groups = _checked_groups(setup, state_dict)
    keys = chain.from_iterable(g["params"] for g in groups)
    params = chain.from_iterable(g["params"] for g in setup.groups)
    saved = {p: _present(state_dict["state"].get(key, {})) for key, p in zip(keys, params, strict=True)}
    merged = merged_options(setup, groups)
    numbers = _numbers(setup, progress_of(groups), saved)
    if numbers["compressing"]:
        _check_compressed_alike(setup, groups)
    betas = [betas_of(group) for group in merged]
    return merged, _Restoration(setup, numbers, saved, betas).snapshot(len(current.compressed))


def adopted(setup: Setup, current: Snapshot, state: Mapping[Tensor, Saved]) -> Snapshot:
    """Where a run of stage 1 goes on from with `state`, which a user has put into `optimizer.state`."""
    params = [p for group in setup.groups for p in group["params"]]
    keys = iter(range(len(params)))
    groups = [{**group, "params": [next(keys) for _ in group["params"]]} for group in setup.groups]
    groups[0][PROGRESS] = progress(setup, current)
    own = {i: state[p] for i, p in enumerate(params) if state.get(p)}
    return restored(setup, current, {"state": own, "param_groups": groups})[1]


def _present(own: Saved) -> Saved:
    """Without empty dicts: torch's get_optimizer_state_dict puts them where a flattened state lacks a name."""
    return {name: value for name, value in own.items() if not isinstance(value, Mapping) or value}


class _Restoration:
    """New parts, filled from what was saved."""

    def __init__(
        self,
        setup: Setup,
        numbers: Mapping[str, Any],
        saved: Mapping[Tensor, Saved],
        betas: Sequence[tuple[float, float]],
    ) -> None:
        """betas: of each param group that was saved."""
        self._setup, self._numbers, self._saved, self._betas = setup, numbers, saved, betas
        self._compressing = bool(numbers["compressing"])
        self._residuals_missing = False

    def snapshot(self, dtypes: int) -> Snapshot:
        """dtypes: of the parameters that are compressed."""
        setup, numbers, chunks = self._setup, self._numbers, self._numbers["chunks"]
        if self._compressing and len(chunks) != dtypes:
            raise ValueError(
                f"the state was saved with parameters of {len(chunks)} dtypes, here they have {dtypes}: messages of "
                f"stage 2 are made for each. Cast the model as it was when it was saved"
            )
        states = setup.flat_states(chunks if self._compressing else ())
        parts = [self._part(state, sum(s.compressed for s in states[:i])) for i, state in enumerate(states)]
        rule = setup.freeze_rule(states)
        rule.restore(numbers["trace"])
        stages = Stages(
            rule,
            setup.device,
            steps=int(numbers["steps"]),
            skipped=int(numbers["skipped_steps"]),
            compressing=self._compressing,
        )
        return Snapshot(parts, stages, int(numbers["wire_bytes"]), residuals_missing=self._residuals_missing)

    def _part(self, state: FlatState, index: int) -> Part:
        """index: of so many compressed states it comes after."""
        part, saved, fields = Part(state), self._saved_parts(state, index), self._fields(state)
        for i, own in enumerate(saved):
            if own or self._compressing:
                check_own(own, fields, state.shapes[i], self._setup.name_of(state.params[i]))
        saved = [self._without_left_over(own, fields) for own in saved]
        if self._in_stage_2(state):
            asked = self._setup.options.chunks
            state.set_chunks(int(self._numbers["chunks"][index]) if asked == "auto" else asked)
        self._add_fields(state, saved)
        for i, own in enumerate(saved):
            if own or self._compressing:
                self._load_fields(state, i, own)
        state.master_is_current = all(MASTER.name in own for own in saved)
        state.scratch = self._setup.algorithm.scratch(state)
        if "optimizer" not in self._numbers and state.compressed and (steps := int(self._numbers["steps"])):
            self._setup.algorithm.adopt_variance(state, steps, [self._betas[group][1] for group in state.groups])
        if self._in_stage_2(state):
            clear_fields(state)
            part.start_reducer(self._setup)
            if any(DENSE in own for own in saved):
                self._load_folded(part, saved)
            else:
                self._load_messages(part, saved, self._saved_cut(state, index))
        return part

    def _in_stage_2(self, state: FlatState) -> bool:
        return self._compressing and state.compressed

    def _fields(self, state: FlatState) -> tuple[Field, ...]:
        algorithm = self._setup.algorithm
        if not self._in_stage_2(state):
            return (*algorithm.stage_1, MASTER)
        first = (FIRST_MOMENTUM,) if algorithm.needs_previous_momentum else ()
        return (*algorithm.stage_2, *first, MASTER)

    def _saved_parts(self, state: FlatState, index: int) -> list[Saved]:
        """Of every parameter what was saved of this rank's part, as the schema has it."""
        of_parameters = self._setup.algorithm.numbers()
        saved: list[Saved] = [
            {name: part_of(v, None if name in of_parameters else p) for name, v in self._saved[p].items()}
            for p in state.params
        ]
        if not self._in_stage_2(state):
            return saved
        topology, numbers = self._setup.topology, self._numbers
        of_shards = [is_by_element(dict(own)) for own in saved]
        if topology.shard is not None and not all(of_shards):
            raise ValueError(
                "the state is one of whole parameters in stage 2, the parameters here are sharded: load it into a "
                "model without FSDP. Or what brought it (torch's broadcast_from_rank0, say) looks only for what this "
                "optimizer has: then call onebit.make_room first"
            )
        if not any(of_shards):
            return saved
        packed_fields = [field.name for field in self._fields(state) if field.per == "bit"]
        same_numbers = (numbers["scale"], numbers["reply"]) == (self._setup.options.scale, self._setup.way.way)
        if not same_numbers or not same_cut(self._setup, numbers):
            ranks, here = int(numbers["ranks"]), topology.place
            same = (ranks, numbers["shards"]) == (topology.nodes * topology.slices, topology.shards)
            place = here if same and topology.slices == 1 else None
            return [as_folded(dict(own), packed_fields, ranks, place, here) for own in saved]
        cut = self._saved_cut(state, index)
        shards, place = cut.shard_spans(topology.place), topology.place
        size = cut.layout.block_size
        return [as_it_was(dict(own), i, size, packed_fields, shards, place) for i, own in enumerate(saved)]

    def _without_left_over(self, own: Saved, fields: Sequence[Field]) -> Saved:
        """Only the fields that were saved: torch's set_optimizer_state_dict with full_state_dict=True adds what this
        optimizer has beside them."""
        if "fields" not in self._numbers:  # AdamW's
            return own
        others = {ORDER, *(field.name for field in fields)} - set(self._numbers["fields"].split())
        return {name: value for name, value in own.items() if name not in others}

    def _add_fields(self, state: FlatState, saved: Sequence[Saved]) -> None:
        for field in self._fields(state):
            there = field.always or any(field.name in own for own in saved)
            if there and field is not MASTER:  # which a flat state has from the start, or does without
                state.add(field)

    def _load_fields(self, state: FlatState, index: int, own: Saved) -> None:
        name = self._setup.name_of(state.params[index])
        for field in list(state.fields.values()):
            if not field.saved or not field.same_on_all_ranks:
                continue
            if field.name in own:
                value, saved = state.view(field.name, index), own[field.name]
                there, here = saved_order(own), state.orders[index]
                if field.per == "bit" and there != here:
                    flags = unpacked(saved)[: state.numels[index]]
                    saved = packed(reordered(flags, state.shapes[index], there, here))
                value.copy_(saved.view(value.shape))
            elif field.required:
                raise ValueError(
                    f"the state has no {field.name} for parameter {name}: it is damaged, or not a state of "
                    f"{self._setup.name} or AdamW, or what brought it looks only for what this optimizer has: then "
                    f"call onebit.make_room first"
                )

    def _saved_cut(self, state: FlatState, index: int) -> _SavedCut:
        n = self._numbers
        ranks, slices = int(n["ranks"]), int(n["slices"])
        shards = slices * self._way.shards(ranks // slices)
        layout = Layout(state.numels, block_size=n["block_size"], ranks=shards, chunks=n["chunks"][index])
        return _SavedCut(layout, ranks // slices, slices, self._way is not Direct)

    @property
    def _way(self) -> type[Exchange]:
        """Of the exchange that saved the state."""
        return WAYS[self._numbers["reply"]]

    def _load_messages(self, part: Part, saved: Sequence[Saved], cut: _SavedCut) -> None:
        state, reducer, setup, there = part.state, part.reducer, self._setup, cut.layout
        assert reducer is not None
        self._check_messages(state, saved, cut)
        n, topology, way = self._numbers, setup.topology, self._way
        same_ranks = (cut.nodes, cut.slices) == (topology.nodes, topology.slices)
        same_cut = _pieces(there.all().shards()) == _pieces(state.layout.all().shards())
        holds = [all(residual_name(p) in own or not n for own, n in zip(saved, cut.kept(p), strict=True))
                 for p in cut.places]  # fmt: skip
        same_slices = cut.slices == 1 or _pieces(cut.slice_spans(topology.place)) == _pieces(state.slice_spans)
        same_shards = same_cut or (Direct in (way, setup.way) and same_slices)
        same_order = [saved_order(own) for own in saved] == state.orders
        in_shapes = cut.slices == 1 and way is setup.way is Direct  # what was left out is in the parameters' shapes
        own_will_do = same_ranks and same_shards and (same_order or in_shapes)
        if own_will_do and holds[topology.place]:  # what it has left out itself is all that a rank needs
            _put_residuals(reducer, saved, cut, [topology.place])
        elif all(holds):
            _put_residuals(reducer, saved, cut, cut.places)
        else:
            self._warn_of_missing(len(cut.places))
        same_blocks = there.block_size == state.layout.block_size and (same_cut or n["scale"] == "block")
        same_way = (way, n["scale"]) == (setup.way, setup.options.scale)
        same_messages = same_way and (same_ranks or way is not Direct)
        if same_messages and same_blocks and same_order:
            _put_momentum(reducer, saved)
        else:
            self._fold_momentum(part, saved)

    def _load_folded(self, part: Part, saved: Sequence[Saved]) -> None:
        """Of other shards or replicas: the mean residual, and the momentum folded into it."""
        state, name = part.state, residual_name(self._setup.topology.place)
        for i, own in enumerate(saved):
            shaped(own, DENSE, state.shapes[i], self._setup.name_of(state.params[i]), "finite")
            if name in own:
                value = shaped(own, name, state.shapes[i], self._setup.name_of(state.params[i]), "finite")
                for part_of, e in state.parts_of(RESIDUAL.name, i):
                    e.copy_(flattened(value, state.orders[i])[part_of])
        if not all(name in own for own in saved):
            self._warn_of_missing(int(self._numbers["ranks"]))
        self._fold_momentum(part, saved)

    def _fold_momentum(self, part: Part, saved: Sequence[Saved]) -> None:
        """What messages of another shape held."""
        state, size = part.state, int(self._numbers["block_size"])
        if USUAL.name in state:  # it is of the messages that there were
            state[USUAL.name].zero_()
        beta1s = [self._betas[group][0] for group in state.groups]
        field, factors = self._setup.algorithm.where_momentum_goes(state, int(self._numbers["steps"]) + 1, beta1s)
        if self._setup.algorithm.needs_previous_momentum and FIRST_MOMENTUM.name not in state:
            state.add(FIRST_MOMENTUM)
            _decode_momentum(state, saved, size, FIRST_MOMENTUM.name)
        fold = partial(_decode_momentum, state, saved, size, field.name, factors)
        fold()
        if field is RESIDUAL:  # which is cleared where another rank has none
            part.fold_momentum_again = fold

    def _check_messages(self, state: FlatState, saved: Sequence[Saved], cut: _SavedCut) -> None:
        size = cut.layout.block_size
        present = {r for own in saved for what in own if (r := rank_of(what)) is not None and r in cut.places}
        kept, averaged = ({p: of(p) for p in present} for of in (cut.kept, cut.averaged))
        copies = () if cut.served or cut.nodes == 1 else (cut.nodes,)
        for i, own in enumerate(saved):
            name, lengths = self._setup.name_of(state.params[i]), lengths_of(state.numels[i], size)
            shaped(own, BITS, (*copies, int(lengths.sum()) // 8), name, "bits")
            shaped(own, SCALES, (*copies, len(lengths)), name, "non-negative")
            for place in present:
                if residual_name(place) in own:
                    shape = state.shapes[i] if cut.slices == 1 else (kept[place][i],)
                    shaped(own, residual_name(place), shape, name, "finite")
                    if averaged[place][i]:
                        shaped(own, server_residual_name(place), (averaged[place][i],), name, "finite")

    def _warn_of_missing(self, ranks: int) -> None:
        if not self._residuals_missing:
            warn(
                f"the state does not hold the residuals of all {ranks} ranks that saved it, nor those of this rank for "
                f"as many: they start from zero, and what compression had left out is lost. Save on every rank; for "
                f"another number of ranks load onebit.merge_states of all of them"
            )
        self._residuals_missing = True


@dataclass(frozen=True)
class _SavedCut:
    """How residuals lie in a saved state: of `nodes` senders, each with so many slices, one a place."""

    layout: Layout
    nodes: int
    slices: int
    served: bool  # whether each place has averaged a shard of every chunk

    @property
    def places(self) -> range:
        return range(self.nodes * self.slices)

    def slice_spans(self, place: int) -> list[Span]:
        return self.layout.parts(place % self.slices, self.slices)

    def shard_spans(self, place: int) -> list[Span]:
        node, index = divmod(place, self.slices)
        return self.layout.parts(index * self.nodes + node, self.layout.ranks) if self.served else []

    def kept(self, place: int) -> list[int]:
        """Of each parameter, how many elements a place has compressed."""
        return _elements_of(self.layout, self.slice_spans(place))

    def averaged(self, place: int) -> list[int]:
        """Of each parameter, how many elements it has averaged for all."""
        return _elements_of(self.layout, self.shard_spans(place))


def same_cut(setup: Setup, numbers: Mapping[str, Any]) -> bool:
    """Whether a state is cut as this optimizer would cut it, so that every rank's residuals are its own."""
    options, topology = setup.options, setup.topology
    return (
        numbers["ranks"] == topology.nodes * topology.slices
        and numbers["slices"] == topology.slices
        and numbers["shards"] == topology.shards
        and (topology.slices == 1 or numbers["reply"] == setup.way.way)  # which decides where slices begin
        and numbers["block_size"] == setup.options.block_size
        and (options.chunks == "auto" or all(c == options.chunks for c in numbers["chunks"]))
    )


def clear_residuals(current: Snapshot) -> None:
    for part in current.parts:
        if part.reducer is not None:
            exchange = part.reducer.exchange
            for residual in exchange.residuals.values():
                residual.materialize()
                residual.value.zero_()
            if part.fold_momentum_again is not None:
                part.fold_momentum_again()


def _put_residuals(reducer: MomentumReducer, saved: Sequence[Saved], cut: _SavedCut, places: Sequence[int]) -> None:
    """The mean over nodes of these places' e, and what they hold of E. They are all that saved the state, or one."""
    state, nodes = reducer.state, len({place // cut.slices for place in places})
    servers = [chunk.server for chunk in reducer.exchange.chunks if chunk.server is not None]
    slices = {residual_name(p): cut.slice_spans(p) for p in places}
    shards = {server_residual_name(p): cut.shard_spans(p) for p in places}
    for i, own in enumerate(saved):
        there, here, shape = saved_order(own), state.orders[i], state.shapes[i]
        e, from_servers = (
            reordered(_whole(own, spans, i, state.numels[i], 1 / n), shape, there, here)
            for spans, n in ((slices, nodes), (shards, 1))
        )
        if not servers:  # nobody else sends what servers have left out, and messages are averaged
            e.add_(from_servers, alpha=cut.nodes / nodes)
        for part, own_e in state.parts_of(RESIDUAL.name, i):
            own_e.add_(e[part].to(own_e.device))
        for server in servers:
            for part, at in server.shard.of_parameter(i):
                kept = server.residual.value[at : at + part.stop - part.start]
                kept.copy_(from_servers[part])


def _whole(own: Saved, spans: Mapping[str, Sequence[Span]], index: int, numel: int, alpha: float) -> Tensor:
    """Of one parameter, the sum of what was saved under each name for the elements in its spans, times alpha."""
    whole = torch.zeros(numel, dtype=torch.float32, device="cpu")
    for name, of_name in spans.items():
        if name in own:
            values = flattened(own[name].cpu(), saved_order(own))
            whole.add_(scattered(values, of_name, index, numel), alpha=alpha)
    return whole


def _pieces(spans: Sequence[Span]) -> list[list[tuple[int, int, int]]]:
    """Of each span, which elements of which parameters it has."""
    return [[(s.parameter, s.start, s.stop) for s in span.segments()] for span in spans]


def _elements_of(layout: Layout, spans: Sequence[Span]) -> list[int]:
    """Of each parameter, how many elements lie in these spans."""
    elements = [0] * layout.parameters
    for s in (s for span in spans for s in span.segments()):
        elements[s.parameter] += s.stop - s.start
    return elements


def _put_momentum(reducer: MomentumReducer, saved: Sequence[Saved]) -> None:
    """m as the replies of the last step, and as what this rank sent of them."""
    layout, device, replies = reducer.state.layout, reducer.state.device, reducer.replies
    bits = torch.zeros((replies.copies, layout.elements // 8), dtype=torch.uint8, device=device)
    scales = torch.zeros((replies.copies, layout.blocks), dtype=torch.float32, device=device)
    for i, own in enumerate(saved):
        blocks, start = layout.blocks_of(i), int(layout.offset[i]) // 8
        bits[:, start : start + own[BITS].shape[-1]] = own[BITS].to(device)
        scales[:, blocks] = own[SCALES].to(device)
    replies.put(layout.all(), bits, scales)
    exchange = reducer.exchange
    of_slice = exchange.transport.size
    for chunk in exchange.chunks:
        chunk.own_reply.buffer.copy_(chunk.replies.buffer[exchange.own_row][None])
        chunk.arriving.buffer.copy_(chunk.replies.buffer[exchange.node.rank * of_slice :][:of_slice])


def _decode_momentum(
    state: FlatState, saved: Sequence[Saved], size: int, name: str, factors: Sequence[float] | None = None
) -> None:
    """Add m, which messages of another shape held, to a field; multiplied by its parameter's factor, if given. size: of
    a block of those messages."""
    for i, own in enumerate(saved):
        if DENSE in own:
            m = flattened(own[DENSE].to(state.device), state.orders[i])
        else:
            bits, scales = own[BITS].to(state.device), own[SCALES].to(state.device)
            m = decoded(bits, scales, state.numels[i], size).mean(0)
            m = reordered(m, state.shapes[i], saved_order(own), state.orders[i])
        for part, kept in state.parts_of(name, i):
            kept.add_(m[part], alpha=1.0 if factors is None else factors[i])


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


def _check_compressed_alike(setup: Setup, groups: Sequence[Mapping[str, Any]]) -> None:
    for i, (here, there) in enumerate(zip(setup.groups, groups, strict=True)):
        if is_compressed(here) != is_compressed(there):
            raise ValueError(
                f"the state is one of stage 2, of a run with compress={is_compressed(there)} in param group {i}, and "
                f"here it is {is_compressed(here)}: what the one keeps the other has no use for. Give the group what "
                f"it had"
            )


def merged_options(setup: Setup, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Options that this optimizer has, and what others (schedulers) have left in the groups."""
    merged = []
    for group, saved in zip(setup.groups, groups, strict=True):
        given = {k: v for k, v in saved.items() if k not in _NOT_OPTIONS}
        given.pop(COMPRESS, None)  # in stage 1 it may be another from here on
        new = deepcopy({k: v for k, v in given.items() if k in group or is_known_key(k)})
        if unknown := sorted(given.keys() - new.keys()):
            warn(f"the state's param groups have {', '.join(unknown)}, with which nothing is done here: left out")
        if isinstance(new["betas"], list):  # as JSON and torch.distributed.checkpoint have it
            new["betas"] = tuple(new["betas"])
        check_group({**group, **new})
        merged.append(new)
    return merged


def _numbers(setup: Setup, numbers: dict[str, Any], saved: Mapping[Tensor, Saved]) -> Mapping[str, Any]:
    """How far the run had come that saved the state: as it says, or as torch.optim.AdamW's does."""
    check_numbers(numbers)
    if numbers and numbers["compressing"]:
        if numbers["optimizer"] != setup.name:
            raise ValueError(f"the state is one of {numbers['optimizer']} in stage 2: {setup.name} can't continue it")
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
        "ranks": 1, "steps": steps, "skipped_steps": 0, "compressing": False, "chunks": [], "wire_bytes": 0,
        "trace": [],
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

"""How a saved state comes back: what `onebit.checkpoint.schema` describes, or what torch.optim.AdamW has saved.

Everything is built and checked beside the present state: a state that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.checks import check_numbers, check_options, check_own, check_structure, shaped, steps_of
from onebit.checkpoint.schema import (
    BITS,
    PROGRESS,
    SCALES,
    Saved,
    progress_of,
    rank_of,
    residual_name,
    server_residual_name,
)
from onebit.collectives.direct import Direct
from onebit.collectives.exchange import Exchange
from onebit.collectives.reply import WAYS
from onebit.kernels.data.layout import Layout
from onebit.optim.fields import FIRST_MOMENTUM, MASTER, RESIDUAL, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.options import check_group
from onebit.optim.reducer import MomentumReducer
from onebit.optim.setup import Setup
from onebit.optim.snapshot import Part, Snapshot
from onebit.optim.stages import Stages
from onebit.warning import warn

_NOT_OPTIONS = {
    "params", PROGRESS, "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "decoupled_weight_decay",
}  # fmt: skip


def restored(setup: Setup, current: Snapshot, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Snapshot]:
    """What each param group is updated with, and where the run had come to. Nothing changes."""
    groups = _checked_groups(setup, state_dict)
    keys = chain.from_iterable(g["params"] for g in groups)
    params = chain.from_iterable(g["params"] for g in setup.groups)
    saved = {p: state_dict["state"].get(key, {}) for key, p in zip(keys, params, strict=True)}
    merged = merged_options(setup, groups)
    numbers = _numbers(setup, progress_of(groups), saved)
    return merged, _Restoration(setup, numbers, saved).snapshot(len(current.parts))


class _Restoration:
    """New parts, filled from what was saved."""

    def __init__(self, setup: Setup, numbers: Mapping[str, Any], saved: Mapping[Tensor, Saved]) -> None:
        self._setup, self._numbers, self._saved = setup, numbers, saved
        self._compressing = bool(numbers["compressing"])
        self._residuals_missing = False

    def snapshot(self, dtypes: int) -> Snapshot:
        setup, numbers, chunks = self._setup, self._numbers, self._numbers["chunks"]
        if self._compressing and len(chunks) != dtypes:
            raise ValueError(
                f"the state was saved with parameters of {len(chunks)} dtypes, here they have {dtypes}: messages of "
                f"stage 2 are made for each. Cast the model as it was when it was saved"
            )
        states = setup.flat_states(chunks if self._compressing else ())
        parts = [self._part(state, i) for i, state in enumerate(states)]
        rule = setup.freeze_rule(states)
        rule.restore(numbers["trace"])
        stages = Stages(
            rule,
            setup.device,
            steps=int(numbers["steps"]),
            skipped=int(numbers["skipped_steps"]),
            compressing=self._compressing,
        )
        return Snapshot(parts, stages, int(numbers["wire_bytes"]), self._residuals_missing)

    def _part(self, state: FlatState, index: int) -> Part:
        part, saved = Part(state), [self._saved[p] for p in state.params]
        for i, own in enumerate(saved):
            if own or self._compressing:
                check_own(own, self._fields, tuple(state.params[i].shape), self._setup.name_of(state.params[i]))
        if self._compressing:
            asked = self._setup.options.chunks
            state.set_chunks(int(self._numbers["chunks"][index]) if asked == "auto" else asked)
        self._add_fields(state, saved)
        for i, own in enumerate(saved):
            if own or self._compressing:
                self._load_fields(state, i, own)
        state.master_is_current = all(MASTER.name in own for own in saved)
        state.scratch = self._setup.algorithm.scratch(state)
        if self._compressing:
            part.start_reducer(self._setup)
            self._load_messages(part, saved, self._saved_layout(state, index))
        return part

    @property
    def _fields(self) -> tuple[Field, ...]:
        algorithm = self._setup.algorithm
        if not self._compressing:
            return (*algorithm.stage_1, MASTER)
        first = (FIRST_MOMENTUM,) if algorithm.needs_previous_momentum else ()
        return (*algorithm.stage_2, *first, MASTER)

    def _add_fields(self, state: FlatState, saved: Sequence[Saved]) -> None:
        for field in self._fields:
            there = field.always or any(field.name in own for own in saved)
            if there and field is not MASTER:  # which a flat state has from the start, or does without
                state.add(field)

    def _load_fields(self, state: FlatState, index: int, own: Saved) -> None:
        name = self._setup.name_of(state.params[index])
        for field in list(state.fields.values()):
            if not field.saved or not field.same_on_all_ranks:
                continue
            if field.name in own:
                value = state.view(field.name, index)
                value.copy_(own[field.name].view(value.shape))
            elif field.required:
                raise ValueError(
                    f"the state has no {field.name} for parameter {name}: it is damaged, or not a state of "
                    f"{self._setup.name} or AdamW"
                )

    def _saved_layout(self, state: FlatState, index: int) -> Layout:
        n = self._numbers
        shards = self._way.shards(int(n["ranks"]))
        return Layout(state.numels, block_size=n["block_size"], ranks=shards, chunks=n["chunks"][index])

    @property
    def _way(self) -> type[Exchange]:
        """Of the exchange that saved the state."""
        return WAYS[self._numbers.get("reply", 1)]

    def _load_messages(self, part: Part, saved: Sequence[Saved], there: Layout) -> None:
        state, reducer, setup = part.state, part.reducer, self._setup
        assert reducer is not None
        self._check_messages(state, saved, there)
        n, rank = self._numbers, setup.topology.replicas.rank
        ranks, way = range(int(n["ranks"])), self._way
        same_ranks = len(ranks) == setup.topology.replicas.size
        same_cut = there.fingerprint == state.layout.fingerprint
        holds = [all(residual_name(r) in own for own in saved) for r in ranks]
        same_shards = same_cut or Direct in (way, setup.way)
        if same_ranks and same_shards and holds[rank]:  # what a rank has left out itself is all that it needs
            _put_residuals(reducer, saved, there, [rank], of=len(ranks))
        elif all(holds):
            _put_residuals(reducer, saved, there, ranks, of=len(ranks))
        else:
            self._warn_of_missing(len(ranks))
        same_blocks = there.block_size == state.layout.block_size and (same_cut or n["scale"] == "block")
        same_messages = (way, n["scale"]) == (setup.way, setup.options.scale) and (same_ranks or way is not Direct)
        if same_messages and same_blocks:
            _put_momentum(reducer, saved, rank)
        else:
            betas = [group["betas"][0] for group in setup.groups]
            if setup.algorithm.needs_previous_momentum and FIRST_MOMENTUM.name not in state:
                state.add(FIRST_MOMENTUM)
                _decode_momentum(state, saved, way, FIRST_MOMENTUM.name)
            part.fold_momentum_again = partial(_decode_momentum, state, saved, way, RESIDUAL.name, betas)
            part.fold_momentum_again()

    def _check_messages(self, state: FlatState, saved: Sequence[Saved], there: Layout) -> None:
        ranks = int(self._numbers["ranks"])
        present = {r for own in saved for what in own if (r := rank_of(what)) is not None and r < ranks}
        served, bits = self._way is not Direct, self._way.reply_bits
        held = {r: _elements_of(there, r) if served else [0] * len(saved) for r in present}
        copies = () if served or ranks == 1 else (ranks,)
        for i, own in enumerate(saved):
            name, blocks = self._setup.name_of(state.params[i]), -(-state.numels[i] // there.block_size)
            shaped(own, BITS, (*copies, blocks, bits * there.block_size // 8), name, "bits")
            shaped(own, SCALES, (*copies, blocks, *([2] if bits == 2 else [])), name, "non-negative")
            for r, elements in held.items():
                if residual_name(r) in own:
                    shaped(own, residual_name(r), tuple(state.params[i].shape), name, "finite")
                    if elements[i]:
                        shaped(own, server_residual_name(r), (elements[i],), name, "finite")

    def _warn_of_missing(self, ranks: int) -> None:
        if not self._residuals_missing:
            warn(
                f"the state does not hold the residuals of all {ranks} ranks that saved it, nor those of this rank for "
                f"as many: they start from zero, and what compression had left out is lost. Save on every rank; for "
                f"another number of ranks load onebit.merge_states of all of them"
            )
        self._residuals_missing = True


def same_cut(setup: Setup, numbers: Mapping[str, Any]) -> bool:
    """Whether a state is cut as this optimizer would cut it, so that every rank's residuals are its own."""
    options = setup.options
    return (
        numbers.get("ranks") == setup.topology.replicas.size
        and numbers["block_size"] == options.block_size
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


def _put_residuals(
    reducer: MomentumReducer, saved: Sequence[Saved], there: Layout, ranks: Sequence[int], of: int
) -> None:
    """The mean of these ranks' e, and what they hold of E. They are all that saved the state, or one `of` them."""
    for i, own in enumerate(saved):
        e = reducer.state.view(RESIDUAL.name, i)
        for r in ranks:
            e.add_(own[residual_name(r)].to(e.device), alpha=1 / len(ranks))
    whole = _server_residual(saved, there, ranks)
    for i, of_parameter in enumerate(whole if reducer.exchange.server_residual is None else ()):
        e = reducer.state.view(RESIDUAL.name, i)  # nobody else sends what the servers left out; messages are averaged
        e.add_(of_parameter.view(e.shape).to(e.device), alpha=of / len(ranks))
    for server in (chunk.server for chunk in reducer.exchange.chunks if chunk.server is not None):
        for s in server.shard.segments():
            part = whole[s.parameter][s.start : s.stop]
            server.residual.value[s.offset : s.offset + s.stop - s.start] = part.to(reducer.state.device)


def _elements_of(layout: Layout, rank: int) -> list[int]:
    """Of each parameter, how many elements lie in a rank's shards."""
    elements = [0] * layout.parameters
    for chunk in range(layout.chunks):
        for s in layout.shard(chunk, rank).segments():
            elements[s.parameter] += s.stop - s.start
    return elements


def _server_residual(saved: Sequence[Saved], there: Layout, ranks: Sequence[int]) -> list[Tensor]:
    """E of each parameter, as far as the shards of `ranks` hold it; 0 elsewhere, and where there were no servers."""
    whole = [torch.zeros(n, dtype=torch.float32, device="cpu") for n in there.numel.tolist()]
    for rank in ranks if any(server_residual_name(r) in own for r in ranks for own in saved) else ():
        read = [0] * len(saved)
        for chunk in range(there.chunks):
            for s in there.shard(chunk, rank).segments():
                values, start = saved[s.parameter][server_residual_name(rank)], read[s.parameter]
                read[s.parameter] = start + s.stop - s.start
                whole[s.parameter][s.start : s.stop] = values[start : read[s.parameter]].cpu()
    return whole


def _put_momentum(reducer: MomentumReducer, saved: Sequence[Saved], rank: int) -> None:
    """m as the replies of the last step, and as what this rank sent of them."""
    layout, device, replies = reducer.state.layout, reducer.state.device, reducer.replies
    copies, form = replies.copies, replies.format
    bits = torch.zeros((copies, layout.blocks, form.block_bytes), dtype=torch.uint8, device=device)
    scales = torch.zeros((copies, layout.blocks, form.bits), dtype=torch.float32, device=device)
    for i, own in enumerate(saved):
        first, its_bits = int(layout.first[i]), own[BITS].to(device)
        stop = first + its_bits.shape[-2]
        bits[:, first:stop] = its_bits
        scales[:, first:stop] = own[SCALES].to(device).reshape(*its_bits.shape[:-1], form.bits)
    blocks = form.shard_blocks
    replies.bits.copy_(bits.unflatten(1, (-1, blocks)).transpose(0, 1).flatten(0, 1))
    of_messages = scales.unflatten(1, (-1, blocks)).transpose(0, 1).flatten(0, 1).flatten(1)
    replies.scales.copy_(of_messages[:, : form.scales])
    for chunk in reducer.exchange.chunks:
        chunk.own_reply.buffer.copy_(chunk.replies.buffer[rank][None])


def _decode_momentum(
    state: FlatState, saved: Sequence[Saved], way: type[Exchange], name: str, betas: Sequence[float] | None = None
) -> None:
    """Add m, which messages of another shape held, to a field; multiplied by its group's beta, if given."""
    for i, own in enumerate(saved):
        bits, scales = own[BITS].to(state.device), own[SCALES].to(state.device).unsqueeze(-1)
        ones = ((bits.unsqueeze(-1) >> torch.arange(8, device=bits.device)) & 1).flatten(-2)
        if way.reply_bits == 2:
            ones, large = ones.chunk(2, -1)
            scales = torch.where(large == 1, scales[:, 1], scales[:, 0])
        values = (ones.float() * 2 - 1) * scales
        m = (values if values.ndim == 2 else values.mean(0)).view(-1)[: state.numels[i]]
        beta = 1.0 if betas is None else betas[state.groups[i]]
        state.view(name, i).add_(m.view(state.params[i].shape), alpha=beta)


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


def merged_options(setup: Setup, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Options that this optimizer has, and what others (schedulers) have left in the groups."""
    merged = []
    for group, saved in zip(setup.groups, groups, strict=True):
        new = deepcopy({k: v for k, v in saved.items() if k not in _NOT_OPTIONS})
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
        return numbers
    steps = _steps_of(saved)
    if numbers and numbers["steps"] == steps and numbers["optimizer"] == setup.name:
        return numbers
    return {
        "ranks": 1, "steps": steps, "skipped_steps": 0, "compressing": False, "chunks": [], "wire_bytes": 0,
        "trace": [],
    }  # fmt: skip


def _steps_of(saved: Mapping[Tensor, Saved]) -> int:
    steps = {steps_of(own) for own in saved.values() if "step" in own}
    if len(steps) > 1:
        raise ValueError(
            f"the parameters have taken different numbers of steps ({sorted(steps)}): onebit counts the same for all. "
            f"Some had no gradient at times; set every state's step to {max(steps)} to continue with that"
        )
    return max(steps, default=0)

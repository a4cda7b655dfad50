"""What is saved, in a form that no layout is in, so that any number of ranks can load it.

    state[p]           one parameter's
        step                                             as torch.optim.AdamW saves it
        the algorithm's fields, by name: those of its stage_1 or stage_2 that are saved. One number a parameter is a
        tensor of shape [1]: torch's set_optimizer_state_dict loses new ones without a dimension (full_state_dict=True)
            1-bit Adam, stage 1    exp_avg, exp_avg_sq
                        stage 2    denominator; usual_step with update_limit (LAMB and 0/1 Adam likewise)
            1-bit LAMB, stage 1    exp_avg, exp_avg_sq, coefficient_average, coefficient_steps
                        stage 2    denominator, exp_avg_sq, coefficient_average, coefficient_steps, ratio; gamma with
                                   scale="tensor"; counted_bits where coordinates had no variance at the freeze;
                                   first_momentum until a compressed step was taken
        momentum_bits, momentum_scales                   stage 2: m; the bits of its blocks, uint8 [bytes], and fp32
                                                         [blocks]; with direct replies of each rank: [ranks, ..]
        residual_of_rank_3, server_residual_of_rank_3    stage 2: what rank 3 left out: e, and its part of E, of which
                                                         direct replies have none. With two levels e is that of a slice,
                                                         one element after the other, and rank 3 is the place
                                                         node * ranks a node + slice
        master                                           the fp32 copy of a 16-bit parameter
        memory_order                                     stage 2, where the parameter is permuted in memory: int64, its
                                                         dimensions by stride. Messages and what has no shape are in it
    param_groups[0]["onebit"]                            numbers: how far the run has come

Sharded parameters are saved element by element, as DTensors (`onebit.checkpoint.sharded`).

`optimizer.state` has the same names, and param_groups[0]["onebit"] is there, empty: tools that walk an optimizer find
in it whatever it saves.

Each rank's residuals have a name of their own, so that torch.distributed.checkpoint, which stores equal names once,
stores them all. A state that holds those of all ranks (`merge_states`) loads on any number of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.names import BITS, ORDER, SCALES, message_name, residual_name, server_residual_name
from onebit.checkpoint.sharded import by_element
from onebit.collectives.exchange import Exchange
from onebit.kernels.data.layout import Span
from onebit.optim.fields import RESIDUAL
from onebit.optim.flat_state import FlatState, pieces
from onebit.optim.param_groups import PROGRESS
from onebit.optim.reducer import MomentumReducer
from onebit.optim.setup import Setup
from onebit.optim.snapshot import Snapshot

VERSION = 2

Saved = Mapping[str, Any]  # one parameter's


def save(setup: Setup, current: Snapshot) -> dict[Tensor, dict[str, Any]]:
    step = torch.tensor(float(current.stages.counts[0]), dtype=torch.float32, device="cpu")
    saved: dict[Tensor, dict[str, Any]] = {}
    for part in current.parts:
        state = part.state
        for i, p in enumerate(state.params):
            saved[p] = {"step": step.clone(), **_shared(state, i)}
        if part.reducer is not None:
            messages = _save_messages(part.reducer, setup.topology.place)
            for i, (p, own) in enumerate(zip(state.params, messages, strict=True)):
                saved[p] |= own | _order(state, i)
        if setup.topology.shard is not None:
            shards = [] if part.reducer is None else served_spans(part.reducer.exchange)
            served = server_residual_name(setup.topology.place)
            for i, p in enumerate(state.params):
                if shards:  # all parts have the same names, also those of which this rank averages nothing
                    saved[p].setdefault(served, state.view(RESIDUAL.name, i).new_zeros(0))
                saved[p] = by_element(saved[p], p, i, state.block_size, shards)
        numbers = setup.algorithm.numbers()
        for p in state.params:
            saved[p] = {name: v.view(1) if name in numbers else v for name, v in saved[p].items()}
    return saved


def live(setup: Setup, current: Snapshot) -> dict[Tensor, dict[str, Tensor]]:
    """`optimizer.state`: views of what is kept, and every name that `save` saves. What has another form while it trains
    (messages and what depends on them) is an empty tensor here."""
    step = current.stages.counts[0]
    shown: dict[Tensor, dict[str, Tensor]] = {}
    for part in current.parts:
        for i, p in enumerate(part.state.params):
            views = part.state.views(i)
            residual = views.pop(RESIDUAL.name, None)
            shown[p] = {"step": step, **views, **_shared(part.state, i)}
            if part.reducer is not None:
                shown[p] |= {name: step.new_empty(0) for name in _names_of_messages(setup, part.reducer, i)}
                shown[p] |= _order(part.state, i)
                if residual is not None:
                    shown[p][residual_name(setup.topology.place)] = residual
    return shown


def _shared(state: FlatState, index: int) -> dict[str, Tensor]:
    """What is saved of a parameter that all ranks have the same."""
    fields = [field for field in state.fields.values() if field.saved and field.same_on_all_ranks]
    return {field.name: state.view(field.name, index) for field in fields}


def _order(state: FlatState, index: int) -> dict[str, Tensor]:
    order = state.orders[index]
    return {} if order is None else {ORDER: torch.tensor(order, dtype=torch.int64, device="cpu")}


def _names_of_messages(setup: Setup, reducer: MomentumReducer, index: int) -> list[str]:
    """What `save` adds for one parameter in stage 2."""
    exchange, state, place = reducer.exchange, reducer.state, setup.topology.place
    sharded, served = setup.topology.shard is not None, served_spans(exchange)
    names = [message_name(rank) for rank in range(exchange.replies.copies)] if sharded else [BITS, SCALES]
    if state.slices == 1 or state.pieces(state[RESIDUAL.name], index):
        names.append(residual_name(place))
    server = exchange.server_residual
    if server is not None and served and (sharded or pieces(served, server.value, index)):
        names.append(server_residual_name(place))
    return names


def served_spans(exchange: Exchange) -> list[Span]:
    """What this rank averages for all."""
    layout = exchange.layout
    return [] if exchange.server_residual is None else layout.parts(exchange.own_row, layout.ranks)


def progress(setup: Setup, current: Snapshot) -> dict[str, Any]:
    stages = current.stages
    return {
        "version": VERSION,
        "optimizer": setup.name,
        "ranks": setup.topology.nodes * setup.topology.slices,
        "slices": setup.topology.slices,
        "shards": setup.topology.shards,
        "steps": int(stages.counts[0]),
        "skipped_steps": int(stages.counts[1]),
        "compressing": stages.compressing,
        "chunks": [state.layout.chunks for state in current.compressed],
        "block_size": setup.options.block_size,
        "scale": setup.options.scale,
        "reply": setup.way.way,
        "wire_bytes": current.wire_bytes,
        "settings": dict(setup.algorithm.settings()),
        "fields": " ".join(sorted(_names_of_fields(current))),
        "trace": json.dumps(stages.rule.state()),  # one value: dcp.load fills no lists of other lengths
    }


def _names_of_fields(current: Snapshot) -> set[str]:
    states = current.states
    permuted = any(order is not None for state in states for order in state.orders)
    return {name for state in states for name in _shared(state, 0)} | ({ORDER} if permuted else set())


def progress_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numbers = groups[0].get(PROGRESS, {}) if groups else {}
    if not isinstance(numbers, Mapping):
        raise TypeError(
            f"{PROGRESS!r} of the first param group is a {type(numbers).__name__}, not a dict: it is damaged"
        )
    numbers = {"settings": {}, **numbers} if numbers else {}  # full states of torch leave out an empty dict
    if "trace" in numbers:
        try:
            numbers["trace"] = json.loads(numbers["trace"])
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"trace is no JSON in the state ({error!s:.60}): it is damaged. Load another") from error
    return numbers


def _save_messages(reducer: MomentumReducer, place: int) -> list[dict[str, Tensor]]:
    """Residuals and momentum of each parameter."""
    exchange, state, layout = reducer.exchange, reducer.state, reducer.state.layout
    exchange.materialize()
    whole, single = layout.all(), exchange.replies.copies == 1
    bits, scales = exchange.replies.bits_of(whole), exchange.replies.scales_of(whole)
    ends = layout.starts // 8
    server_residual, served = exchange.server_residual, served_spans(exchange)
    saved = []
    for i in range(len(state.params)):
        blocks = layout.blocks_of(i)
        own_bits, own_scales = bits[:, ends[blocks.start] : ends[blocks.stop]], scales[:, blocks]
        own = {name: _own(v[0] if single else v) for name, v in ((BITS, own_bits), (SCALES, own_scales))}
        if state.slices == 1:
            own[residual_name(place)] = state.view(RESIDUAL.name, i)
        elif of_slice := [piece for _, piece in state.pieces(state[RESIDUAL.name], i)]:
            own[residual_name(place)] = torch.cat(of_slice)
        if server_residual is not None and (of_shards := pieces(served, server_residual.value, i)):
            own[server_residual_name(place)] = torch.cat([piece for _, piece in of_shards])
        saved.append(own)
    return saved


def _own(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)

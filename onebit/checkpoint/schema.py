"""What is saved, in a form that no layout is in, so that any number of ranks can load it.

    state[p]           one parameter's
        step                                             as torch.optim.AdamW saves it
        the algorithm's fields, by name: those of its stage_1 or stage_2 that are saved. One number a parameter is a
        tensor of shape [1]: torch's set_optimizer_state_dict loses new ones without a dimension (full_state_dict=True)
            1-bit Adam, stage 1    exp_avg, exp_avg_sq
                        stage 2    denominator; usual_step with update_limit (LAMB and 0/1 Adam likewise)
            1-bit LAMB, stage 1    exp_avg, exp_avg_sq, coefficient_average, coefficient_steps
                        stage 2    denominator, exp_avg_sq, coefficient_average, coefficient_steps, ratio; gamma with
                                   scale="tensor"; counted_bits where elements had no variance at the freeze;
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

Sharded parameters are saved element by element, as DTensors (`onebit.checkpoint.elements`).

`optimizer.state` has the same names, and param_groups[0]["onebit"] is there, empty: tools that walk an optimizer find
in it whatever it saves.

Each rank's residuals have a name of their own, so that torch.distributed.checkpoint, which stores equal names once,
stores them all. A state that holds those of all ranks (`merge_states`) loads on any number of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.elements import (
    BITS,
    ORDER,
    SCALES,
    by_element,
    message_name,
    residual_name,
    server_residual_name,
)
from onebit.optim.fields import RESIDUAL
from onebit.optim.flat_state import FlatState
from onebit.optim.reducer import MomentumReducer
from onebit.optim.setup import Setup
from onebit.optim.snapshot import Snapshot

VERSION = 2


def save(setup: Setup, current: Snapshot) -> dict[Tensor, dict[str, Any]]:
    step = torch.tensor(float(current.stages.counts[0]), dtype=torch.float32, device="cpu")
    numbers, sharded = setup.algorithm.numbers(), setup.topology.shard is not None
    saved: dict[Tensor, dict[str, Any]] = {}
    for part in current.parts:
        state, messages, served = part.state, [], []
        state.take_over_writes()
        if part.reducer is not None:
            messages, served = _messages(part.reducer), part.reducer.served_spans
        for i, p in enumerate(state.params):
            own = {"step": step.clone(), **_shared(state, i)}
            if part.reducer is not None:
                residuals = _residuals(setup, part.reducer, i)
                own |= messages[i] | {name: made() for name, made in residuals.items()} | _order(state, i)
            if sharded:
                own = by_element(own, p, i, state.block_size, served)
            saved[p] = {name: v.view(1) if name in numbers else v for name, v in own.items()}
    return saved


def live(setup: Setup, current: Snapshot) -> dict[Tensor, dict[str, Tensor]]:
    """`optimizer.state`: views of what is kept, and every name that `save` saves. What has another form while it trains
    (messages and what depends on them) is an empty tensor here."""
    step, sharded = current.stages.counts[0], setup.topology.shard is not None
    shown: dict[Tensor, dict[str, Tensor]] = {}
    for part in current.parts:
        for i, p in enumerate(part.state.params):
            views = part.state.views(i)
            residual = views.pop(RESIDUAL.name, None)
            shown[p] = {"step": step, **views, **_shared(part.state, i)}
            if part.reducer is not None:
                rows = range(part.reducer.replies.copies)
                names = [*(map(message_name, rows) if sharded else (BITS, SCALES)), *_residuals(setup, part.reducer, i)]
                shown[p] |= {name: step.new_empty(0) for name in names} | _order(part.state, i)
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


def _messages(reducer: MomentumReducer) -> list[dict[str, Tensor]]:
    """The momentum of each parameter."""
    reducer.exchange.materialize()
    layout, replies = reducer.state.layout, reducer.replies
    bits, scales, ends = replies.bits_of(layout.all()), replies.scales_of(layout.all()), layout.starts // 8
    if replies.copies == 1:
        bits, scales = bits[0], scales[0]
    saved = []
    for blocks in map(layout.blocks_of, range(layout.parameters)):
        own = {BITS: bits[..., ends[blocks.start] : ends[blocks.stop]], SCALES: scales[..., blocks]}
        saved.append({name: value.clone(memory_format=torch.contiguous_format) for name, value in own.items()})
    return saved


def _residuals(setup: Setup, reducer: MomentumReducer, index: int) -> dict[str, Callable[[], Tensor]]:
    """How what this rank has left out of one parameter is made, by its names."""
    state, place = reducer.state, setup.topology.place
    of_slice = [piece for _, piece in state.pieces(state[RESIDUAL.name], index)]
    of_shards = [piece for _, piece in reducer.served(index)]
    found: dict[str, Callable[[], Tensor]] = {}
    if state.slices == 1:
        found[residual_name(place)] = partial(state.view, RESIDUAL.name, index)
    elif of_slice:
        found[residual_name(place)] = partial(torch.cat, of_slice)
    if of_shards:
        found[server_residual_name(place)] = partial(torch.cat, of_shards)
    elif reducer.served_spans and setup.topology.shard is not None:  # all parts of a parameter have the same names
        found[server_residual_name(place)] = partial(state[RESIDUAL.name].new_zeros, 0)
    return found


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
        "bias_correction": bool(setup.options.bias_correction),
        "scale": setup.options.scale,
        "reply": setup.way.way,
        "wire_bytes": current.wire_bytes,
        "settings": dict(setup.algorithm.settings()),
        "fields": " ".join(sorted(_names_of_fields(current))),
        "mean_norm": current.mean_norm.numbers.tolist(),
        "trace": json.dumps(stages.rule.state()),  # one value: dcp.load fills no lists of other lengths
    }


def _names_of_fields(current: Snapshot) -> set[str]:
    states = current.states
    permuted = any(order is not None for state in states for order in state.orders)
    return {name for state in states for name in _shared(state, 0)} | ({ORDER} if permuted else set())

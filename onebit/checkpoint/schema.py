"""What is saved: the same on every rank, in the shapes of the parameters, under the same names in both stages.

    state[p]           one parameter's
        step                         as torch.optim.AdamW saves it
        exp_avg, exp_avg_sq          AdamW's moments; in stage 2 m of the last message, and the variance in use
        residual                     stage 2: the mean of what ranks and servers have left out (`optimizer.synchronize`)
        the algorithm's other fields that are saved, by name, in the parameter's shape; a bit an element as uint8, one
        number a parameter as a tensor of shape [1]: torch's set_optimizer_state_dict loses new ones without a dimension
            1-bit Adam    usual_step, joined_after_step
            1-bit LAMB    denominator, counted, coefficient_average, coefficient_steps, ratio, gamma, and these
            0/1 Adam      least_root, root_at_zero, with local steps momentum_factor, and these
        master                       the fp32 copy of a 16-bit parameter
    param_groups[0]["onebit"]        how far the run has come, as JSON

A field that the present stage does not use has its initial value. Of a sharded parameter each tensor is a DTensor that
is placed as the parameter. `optimizer.state` has the same names: tools that walk an optimizer find in it whatever it
saves.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from onebit.kernels.data.bits import unpacked
from onebit.optim.fields import MASTER, MOMENTUM, RESIDUAL, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.memory_order import in_shape
from onebit.optim.run import Run
from onebit.optim.setup import Setup
from onebit.optim.sharding import as_whole
from onebit.optim.state import Part

VERSION = 3


def saved_fields(setup: Setup, state: FlatState) -> list[Field]:
    """The fields that are saved of each parameter of a flat state."""
    return [*setup.algorithm.saved_fields(state.compressed), *([MASTER] if MASTER.name in state else [])]


def save(run: Run, residuals: bool = True) -> dict[Tensor, dict[str, Any]]:
    """Return the state by parameter, without communication. residuals: False for what every rank has the same in any
    case."""
    setup, steps = run.setup, int(run.state.stages.counts[0])
    step = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
    saved: dict[Tensor, dict[str, Any]] = {}
    for part in run.state.parts:
        part.state.take_over_writes()
        fields, of_stage_2 = saved_fields(setup, part.state), _of_stage_2(run, part, residuals)
        for i, p in enumerate(part.state.params):
            group = setup.groups[part.state.groups[i]]
            found = {name: values[i] for name, values in of_stage_2.items()}
            if part.reducer is not None:
                found |= setup.algorithm.save_derived(part.state, i, group, steps)
            own = {field.name: _value(part.state, field, i, found) for field in fields}
            saved[p] = {"step": step.clone()} | {
                field.name: own[field.name] if field.per == "parameter" else as_whole(own[field.name], p)
                for field in fields
            }
    return saved


def live(run: Run) -> dict[Tensor, dict[str, Tensor]]:
    """`optimizer.state`: every name that `save` saves. What has another form while it trains, or is not used in this
    stage, is an empty tensor here, all else a view."""
    step, empty = run.state.stages.counts[0], torch.zeros(0, dtype=torch.float32, device=run.setup.device)
    shown: dict[Tensor, dict[str, Tensor]] = {}
    for part in run.state.parts:
        state, fields = part.state, saved_fields(run.setup, part.state)
        kept = ("element", "parameter") if state.slices > 1 else ("element", "slice", "parameter")
        names = [field.name for field in fields if field.name in state and field.per in kept]
        nothing = {"step": step, **{field.name: empty for field in fields}}
        for i, p in enumerate(state.params):
            shown[p] = {**nothing, **{name: state.view(name, i) for name in names}}
    return shown


def _of_stage_2(run: Run, part: Part, residuals: bool) -> dict[str, list[Tensor]]:
    """Momentum of every parameter, and what was left out, if all ranks have the same."""
    if part.reducer is None:
        return {}
    found = {MOMENTUM.name: part.last_momentum(run.setup.algorithm)}
    return found | {RESIDUAL.name: part.residuals()} if residuals and run.state.merged else found


def _value(state: FlatState, field: Field, index: int, found: dict[str, Tensor]) -> Tensor:
    if field.name in found:
        return found[field.name]
    shape = state.shapes[index]
    if field.name not in state or field is RESIDUAL:
        dtype = torch.uint8 if field.per == "bit" else torch.float32
        return torch.full((1,) if field.per == "parameter" else shape, field.initial, dtype=dtype, device=state.device)
    value = state.view(field.name, index)
    if field.per == "bit":
        flags = unpacked(value)[: state.numels[index]].to(torch.uint8)
        return in_shape(flags, shape, state.orders[index])
    return value.view(1) if field.per == "parameter" else value


def progress(run: Run) -> dict[str, Any]:
    """How far the run has come, the same on every rank."""
    setup, state, stages = run.setup, run.state, run.state.stages
    return {
        "version": VERSION,
        "optimizer": setup.name,
        "senders": setup.topology.nodes,
        "steps": int(stages.counts[0]),
        "skipped_steps": int(stages.counts[1]),
        "compressing": stages.compressing,
        "chunks": [each.layout.chunks for each in state.compressed],
        "messages": messages_of(setup),
        "bias_correction": bool(setup.options.bias_correction),
        "wire_bytes": state.wire_bytes,
        "settings": dict(setup.algorithm.settings()),
        "mean_norm": state.mean_norm.numbers.tolist(),
        "trace": stages.rule.state(),
    }


def messages_of(setup: Setup) -> str:
    """Describe all that decides how long a step by m usually is: see `onebit.optim.limit`."""
    options, reply = setup.options, setup.exchange_class.reply_option
    senders = f" of {setup.topology.nodes}" if reply == "direct" else ""
    return f"reply={reply}{senders}, scale={options.scale}, norm={setup.norm}, block_size={options.block_size}"


def as_text(numbers: dict[str, Any]) -> str:
    """One value: dcp.load fills no lists of other lengths."""
    return json.dumps(numbers)

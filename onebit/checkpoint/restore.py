"""How a saved state comes back: what `onebit.checkpoint.schema` describes, or what torch.optim.AdamW has saved.

All of it is checked first: a state that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.checks import (
    Saved,
    check_options,
    check_states,
    check_structure,
    checked_numbers,
    checked_part,
    steps_of,
)
from onebit.checkpoint.schema import messages_of, progress
from onebit.kernels.data.bits import packed
from onebit.optim.fields import JOINED, MASTER, MOMENTUM, RESIDUAL, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.limit import USUAL
from onebit.optim.masks import clear_fields
from onebit.optim.mean_norm import ANEW, MeanNorm
from onebit.optim.memory_order import flattened
from onebit.optim.options import KEYS_OF_OTHERS, OF_ADAMW, check_group
from onebit.optim.param_groups import COMPRESS, PROGRESS, betas_of, by_flat_state, is_compressed
from onebit.optim.run import Run
from onebit.optim.setup import Setup
from onebit.optim.stages import Stages
from onebit.optim.state import Part, State
from onebit.warning import warn


def from_state_dict(setup: Setup, state_dict: Mapping[str, Any]) -> Restoration:
    """What `restored` returns, from what an optimizer's `state_dict` did."""
    groups = _checked_groups(setup, state_dict)
    keys = chain.from_iterable(g["params"] for g in groups)
    params = chain.from_iterable(g["params"] for g in setup.groups)
    state = {p: state_dict["state"].get(key, {}) for key, p in zip(keys, params, strict=True)}
    return restored(setup, state, checked_numbers(groups[0].get(PROGRESS, "")), groups)


def adopted(run: Run, state: Mapping[Tensor, Saved]) -> Run:
    """Build what a run of stage 1 goes on from with `state`, which a user has put into `optimizer.state`."""
    check_states(state)
    used = {"step", *(field.name for each in run.state.states for field in each.fields.values())}
    state = {p: {name: v for name, v in own.items() if name in used} for p, own in state.items()}
    for each in run.state.states:
        each.take_over_writes()
    return restored(run.setup, state, progress(run), run.setup.groups).run()


def restored(
    setup: Setup, state: Mapping[Tensor, Saved], reached: dict[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Restoration:
    """Check all of a saved state.

    reached, groups: how far the run had come, and what every param group had beside its parameters.
    """
    # without empty dicts: torch's get_optimizer_state_dict puts them where a flattened state lacks a name
    saved = {
        p: {name: v for name, v in (state.get(p) or {}).items() if not isinstance(v, Mapping) or v}
        for group in setup.groups
        for p in group["params"]
    }
    numbers = _numbers(setup, reached, saved)
    options = _merged_options(setup, groups, numbers["compressing"])
    parts = dict[Tensor, Saved]()
    for group in setup.groups:
        fields = [*setup.algorithm.saved_fields(numbers["compressing"] and is_compressed(group)), MASTER]
        for p in group["params"]:
            if p.requires_grad:
                needed = bool(saved[p]) or numbers["compressing"]
                parts[p] = checked_part(saved[p], fields, p, setup.name_of(p)) if needed else {}
    return Restoration(setup, numbers, parts, options, _chunks(setup, numbers))


@dataclass(frozen=True)
class Restoration:
    """A saved state that was checked, and from which `run` builds another run: nothing of the present one changes."""

    setup: Setup
    numbers: Mapping[str, Any]  # how far the run had come
    saved: Mapping[Tensor, Saved]  # this rank's part of what was saved of every parameter that trains
    options: Sequence[dict[str, Any]]  # what each param group is updated with
    chunks: Sequence[int]  # in stage 2 of each compressed flat state

    def run(self) -> Run:
        setup, numbers, steps = self.setup, self.numbers, int(self.numbers["steps"])
        compressing = numbers["compressing"]
        after = {p: int(own[JOINED.name]) for p, own in self.saved.items() if JOINED.name in own}
        joined = {p: n for p, n in after.items() if 0 < n <= steps}
        parts, chunks = [Part(state) for state in setup.flat_states(self.chunks, joined)], list(self.chunks)
        for part in parts:
            in_stage_2 = compressing and part.state.compressed
            if in_stage_2:
                part.state.set_chunks(chunks.pop(0))
            self._load(part.state, in_stage_2)
            part.state.scratch = setup.algorithm.scratch(part.state)
            if in_stage_2:
                clear_fields(part.state)
                part.start_reducer(setup)
                part.gathered = None if part.state.slices == 1 else self._whole_residual(part.state)
        rule = setup.freeze_rule([part.state for part in parts])
        rule.restore(numbers["trace"])
        skipped, sent = int(numbers["skipped_steps"]), int(numbers["wire_bytes"])
        stages = Stages(rule, setup.device, steps=steps, skipped=skipped, compressing=compressing)
        full, *others = map(float, numbers["mean_norm"])
        if numbers["senders"] != setup.topology.nodes:
            full = 0.0  # F is not known: a mean of more gradients is shorter
        state = State(parts, stages, MeanNorm(setup.device, [full, *others]), sent, late=setup.late_rows(joined))
        state.merged, state.momentum_at = compressing, "exp_avg" if compressing else "messages"
        return Run(setup, state)

    def _load(self, state: FlatState, in_stage_2: bool) -> None:
        algorithm, steps = self.setup.algorithm, int(self.numbers["steps"])
        saved = [self.saved[p] for p in state.params]
        groups = [{**group, **new} for group, new in zip(self.setup.groups, self.options, strict=True)]
        for field in (MOMENTUM, *algorithm.stage_2) if in_stage_2 else algorithm.stage_1:
            if field.name not in state and (field.always or _differs(field, saved)):
                state.add(field)
        for field in state.fields.values():
            if field.saved:
                _fill(state, field, saved)
        if in_stage_2:
            for i, own in enumerate(saved):
                algorithm.load_derived(state, i, own, groups[state.groups[i]], steps)
        if USUAL.name in state and self.numbers["messages"] != messages_of(self.setup):
            state[USUAL.name].zero_()  # it is of the messages that there were
        state.master_is_current = all(MASTER.name in own for own in saved)
        if "optimizer" not in self.numbers and state.compressed and steps:
            algorithm.adopt_variance(state, steps, [betas_of(groups[group])[1] for group in state.groups])

    def _whole_residual(self, state: FlatState) -> Tensor:
        """Return what a rank that has a slice saves of all slices: fp32 [elements], on the host."""
        whole = torch.zeros(state.layout.elements, dtype=torch.float32, device="cpu")
        for i, p in enumerate(state.params):
            if RESIDUAL.name in self.saved[p]:
                state.cut(whole, i).copy_(self.saved[p][RESIDUAL.name])
        return whole


def _chunks(setup: Setup, numbers: Mapping[str, Any]) -> list[int]:
    """Return the chunks of each compressed flat state of stage 2."""
    if not numbers["compressing"]:
        return []
    dtypes = sum(compressed for compressed, _, _ in by_flat_state(setup.groups))
    if len(numbers["chunks"]) != dtypes:
        raise ValueError(
            f"the state was saved with parameters of {len(numbers['chunks'])} dtypes, here they have {dtypes}: "
            f"messages of stage 2 are made for each. Cast the model as it was when it was saved"
        )
    return [n if setup.options.chunks == "auto" else setup.options.chunks for n in numbers["chunks"]]


def _differs(field: Field, saved: Sequence[Saved]) -> bool:
    """Return whether any parameter has another value than the initial one."""
    initial = int(field.initial) if field.per == "bit" else field.initial  # torch would make floats of all bits
    return any(bool((own[field.name] != initial).any()) for own in saved if field.name in own)


def _fill(state: FlatState, field: Field, saved: Sequence[Saved]) -> None:
    """Write one field of every parameter, as far as it was saved."""
    if field.per == "parameter":
        numbers = [float(own.get(field.name, field.initial)) for own in saved]
        state[field.name].copy_(torch.tensor(numbers, dtype=torch.float32, device="cpu"))
        return
    there = [(i, own[field.name]) for i, own in enumerate(saved) if field.name in own]
    for i, value in there:
        if field.per == "bit":
            state.view(field.name, i).copy_(packed(flattened(value != 0, state.orders[i])))
        elif field.per == "slice" and state.slices > 1:
            flat = flattened(value, state.orders[i])
            for elements, part in state.parts_of(field.name, i):
                part.copy_(flat[elements])
        else:
            state.view(field.name, i).copy_(value)


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


def _numbers(setup: Setup, numbers: Mapping[str, Any], saved: Mapping[Tensor, Saved]) -> Mapping[str, Any]:
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
                f"damaged. Load another"
            )
        return numbers
    steps = _steps_of(saved)
    if numbers and numbers["steps"] == steps and numbers["optimizer"] == setup.name:
        setup.algorithm.check_saved_settings(numbers["settings"], steps)
        return numbers
    return {
        "senders": 1, "steps": steps, "skipped_steps": 0, "compressing": False, "wire_bytes": 0, "mean_norm": ANEW,
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

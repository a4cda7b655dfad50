"""How a saved state comes back: what `onebit.checkpoint.schema` describes, or what torch.optim.AdamW has saved.

Everything is built and checked beside the present state: a state that does not fit changes nothing.
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
    check_own,
    check_states,
    check_structure,
    checked_numbers,
    steps_of,
)
from onebit.checkpoint.schema import messages_of, progress, saved_fields
from onebit.kernels.data.bits import packed
from onebit.optim.fields import JOINED, MASTER, MOMENTUM, RESIDUAL, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.limit import USUAL
from onebit.optim.masks import clear_fields
from onebit.optim.mean_norm import ANEW, MeanNorm
from onebit.optim.memory_order import flattened
from onebit.optim.options import KEYS_OF_OTHERS, OF_ADAMW, check_group
from onebit.optim.param_groups import COMPRESS, PROGRESS, betas_of, is_compressed
from onebit.optim.run import Run
from onebit.optim.setup import Setup
from onebit.optim.sharding import part_of
from onebit.optim.stages import Stages
from onebit.optim.state import MomentumAt, Part, State
from onebit.warning import warn


def from_state_dict(run: Run, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Run]:
    """What `restored` returns, from what an optimizer's `state_dict` did."""
    groups = _checked_groups(run.setup, state_dict)
    keys = chain.from_iterable(g["params"] for g in groups)
    params = chain.from_iterable(g["params"] for g in run.setup.groups)
    state = {p: state_dict["state"].get(key, {}) for key, p in zip(keys, params, strict=True)}
    return restored(run, state, checked_numbers(groups[0].get(PROGRESS, "")), groups)


def adopted(run: Run, state: Mapping[Tensor, Saved]) -> Run:
    """Build what a run of stage 1 goes on from with `state`, which a user has put into `optimizer.state`."""
    check_states(state)
    used = {"step", *(field.name for each in run.state.states for field in each.fields.values())}
    state = {p: {name: v for name, v in own.items() if name in used} for p, own in state.items()}
    for each in run.state.states:
        each.take_over_writes()
    return restored(run, state, progress(run), run.setup.groups)[1]


def restored(
    run: Run, state: Mapping[Tensor, Saved], reached: dict[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], Run]:
    """Return what each param group is updated with, and the run that goes on from `state`. Nothing changes.

    reached, groups: how far the run had come, and what every param group had beside its parameters.
    """
    setup = run.setup
    # without empty dicts: torch's get_optimizer_state_dict puts them where a flattened state lacks a name
    saved = {
        p: {name: v for name, v in (state.get(p) or {}).items() if not isinstance(v, Mapping) or v}
        for group in setup.groups
        for p in group["params"]
    }
    numbers = _numbers(setup, reached, saved)
    merged = _merged_options(setup, groups, numbers["compressing"])
    own = [{**group, **new} for group, new in zip(setup.groups, merged, strict=True)]
    return merged, Run(setup, _Restoration(setup, numbers, saved, own).state(len(run.state.compressed)))


@dataclass(frozen=True)
class _Restoration:
    """New parts, filled from what was saved."""

    setup: Setup
    numbers: Mapping[str, Any]
    saved: Mapping[Tensor, Saved]
    groups: Sequence[Mapping[str, Any]]  # each param group with the options that were saved

    def state(self, dtypes: int) -> State:
        """dtypes: of the parameters that are compressed."""
        setup, numbers, chunks = self.setup, self.numbers, list[int]()
        if numbers["compressing"]:
            chunks = [n if setup.options.chunks == "auto" else setup.options.chunks for n in numbers["chunks"]]
            if len(chunks) != dtypes:
                raise ValueError(
                    f"the state was saved with parameters of {len(chunks)} dtypes, here they have {dtypes}: messages "
                    f"of stage 2 are made for each. Cast the model as it was when it was saved"
                )
        joined = self._joined()
        parts = [Part(state) for state in setup.flat_states(chunks, joined)]
        for part in parts:
            saved, in_stage_2 = self._checked(part.state), numbers["compressing"] and part.state.compressed
            if in_stage_2:
                part.state.set_chunks(chunks.pop(0))
            self._load(part.state, saved, in_stage_2)
            part.state.scratch = setup.algorithm.scratch(part.state)
            if in_stage_2:
                clear_fields(part.state)
                part.start_reducer(setup)
                part.gathered = _whole_residual(part.state, saved)
        rule = setup.freeze_rule([part.state for part in parts])
        rule.restore(numbers["trace"])
        steps, skipped = int(numbers["steps"]), int(numbers["skipped_steps"])
        compressing = numbers["compressing"]
        stages = Stages(rule, setup.device, steps=steps, skipped=skipped, compressing=compressing)
        mean_norm, sent = MeanNorm(setup.device, self._mean_norm()), int(numbers["wire_bytes"])
        at: MomentumAt = "exp_avg" if compressing else "messages"
        late = setup.late_rows(joined)
        return State(parts, stages, mean_norm, sent, merged=compressing, momentum_at=at, late=late)

    def _joined(self) -> dict[Tensor, int]:
        """Return after which step a parameter was added, where that was saved and is one number as it should be."""
        found: dict[Tensor, Any] = {p: own.get(JOINED.name) for p, own in self.saved.items()}
        known = {p: float(n) for p, n in found.items() if _form(n) == (torch.float32, 1, False)}
        return {p: int(n) for p, n in known.items() if 0 < n <= self.numbers["steps"]}

    def _mean_norm(self) -> list[float]:
        """The numbers of the mean's norm. With another number of senders F is not known: a mean of more gradients is
        shorter."""
        full, *others = map(float, self.numbers["mean_norm"])
        return [full if self.numbers["senders"] == self.setup.topology.nodes else 0.0, *others]

    def _fields(self, state: FlatState) -> list[Field]:
        """Those that this stage uses."""
        if self.numbers["compressing"] and state.compressed:
            return saved_fields(self.setup, state)
        return [*(field for field in self.setup.algorithm.stage_1 if field.saved), MASTER]

    def _checked(self, state: FlatState) -> list[Saved]:
        """Check what was saved of this rank's part of every parameter, and return it."""
        fields, saved = self._fields(state), list[Saved]()
        whole = {field.name for field in fields if field.per != "parameter"}
        for i, p in enumerate(state.params):
            own = {name: part_of(v, p if name in whole else None) for name, v in self.saved[p].items()}
            if own or self.numbers["compressing"]:
                check_own(own, fields, state.shapes[i], self.setup.name_of(p))
            saved.append(own)
        return saved

    def _load(self, state: FlatState, saved: Sequence[Saved], in_stage_2: bool) -> None:
        algorithm, steps = self.setup.algorithm, int(self.numbers["steps"])
        for field in (MOMENTUM, *algorithm.stage_2) if in_stage_2 else algorithm.stage_1:
            if field.name not in state and (field.always or _differs(field, saved)):
                state.add(field)
        for i, own in enumerate(saved):
            for field in state.fields.values():
                if field.saved and field.name in own:
                    _load_field(state, field, i, own[field.name])
            if in_stage_2:
                algorithm.load_derived(state, i, own, self.groups[state.groups[i]], steps)
        if USUAL.name in state and self.numbers["messages"] != messages_of(self.setup):
            state[USUAL.name].zero_()  # it is of the messages that there were
        state.master_is_current = all(MASTER.name in own for own in saved)
        if "optimizer" not in self.numbers and state.compressed and steps:
            algorithm.adopt_variance(state, steps, [betas_of(self.groups[group])[1] for group in state.groups])


def _whole_residual(state: FlatState, saved: Sequence[Saved]) -> Tensor | None:
    """Return what a rank that has a slice saves of all slices: fp32 [elements], on the host."""
    if state.slices == 1:
        return None
    whole = torch.zeros(state.layout.elements, dtype=torch.float32, device="cpu")
    for i, own in enumerate(saved):
        if RESIDUAL.name in own:
            state.elements_of(whole, i).copy_(flattened(own[RESIDUAL.name], state.orders[i]))
    return whole


def _form(value: Any) -> tuple[torch.dtype, int, bool] | None:
    return (value.dtype, value.numel(), value.is_meta) if isinstance(value, Tensor) else None


def _differs(field: Field, saved: Sequence[Saved]) -> bool:
    """Return whether any parameter has another value than the initial one."""
    initial = int(field.initial) if field.per == "bit" else field.initial  # torch would make floats of all bits
    return any(bool((own[field.name] != initial).any()) for own in saved if field.name in own)


def _load_field(state: FlatState, field: Field, index: int, value: Tensor) -> None:
    if field.per in ("element", "slice"):
        flat = flattened(value, state.orders[index])
        for part, own in state.parts_of(field.name, index):
            own.copy_(flat[part])
    elif field.per == "bit":
        state.view(field.name, index).copy_(packed(flattened(value != 0, state.orders[index])))
    else:
        state.view(field.name, index).copy_(value.view(()))


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

"""Checks that a state can be what some optimizer saved, made before anything is built from it.

A ValueError for values that no run leaves behind (a moment that is not finite, a variance below 0, another shape), a
TypeError for another kind of thing than `onebit.checkpoint.schema` or torch.optim.AdamW puts there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.schema import VERSION
from onebit.kernels.data.checks import is_finite, is_whole
from onebit.kernels.data.layout import MOST_CHUNKS, MOST_RANKS
from onebit.optim.fields import Field
from onebit.optim.param_groups import COMPRESS, PROGRESS
from onebit.optim.sharding import is_sharded, local, part_of

Saved = Mapping[str, Any]  # one parameter's
_MOST = 2**53  # whole numbers beyond it are not exact as float64
_DAMAGED = "the state is damaged, or not an optimizer's. Load another"
_LISTS = (list, tuple)

_WHOLE = {  # of a run's progress: the least and the most that it can be
    "senders": (1, MOST_RANKS), "steps": (0, _MOST), "skipped_steps": (0, _MOST), "wire_bytes": (0, 2**63),
}  # fmt: skip
_OTHERS: dict[str, tuple[Callable[[Any], bool], str]] = {  # whether each can be right, and what it is
    "compressing": (lambda value: isinstance(value, bool), "true or false, as the stage was"),
    "bias_correction": (lambda value: isinstance(value, bool), "true or false"),
    "optimizer": (lambda value: isinstance(value, str), "a name"),
    "chunks": (lambda value: isinstance(value, _LISTS), "a list of numbers"),
    "messages": (lambda value: isinstance(value, str), "words"),
    "mean_norm": (lambda value: _is_mean_norm(value), "a list of 4 numbers that go together"),
    "settings": (lambda value: isinstance(value, Mapping), "a dict"),
    "trace": (lambda value: _is_trace(value), "a list of equally long lists of numbers"),
}


def _is_mean_norm(value: Any) -> bool:
    """Return whether it can be the `numbers` of a `MeanNorm`."""
    if not isinstance(value, _LISTS) or len(value) != 4 or not all(is_finite(each) and each >= 0 for each in value):
        return False
    _, local, steps, share = map(float, value)
    return share <= 1 and steps.is_integer() and (local > 0 or steps == 0)


def check_structure(state_dict: object) -> None:
    """Mappings and lists where `torch.optim.Optimizer.state_dict` has them."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state is a dict, not a {type(state_dict).__name__}: {_DAMAGED}")
    if not {"state", "param_groups"} <= state_dict.keys():
        names = sorted(map(str, state_dict))
        raise ValueError(f"not a state of an optimizer: it has {names}, not state and param_groups")
    state, groups = state_dict["state"], state_dict["param_groups"]
    check_states(state)
    if not isinstance(groups, _LISTS) or not groups or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError(f"param_groups is not a list of dicts, one or more: {_DAMAGED}")
    for i, group in enumerate(groups):
        if not isinstance(group.get("params"), _LISTS):
            raise TypeError(f"param group {i} has no list of parameters: {_DAMAGED}")
    keys = list(chain.from_iterable(group["params"] for group in groups))
    if not all(isinstance(key, (int, str)) for key in keys):
        raise TypeError(f"the param groups name parameters by other things than numbers and names: {_DAMAGED}")
    if len(set(keys)) < len(keys):
        raise ValueError(f"the param groups name a parameter twice: {_DAMAGED}")


def check_states(state: object) -> None:
    if not isinstance(state, Mapping) or not all(isinstance(own, Mapping) for own in state.values()):
        raise TypeError(f"state is not a dict with a dict for each parameter: {_DAMAGED}")


def checked_numbers(text: object) -> dict[str, Any]:
    """How far the run had come: what `onebit.checkpoint.schema.progress` has made, as text, or nothing."""
    if not isinstance(text, str):
        raise TypeError(f"{PROGRESS!r} of the first param group is a {type(text).__name__}, not a string: {_DAMAGED}")
    if not text:
        return {}
    try:
        numbers = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{PROGRESS!r} of the first param group is no JSON ({error!s:.60}): {_DAMAGED}") from error
    if not isinstance(numbers, dict):
        raise TypeError(f"{PROGRESS!r} of the first param group is a {type(numbers).__name__} in JSON: {_DAMAGED}")
    version = numbers.get("version")
    if not is_whole(version, VERSION, VERSION):
        raise ValueError(
            f"the state has version {_shown(version)} of the format, this onebit reads {VERSION}: load it with the "
            f"onebit that saved it"
        )
    if lacks := {*_WHOLE, *_OTHERS} - numbers.keys():
        raise ValueError(f"the state does not say how far the run had come (no {', '.join(sorted(lacks))}): {_DAMAGED}")
    for name, (least, most) in _WHOLE.items():
        whole_number(numbers[name], name, least, most)
    for name, (is_good, words) in _OTHERS.items():
        if not is_good(numbers[name]):
            raise ValueError(f"{name} is {words}, not {_shown(numbers[name])}: {_DAMAGED}")
    for chunks in numbers["chunks"]:
        whole_number(chunks, "chunks", 1, MOST_CHUNKS)
    return numbers


def _is_trace(value: Any) -> bool:
    """Return whether it can be the `state` of a `StageRule`."""
    rows = isinstance(value, list) and all(isinstance(row, list) and row and all(map(is_finite, row)) for row in value)
    return rows and all(len(row) == len(value[0]) for row in value)


def check_options(groups: Sequence[Mapping[str, Any]]) -> None:
    for i, group in enumerate(groups):
        if lacks := {"lr", "betas", "eps", "weight_decay"} - group.keys():
            raise ValueError(f"param group {i} of the state has no {', '.join(sorted(lacks))}: {_DAMAGED}")
        for name in ("maximize", "amsgrad", COMPRESS):
            if not isinstance(group.get(name, False), (bool, type(None))):
                raise TypeError(f"{name} of param group {i} is neither true nor false: {_DAMAGED}")


def checked_part(own: Saved, fields: Sequence[Field], p: Tensor, name: str) -> dict[str, Tensor]:
    """Return what a parameter's state has of some fields, this rank's part: in its shape, with values that a run can
    leave behind."""
    found, sharded, shape = dict[str, Tensor](), is_sharded(p), tuple(local(p).shape)
    if "step" in own:
        steps_of(own)
    for field in fields:
        if field.name in own:
            what, one = f"{field.name} of parameter {name}", field.per == "parameter"
            value = own[field.name]
            if sharded or is_sharded(value):
                value = part_of(value, None if one else p)
            if not isinstance(value, Tensor):
                raise TypeError(f"{what} is a {type(value).__name__}, not a tensor: {_DAMAGED}")
            if one and value.numel() != 1:  # not every tool keeps a shape of [1]
                raise ValueError(f"{what} has {value.numel()} elements, not one: {_DAMAGED}")
            if not one and tuple(value.shape) != shape:
                raise ValueError(
                    f"{what} has shape {tuple(value.shape)} in the state, {shape} is needed here: the state is another "
                    f"model's, of parameters in another order, or damaged"
                )
            _check_values(value, field, what)
            found[field.name] = value
        elif field.required:
            raise ValueError(
                f"the state has no {field.name} for parameter {name}: it is damaged, or neither this optimizer's nor "
                f"AdamW's"
            )
    return found


def _check_values(value: Tensor, field: Field, what: str) -> None:
    right = value.dtype == torch.uint8 if field.per == "bit" else value.dtype.is_floating_point
    if not right or value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise TypeError(f"{what} has dtype {value.dtype} or no values: {_DAMAGED}")
    if field.per == "bit" or field.values == "any" or not value.numel():
        return
    if field.values == "whole":
        whole_number(value.item(), field.name, 0, _MOST)
    least, most = map(float, value.detach().float().aminmax())
    if not (math.isfinite(least) and math.isfinite(most)) or (field.values != "finite" and least < 0):
        raise ValueError(f"{what} reaches from {least:g} to {most:g}, as no run leaves it: {_DAMAGED}")


def steps_of(own: Saved) -> int:
    value, what = own["step"], "step"
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta or value.layout is not torch.strided:
            raise ValueError(f"{what} is a number, not {value.dtype} {tuple(value.shape)}: {_DAMAGED}")
        value = value.item()
    return whole_number(value, what, 0, _MOST)


def whole_number(value: object, what: str, least: int, most: int) -> int:
    number = float(value) if is_finite(value) else math.nan  # type: ignore[arg-type]
    if not number.is_integer() or not least <= number <= most:
        raise ValueError(f"{what} is {_shown(value)} in the state, not a whole number of {least} or more: {_DAMAGED}")
    return int(value)  # type: ignore[call-overload]


def _shown(value: object) -> str:
    """Show a value, a tensor by its type: not every one can show what is in it."""
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else f"{value!r:.60}"

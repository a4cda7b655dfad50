"""States made of states: those of all ranks as one that any number of ranks can load, and as torch.optim.AdamW's.

AdamW's of a state of stage 2:

    exp_avg       m, the mean of the last messages; what residuals hold of it (over beta1) where none came yet
    exp_avg_sq    v with  sqrt(v / (1 - beta2^t)) + eps = 1 / d,  so that AdamW divides by what stage 2 divides by

In stage 1 of 0/1 Adam the weights of all gradients in v add up to another sum than AdamW's, which v is brought to.

Residuals are left out: AdamW has no use for them. An element that did not move in stage 2 starts from zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.checks import check_options, check_structure, checked_numbers, steps_of
from onebit.checkpoint.elements import Saved, momentum, rank_of
from onebit.optim.param_groups import COMPRESS, PROGRESS, betas_of, is_compressed
from onebit.optim.schedule import VarianceSchedule


def merge_states(state_dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states that all ranks saved, one each, as one that any number of ranks can load."""
    if not state_dicts:
        raise ValueError("merge_states got no states: give what every rank saved")
    for each in state_dicts:
        check_structure(each)
    numbers = [checked_numbers(s["param_groups"][0].get(PROGRESS, {})) for s in state_dicts]
    for rank, own in enumerate(numbers):
        for name in ("optimizer", "ranks", "slices", "shards", "steps", "compressing"):
            if own.get(name) != numbers[0].get(name):
                raise ValueError(
                    f"the states do not belong together: number {rank} has {name} {own.get(name)!r} where the first "
                    f"has {numbers[0].get(name)!r}. Give what the ranks of one run saved at one step"
                )
    keys = [s["state"].keys() for s in state_dicts]
    if odd := next((rank for rank, own in enumerate(keys) if own != keys[0]), 0):
        raise ValueError(f"the states do not belong together: number {odd} is not of the parameters the first is of")
    merged = dict(state_dicts[0])
    merged["state"] = {
        key: dict(chain.from_iterable(s["state"][key].items() for s in state_dicts)) for key in merged["state"]
    }
    return merged


def adamw_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state of `OneBitAdam`, `OneBitLamb` or `ZeroOneAdam`, of either stage, for torch.optim.AdamW's load_state_dict.

    state_dict: what `optimizer.state_dict()` returned, of one rank, or of all by `onebit.merge_states`. It stays as it
    is.
    """
    check_structure(state_dict)
    groups = [dict(group) for group in state_dict["param_groups"]]
    check_options(groups)
    numbers = checked_numbers(groups[0].pop(PROGRESS, {}))
    of = dict(chain.from_iterable(((key, group) for key in group["params"]) for group in groups))
    state = {key: _moments(key, own, numbers, of[key]) for key, own in state_dict["state"].items() if own}
    for group in groups:
        group.pop(COMPRESS, None)
    return {"state": state, "param_groups": groups}


def _moments(key: object, own: Saved, numbers: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    compressed = bool(numbers.get("compressing")) and is_compressed(group)
    names = ("step",) if compressed else ("step", "exp_avg", "exp_avg_sq")
    if lacks := [name for name in names if name not in own]:
        raise ValueError(
            f"the state has no {', '.join(lacks)} for parameter {key}: it is no state of an optimizer that AdamW could "
            f"continue, or damaged"
        )
    beta1, beta2 = betas_of(group)
    if not compressed:
        found, schedule, steps = {name: own[name] for name in names}, _schedule(numbers), steps_of(own)
        if schedule is not None and is_compressed(group) and 0 < steps == numbers["steps"]:
            found["exp_avg_sq"] = own["exp_avg_sq"] * ((1 - beta2**steps) / schedule.weight(steps, beta2))
        return found
    root = _root(key, own, numbers, group)
    m = _momentum(key, own, numbers, beta1, root)
    m = m.masked_fill(root == 0, 0)
    v = root.square() * (1 - beta2 ** int(numbers["steps"]))
    return {"step": own["step"], "exp_avg": m.float(), "exp_avg_sq": v.float()}


def _root(key: object, own: Saved, numbers: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """fp64, sqrt(vhat) as stage 2 has it; 0 where an element does not move."""
    if "denominator" in own:
        d = own["denominator"].double() * _number(own, "gamma")
        return (1 / d - group["eps"]).clamp(min=0).masked_fill(d == 0, 0)
    schedule = _schedule(numbers)
    if "exp_avg_sq" not in own or schedule is None:
        raise ValueError(
            f"the state has no variance for parameter {key}: it is one of {numbers['optimizer']}, which AdamW can't "
            f"continue"
        )
    v = own["exp_avg_sq"].double()
    weight = schedule.weight(int(numbers["steps"]), betas_of(group)[1]) if numbers["bias_correction"] else 1.0
    root = (v / weight).sqrt()
    root = torch.maximum(root, _number(own, "least_root"))
    return torch.where(v == 0, _number(own, "root_at_zero"), root)


def _schedule(numbers: Mapping[str, Any]) -> VarianceSchedule | None:
    """Of 0/1 Adam."""
    settings = numbers.get("settings", {})
    if not {"var_update_scaler", "var_freeze_step"} <= settings.keys():
        return None
    last = settings["var_freeze_step"]
    return VarianceSchedule(int(settings["var_update_scaler"]), None if last == "none" else int(last))


def _momentum(key: object, own: Saved, numbers: Mapping[str, Any], beta1: float, like: Tensor) -> Tensor:
    """fp64, in the shape of `like`."""
    if "first_momentum" in own:
        return own["first_momentum"].double()
    m = momentum(own, like.shape, int(numbers["block_size"])).double().mean(0)
    residuals = [value.double() for name, value in own.items() if rank_of(name) is not None]
    if not bool(m.any()) and any(map(torch.any, residuals)):
        if numbers["slices"] > 1:
            raise ValueError(
                f"no message has had the momentum of parameter {key} yet, and the ranks of a node have its residual in "
                f"{numbers['slices']} slices: take one step more, or load onebit.merge_states of all ranks into an "
                f"optimizer of one process and give adamw_state the state of that"
            )
        m = sum(residuals[1:], residuals[0]) / (len(residuals) * max(beta1, torch.finfo(torch.float32).tiny))
    return m * _number(own, "momentum_factor") / _number(own, "gamma")


def _number(own: Saved, name: str) -> Tensor:
    """fp64, without a dimension: what there is one of for a parameter, or 1."""
    return torch.as_tensor(own.get(name, 1.0)).double().view(())

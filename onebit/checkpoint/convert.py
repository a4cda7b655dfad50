"""A state as torch.optim.AdamW's.

    exp_avg       m of the last message; what the residual holds of it (over beta1) where none came yet
    exp_avg_sq    v by which AdamW divides as this run does: of 1-bit LAMB that of d, of 0/1 Adam with other weights

Residuals are left out: AdamW has no use for them. An element that did not move in stage 2 starts from zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.checks import Saved, check_options, check_structure, checked_numbers, steps_of
from onebit.optim.adam import to_variance
from onebit.optim.param_groups import COMPRESS, PROGRESS, betas_of, is_compressed
from onebit.optim.schedule import VarianceSchedule

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def adamw_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Make a state for torch.optim.AdamW's load_state_dict from one of `OneBitAdam`, `OneBitLamb` or `ZeroOneAdam`.

    Args:
        state_dict: what `optimizer.state_dict()` returned, in either stage. It stays as it is.

    Returns:
        A state with the moments and the options of the param groups.
    """
    check_structure(state_dict)
    groups = [dict(group) for group in state_dict["param_groups"]]
    check_options(groups)
    numbers = checked_numbers(groups[0].pop(PROGRESS, ""))
    of = dict(chain.from_iterable(((key, group) for key in group["params"]) for group in groups))
    if unknown := [key for key in state_dict["state"] if key not in of]:
        raise ValueError(f"the state has parameter {unknown[0]!r}, which no param group names: it is damaged")
    state = {key: _moments(key, own, numbers, of[key]) for key, own in state_dict["state"].items() if own}
    for group in groups:
        group.pop(COMPRESS, None)
    return {"state": state, "param_groups": groups}


def _moments(key: object, own: Saved, numbers: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    if lacks := [name for name in _MOMENTS if name not in own]:
        raise ValueError(
            f"the state has no {', '.join(lacks)} for parameter {key}: it is no state of an optimizer that AdamW could "
            f"continue, or damaged"
        )
    found, steps, (beta1, beta2) = {name: own[name] for name in _MOMENTS}, steps_of(own), betas_of(group)
    if not numbers or not is_compressed(group) or steps != numbers["steps"] or not steps:
        return found
    schedule = _schedule(numbers)
    if numbers["compressing"]:
        if beta1 and "residual" in own and not bool(own["exp_avg"].any()):
            found["exp_avg"] = own["residual"] / beta1
        if "denominator" in own:
            eps, gamma = float(group["eps"]), _number(own["gamma"])
            found["exp_avg"] = (found["exp_avg"] / gamma).to(own["exp_avg"].dtype)
            found["exp_avg_sq"] = to_variance(own["denominator"].double() * gamma, eps, 1 - beta2**steps)
        elif schedule is not None:
            found["exp_avg_sq"] = _variance_in_use(own, numbers, schedule, beta2) * (1 - beta2**steps)
        found["exp_avg"] = found["exp_avg"].masked_fill(found["exp_avg_sq"] == 0, 0)
    elif schedule is not None:
        found["exp_avg_sq"] = own["exp_avg_sq"] * ((1 - beta2**steps) / schedule.weight(steps, beta2))
    return found


def _variance_in_use(own: Saved, numbers: Mapping[str, Any], schedule: VarianceSchedule, beta2: float) -> Tensor:
    """u^2 of 0/1 Adam, fp32."""
    v = own["exp_avg_sq"].double()
    root = (v / (schedule.weight(numbers["steps"], beta2) if numbers["bias_correction"] else 1.0)).sqrt()
    root = torch.maximum(root, _number(own["least_root"]))
    return torch.where(v == 0, _number(own["root_at_zero"]), root).square().float()


def _number(value: Tensor) -> Tensor:
    """fp64, without a dimension: what a parameter has one of."""
    return value.double().view(())


def _schedule(numbers: Mapping[str, Any]) -> VarianceSchedule | None:
    """The variance schedule of a saved 0/1 Adam; None for others."""
    settings = numbers["settings"]
    if not {"var_update_scaler", "var_freeze_step"} <= settings.keys():
        return None
    last = settings["var_freeze_step"]
    return VarianceSchedule(int(settings["var_update_scaler"]), None if last == "none" else int(last))

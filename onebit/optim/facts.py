"""Facts that all ranks share, by name.

of_model       parameters, masks, groups                   before the first step, of a rank that joins, of a save
of_options     each option, and each of the algorithm      the same
of_groups      numbers that schedules change               before the first step
of_progress    steps and stage                             before the first step
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from onebit.optim import masks
from onebit.optim.memory_order import order_of
from onebit.optim.param_groups import COMPRESS, is_compressed
from onebit.optim.setup import Setup
from onebit.optim.sharding import local
from onebit.optim.state import State

Facts = dict[str, float | str]
MASKS = "masks"  # of sharded parameters each rank has another part


def of_model(setup: Setup) -> Facts:
    params = [p for group in setup.groups for p in group["params"]]
    shapes = [(tuple(p.shape), getattr(p, "placements", None), p.requires_grad) for p in params]
    orders = [(p, order_of(local(p))) for p in params]
    permuted = [f"parameter {setup.name_of(p)} {order}" for p, order in orders if order is not None]
    return {
        "optimizer": setup.name,
        "parameters": len(params),
        "elements": sum(p.numel() for p in params),
        "checksum of shapes": zlib.crc32(str(shapes).encode()),
        "dtypes": _short([str(p.dtype) for p in params]),
        "memory order": _short([", ".join(permuted) or "contiguous"]),
        MASKS: masks.checksum([setup.fixed.get(p) for p in params]),
        COMPRESS: _short([is_compressed(group) for group in setup.groups]),
        "param groups of so many parameters": str([len(group["params"]) for group in setup.groups]),
    }


def of_options(setup: Setup) -> Facts:
    """Options as they act: "auto" and a rule that means the same are one."""
    options = setup.options
    rule = f"FreezeRule(threshold={options.freeze_rule.threshold}, window={setup.window})"
    return {
        **{each.name: str(getattr(options, each.name)) for each in fields(options)},
        "freeze_step": rule if options.fixed_freeze_step is None else options.fixed_freeze_step,
        "norm": setup.norm,
        **setup.algorithm.settings(),
    }


def of_groups(setup: Setup) -> Facts:
    names = ("lr", "betas", "eps", "weight_decay")
    return {name: _short([_number(group[name]) for group in setup.groups]) for name in names}


def of_progress(state: State) -> Facts:
    return {"steps": state.stages.steps, "stage": 1 + state.stages.compressing}


def _number(value: Any) -> Any:
    """Return the number of a tensor, also of each of two betas."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_number, value))
    return float(value) if isinstance(value, Tensor) else value


def _short(values: Sequence[Any]) -> str:
    text = str(values[0] if values and all(v == values[0] for v in values) else values)
    return text if len(text) <= 60 else f"{text[:40]}... (checksum {zlib.crc32(text.encode())})"

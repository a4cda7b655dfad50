"""Param groups: what may be in them, what each parameter is called, and what a kernel reads of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter, is_not
from typing import Any, TypeGuard

import torch
from torch import Tensor

from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.pointers import DTYPES, are_contiguous
from onebit.optim.memory_order import Order, is_dense, order_of
from onebit.optim.sharding import is_sharded

Group = Mapping[str, Any]
Groups = Sequence[Group]
Identity = tuple[bool, list[int], list[bool], list[tuple[int, Order]]]
_GRAD, _IS_THERE = attrgetter("grad"), partial(is_not, None)
PROGRESS = "onebit"  # of the first group, in a saved state: how far the run has come
COMPRESS = "compress"  # of a group: whether stage 2 compresses what its parameters send, as it does unless told not to


def check_parameters(params: Sequence[Tensor]) -> None:
    seen: set[Tensor] = set()
    for i, p in enumerate(params):
        if p in seen:
            raise ValueError(
                f"parameter {i} (shape {tuple(p.shape)}) is given twice: a step would update it twice, with a state "
                f"for each. Give every parameter once"
            )
        seen.add(p)
        if not p.requires_grad:
            continue
        if p.dtype not in DTYPES:
            raise TypeError(
                f"parameter {i} (shape {tuple(p.shape)}) has dtype {p.dtype}: onebit optimizes float32, bfloat16 and "
                f"float16, with a state and messages in float32. Cast the model, for example with .float()"
            )
        if not (p.is_contiguous() if is_sharded(p) else is_dense(p)):
            raise ValueError(
                f"parameter {i} (shape {tuple(p.shape)}, strides {p.stride()}) is not dense: kernels update it where "
                f"it lies, and its elements do not lie side by side. Give it memory of its own with "
                f"p.data = p.data.contiguous()"
            )


def check_gradients(groups: Groups, names: Mapping[Tensor, str]) -> None:
    for group in groups:
        grads = list(map(_GRAD, group["params"]))
        there = list(filter(_IS_THERE, grads))
        if are_contiguous(there):
            continue  # of hundreds in every step, all are asked at once
        for p, grad in zip(group["params"], grads, strict=True):
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of parameter {name_of(p, groups, names)} has layout {grad.layout}: signs are sent "
                    f"for every element, so it has to be dense. Use nn.Embedding(..., sparse=False)"
                )
            if 0 in grad.stride() and grad.numel() > 1:
                p.grad = grad.contiguous()  # one that was expanded has no memory for every element


def device_of(groups: Groups) -> torch.device:
    """The one device that all parameters that train are on; where none does, that of any."""
    params = [p for group in groups for p in group["params"]]
    devices = {p.device for p in params if p.requires_grad} or {p.device for p in params[:1]}
    if not devices:
        raise ValueError("no param group has a parameter: there is nothing to optimize, and no device to be on")
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on several devices ({', '.join(sorted(map(str, devices)))}): one optimizer works on "
            f"one. Build one for each device"
        )
    return devices.pop()


def name_of(parameter: Tensor, groups: Groups, names: Mapping[Tensor, str]) -> str:
    """Name a parameter: from `names`, from the groups if they were given named parameters, or by its place."""
    if parameter in names:
        return names[parameter]
    for g, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            if p is parameter:
                given = group.get("param_names")
                return given[i] if given else f"{i} of group {g} (shape {tuple(p.shape)})"
    return "unknown"


def by_flat_state(groups: Groups) -> list[tuple[bool, list[Tensor], list[int]]]:
    """The parameters that train: of every dtype those that are compressed, then those that are not. Of each flat state
    whether it is compressed, its parameters in the order of the groups, and the group of each."""
    found: dict[tuple[str, bool], tuple[list[Tensor], list[int]]] = {}
    for i, group in enumerate(groups):
        for p in group["params"]:
            if p.requires_grad:
                params, places = found.setdefault((str(p.dtype), not is_compressed(group)), ([], []))
                params.append(p)
                places.append(i)
    return [(not apart, *found[dtype, apart]) for dtype, apart in sorted(found)]


def is_compressed(group: Group) -> bool:
    return bool(group.get(COMPRESS, True))


def identities(groups: Groups) -> list[Identity]:
    """Equal for equal sets of parameters that train, lie in the same order and are compressed alike."""
    found = []
    for group in groups:
        params: Sequence[Tensor] = group["params"]
        training = [p.requires_grad for p in params]
        permuted = []
        if not are_contiguous(params):
            permuted = [(i, order_of(p)) for i, p in enumerate(params) if training[i] and not p.is_contiguous()]
        found.append((is_compressed(group), list(map(id, params)), training, permuted))
    return found


def on_device(lr: float | Tensor) -> TypeGuard[Tensor]:
    """Return whether the host can't read a learning rate without a wait."""
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def beta_of(beta: Any) -> Any:
    """What a tensor on the host holds; anything else as it is."""
    if not isinstance(beta, Tensor):
        return beta
    if beta.device.type != "cpu":
        raise ValueError(
            f"betas has a tensor on {beta.device}: every step needs its value on the host, and would wait for the "
            f"device. Give a number, or a tensor on the CPU"
        )
    if beta.numel() != 1 or not beta.is_floating_point():
        raise ValueError(
            f"betas has a tensor of {beta.numel()} elements of {beta.dtype}: two are needed, each of one number"
        )
    return float(beta)


def betas_of(group: Group) -> tuple[float, float]:
    beta1, beta2 = group["betas"]
    return (beta1, beta2) if type(beta1) is type(beta2) is float else (beta_of(beta1), beta_of(beta2))


def hyper_of(group: Group, step: int, bias_correction: bool) -> Hyper:
    """A group's numbers at a step; a learning rate that is on the device is 0 here."""
    return Hyper.at_step(
        step,
        lr=0.0 if on_device(group["lr"]) else float(group["lr"]),
        betas=betas_of(group),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        bias_correction=bias_correction,
    )

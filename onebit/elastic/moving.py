"""What goes from one rank to one other: residuals of a rank that leaves, and the state that a rank gets that joins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.names import rank_of, server_rank_of
from onebit.collectives.hand_over import receive_tensors, send_tensors
from onebit.collectives.transport.protocol import Ranks
from onebit.optim.param_groups import PROGRESS
from onebit.optimizers.optimizer import OneBitOptimizer

Saved = dict[Tensor, dict[str, Any]]
_LEAVING = "handing over residuals (send)"
_JOINING = "handing a state to a rank that joins (send)"


def send_residuals(ranks: Ranks, to: int, place: int, saved: Saved, device: torch.device) -> None:
    """Of the rank that had this place."""
    residuals = {p: {name: v for name, v in own.items() if _is_residual(name)} for p, own in saved.items()}
    _send(ranks, to, place, residuals, device, _LEAVING)


def receive_residuals(ranks: Ranks, source: int, device: torch.device) -> tuple[int, list[dict[str, Tensor]]]:
    """And the place of the rank that had them."""
    return _receive(ranks, source, device, _LEAVING)


@dataclass(frozen=True)
class Received:
    """A rank's state, as a rank that joins has got it."""

    numbers: dict[str, Any]
    groups: list[dict[str, Any]]
    states: list[dict[str, Tensor]]
    x: list[Tensor]

    def put_parameters(self, inner: OneBitOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        """And what `groups` have for each param group."""
        for p, x in zip(_parameters(inner), self.x, strict=True):
            p.copy_(x)
        for group, new in zip(inner.param_groups, groups, strict=True):
            for name, value in new.items():
                if isinstance(group.get(name), Tensor):
                    group[name].copy_(torch.as_tensor(value))
                elif name != "params":
                    group[name] = value


def send_state(ranks: Ranks, to: int, inner: OneBitOptimizer, saved: Saved, numbers: dict[str, Any]) -> None:
    """All but the residuals."""
    current = inner.current
    with current.keep_last_sync():
        state: Saved = {p: {"x": p.detach().clone()} for p in _parameters(inner)}
    for p, own in saved.items():
        state[p] |= {name: v for name, v in own.items() if not _is_residual(name)}
    for p, last in current.masters_at_last_sync():
        state[p]["master"] = last
    value = {"numbers": {**numbers, "wire_bytes": 0}, "groups": group_values(inner)}
    _send(ranks, to, value, state, inner.setup.device, _JOINING)


def receive_state(ranks: Ranks, source: int, device: torch.device) -> Received:
    value, states = _receive(ranks, source, device, _JOINING)
    return Received(value["numbers"], value["groups"], states, [own.pop("x") for own in states])


def group_values(inner: OneBitOptimizer) -> list[dict[str, Any]]:
    """What every param group has beside its parameters, as JSON can hold it; a ValueError where something can't be."""
    found = []
    for i, group in enumerate(inner.param_groups):
        found.append({name: v for name, v in group.items() if name not in ("params", PROGRESS)})
        for name, value in found[-1].items():
            try:
                found[-1][name] = _number(value)
                json.dumps(found[-1][name])
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{name!r} of param group {i} is a {type(value).__name__}, which no rank that joins can get: "
                    f"numbers, strings, and lists of them can be sent. Take it out of the group"
                ) from error
    return found


def _number(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_number(each) for each in value]
    return value.item() if hasattr(value, "item") else value


def _parameters(inner: OneBitOptimizer) -> list[Tensor]:
    return [p for group in inner.param_groups for p in group["params"]]


def _is_residual(name: str) -> bool:
    return rank_of(name) is not None or server_rank_of(name) is not None


def _send(ranks: Ranks, to: int, value: Any, state: Saved, device: torch.device, phase: str) -> None:
    names = [list(own) for own in state.values()]
    tensors = [v.detach().to(device) for own in state.values() for v in own.values()]
    send_tensors(ranks, to, {"value": value, "names": names}, tensors, device, phase)


def _receive(ranks: Ranks, source: int, device: torch.device, phase: str) -> tuple[Any, list[dict[str, Tensor]]]:
    found, tensors = receive_tensors(ranks, source, device, phase)
    each = iter(tensors)
    return found["value"], [{name: next(each) for name in names} for names in found["names"]]

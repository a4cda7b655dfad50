"""What goes from one rank to one other: residuals of a rank that leaves, and the state that a rank gets that joins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint import restore, schema
from onebit.checkpoint.checks import checked_numbers
from onebit.collectives.agreement import checksums
from onebit.collectives.hand_over import receive_tensors, send_tensors
from onebit.collectives.transport.protocol import Ranks
from onebit.optim.fields import RESIDUAL
from onebit.optim.param_groups import PROGRESS
from onebit.optim.setup import Setup
from onebit.optimizers.optimizer import OneBitOptimizer

Saved = dict[Tensor, dict[str, Any]]
_LEAVING = "handing over residuals (send)"
_JOINING = "handing a state to a rank that joins (send)"


def send_shares(ranks: Ranks, to: int, place: int, shares: Sequence[Tensor], device: torch.device) -> None:
    """Send the `residual_shares` of a rank that leaves. place: that of this rank."""
    send_tensors(ranks, to, {"place": place}, shares, device, _LEAVING)


def receive_shares(ranks: Ranks, source: int, device: torch.device) -> tuple[int, list[Tensor]]:
    """Receive what `send_shares` has sent: the place and the shares."""
    found, tensors = receive_tensors(ranks, source, device, _LEAVING)
    return found["place"], tensors


@dataclass(frozen=True)
class Shared:
    """A rank's state but the residuals: what every rank has the same, and a rank that joins gets."""

    numbers: dict[str, Any]
    groups: list[dict[str, Any]]
    states: list[dict[str, Tensor]]
    x: list[Tensor]

    @classmethod
    def of(cls, inner: OneBitOptimizer, saved: Saved, numbers: dict[str, Any]) -> Shared:
        run, params = inner.run, _parameters(inner)
        with run.keep_last_sync():
            x = [p.detach().clone() for p in params]
        states = [{name: v for name, v in saved.get(p, {}).items() if name != RESIDUAL.name} for p in params]
        own = dict(zip(params, states, strict=True))
        for p, last in run.state.masters_at_last_sync():
            own[p]["master"] = last
        return cls({**numbers, "wire_bytes": 0}, group_values(inner), states, x)

    def clone(self) -> Shared:
        """Whose tensors nobody changes."""
        return replace(self, states=[{name: v.clone() for name, v in own.items()} for own in self.states])

    def packed(self) -> tuple[dict[str, Any], list[Tensor]]:
        """What JSON can hold, and the tensors."""
        names = [sorted(own) for own in self.states]  # ranks may have made their fields in another order
        value = {"numbers": self.numbers, "groups": self.groups, "names": names}
        return value, [*self.x, *(own[name] for own in self.states for name in sorted(own))]

    @classmethod
    def unpacked(cls, value: Mapping[str, Any], tensors: Sequence[Tensor]) -> Shared:
        names, each = value["names"], iter(tensors)
        x = [next(each) for _ in names]
        return cls(value["numbers"], value["groups"], [{name: next(each) for name in own} for own in names], x)

    def send(self, ranks: Ranks, to: int, device: torch.device) -> None:
        value, tensors = self.packed()
        send_tensors(ranks, to, value, [t.detach().to(device) for t in tensors], device, _JOINING)

    @classmethod
    def receive(cls, ranks: Ranks, source: int, device: torch.device) -> Shared:
        return cls.unpacked(*receive_tensors(ranks, source, device, _JOINING))

    def restored(self, setup: Setup) -> restore.Restoration:
        """See `restore.restored`."""
        params = [p for group in setup.groups for p in group["params"]]
        states = dict(zip(params, self.states, strict=True))
        numbers = checked_numbers(schema.as_text(self.numbers))
        return restore.restored(setup, states, numbers, self.groups)

    @property
    def digest(self) -> str:
        """Return a hash of every bit."""
        value, tensors = self.packed()
        return hashlib.sha256(json.dumps([value, checksums(tensors).tolist()]).encode()).hexdigest()

    def put_parameters(self, inner: OneBitOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        """Write the parameters, and what `groups` have for each param group."""
        for p, x in zip(_parameters(inner), self.x, strict=True):
            p.copy_(x)
        put_group_values(inner, groups)


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


def put_group_values(inner: OneBitOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, new in zip(inner.param_groups, groups, strict=True):
        for name, value in new.items():
            if isinstance(group.get(name), Tensor):
                group[name].copy_(torch.as_tensor(value))
            elif name != "params":
                group[name] = value


def _number(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_number(each) for each in value]
    return value.item() if hasattr(value, "item") else value


def _parameters(inner: OneBitOptimizer) -> list[Tensor]:
    return [p for group in inner.param_groups for p in group["params"]]

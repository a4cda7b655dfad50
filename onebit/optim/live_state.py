"""`optimizer.state` as it was shown: whether somebody has put other things there since."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor


class LiveState:
    """The tensors themselves are compared: writing into one of them is no change, another in its place is."""

    def __init__(self, shown: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._shown = {p: dict(own) for p, own in shown.items()}
        self._seen = _identities(self._shown)

    def is_as_shown(self, state: Mapping[Any, Any]) -> bool:
        """What every step asks. The order is that of `shown`: hashing tensors would take ten times as long."""
        return set(map(type, state.values())) <= {dict} and _identities(state) == self._seen

    def changed(self, state: Mapping[Any, Any]) -> list[Tensor]:
        """The parameters, shown or not, whose state is another now. A parameter without any is as it is."""
        shown = self._shown
        there = [p for p, own in state.items() if own and (p not in shown or not _is_same(own, shown[p]))]
        return [*there, *(p for p in shown if not state.get(p))]


def _identities(state: Mapping[Any, Mapping[str, Any]]) -> tuple[list[int], list[str], list[int]]:
    """Of the parameters, and of all that they have: names and values, one after the other."""
    owns = state.values()
    return list(map(id, state)), list(chain.from_iterable(owns)), [id(v) for own in owns for v in own.values()]


def _is_same(own: Mapping[str, Any], shown: Mapping[str, Any]) -> bool:
    return (
        isinstance(own, Mapping)
        and len(own) == len(shown)
        and all(own.get(name) is value for name, value in shown.items())
    )

"""`optimizer.state` as it was shown: what users have put there since holds, as in torch's optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint import restore, schema
from onebit.optim.run import Run
from onebit.optim.state import State


class ShownState:
    """The tensors themselves are compared: writing into one of them is no change, another in its place is."""

    def __init__(self, run: Run) -> None:
        self.state = defaultdict(dict, schema.live(run))
        self._shown = {p: dict(own) for p, own in self.state.items()}
        self._names, self._values = list(chain.from_iterable(self._shown.values())), list(_values(self._shown))

    def is_in(self, state: Mapping[Any, Any]) -> bool:
        """What every step asks. The order is that of what was shown: hashing tensors would take ten times as long."""
        return (
            len(state) == len(self._shown)
            and all(map(is_, state, self._shown))
            and set(map(type, state.values())) <= {dict}
            and list(chain.from_iterable(state.values())) == self._names
            and all(map(is_, _values(state), self._values))
        )

    @torch.no_grad()
    def adopted(self, run: Run, state: Mapping[Any, Any]) -> Run:
        """Return the run that goes on from `state`: `run`, unless a user has changed it. What was cleared starts
        anew."""
        if self.is_in(state) or not (changed := self._changed(state)):
            return run
        if not any(state.values()):
            return replace(run, state=State.of(run.setup))  # as if no step had been taken
        name = run.setup.name_of(changed[0])
        if run.state.stages.compressing:
            raise ValueError(
                f"the state of parameter {name} in optimizer.state was changed after the freeze: what stage 2 keeps, "
                f"messages and every rank's residuals, goes together. Load a whole state (load_state_dict), clear all "
                f"of it (optimizer.state.clear(): stage 1 begins anew), or put back what was there"
            )
        if any(not state.get(p) and any(p is q for g in run.setup.groups for q in g["params"]) for p in changed):
            raise ValueError(
                f"optimizer.state has nothing for parameter {name} any more, and others keep theirs: onebit counts the "
                f"same steps for all. Clear all of it (optimizer.state.clear()), or write zeros into its exp_avg and "
                f"exp_avg_sq"
            )
        return restore.adopted(run, state)

    def _changed(self, state: Mapping[Any, Any]) -> list[Tensor]:
        """The parameters, shown or not, whose state is another now. A parameter without any is as it is."""
        there = [p for p, own in state.items() if own and not _is_same(own, self._shown.get(p))]
        return [*there, *(p for p in self._shown if not state.get(p))]


def _values(state: Mapping[Any, dict[str, Any]]) -> Iterator[Any]:
    """Yield the values of all parameters, one after the other."""
    return chain.from_iterable(map(dict.values, state.values()))


def _is_same(own: Any, shown: Mapping[str, Any] | None) -> bool:
    if shown is None or not isinstance(own, Mapping) or own.keys() != shown.keys():
        return False
    return all(own[name] is value for name, value in shown.items())

"""A transport on which a collective fails at one point of one step, as where a rank has died."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from onebit.collectives import CollectiveError
from onebit.collectives.transport.protocol import Work
from tests.faults.striking import AndThen, Watched


@dataclass(frozen=True)
class Failure:
    """A collective that fails. before: nothing is sent. after: all has come, and is overwritten, as by half of a
    message."""

    step: int
    phase: str
    when: Literal["before", "after"] = "after"
    skip: int = 0  # how often the phase ends well in that step
    error: type[Exception] = CollectiveError


def garble(out: Tensor, error: Exception) -> None:
    """Half of it has come."""
    out.fill_(-1 if out.is_floating_point() else 77)
    raise error


class Failing(Watched):
    """`step` is the coming one."""

    def __init__(self, group: Any, failure: Failure | None, root: Failing | None = None) -> None:
        """root: what it was made from, whose step counts."""
        super().__init__(group)
        self.step, self.failure, self._root = 0, failure, root or self
        self.met = 0  # how often the phase came in the failing step
        self.duplicates: list[weakref.ref[Failing]] = []

    def split(self, color: int) -> Failing:
        part: Any = super().split(color)
        return Failing(part.group, self.failure, self._root)

    def duplicate(self) -> Failing:
        made: Any = super().duplicate()
        own = Failing(made.group, self.failure, self._root)
        self.duplicates.append(weakref.ref(own))
        return own

    def expect(self, out: Tensor, phase: str) -> None:
        """Nothing: a receive that no message ends would take one of the next run."""

    def around(self, start: Callable[[], Work], out: Tensor, phase: str) -> Work:
        at = self.failure
        if at is None or self._root.step != at.step or not phase.startswith(at.phase):
            return start()
        self._root.met += 1
        if self._root.met <= at.skip:
            return start()
        if at.when == "before":
            raise at.error(f"{phase} did not begin: a rank died")
        return AndThen(start(), partial(garble, out, at.error(f"{phase} did not end: a rank died")))

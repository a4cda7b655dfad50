"""A transport on which a collective fails at one point of one step, as where a rank has died."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from onebit.collectives import CollectiveError
from onebit.collectives.transport.protocol import Work
from tests.faults.striking import Watched


@dataclass(frozen=True)
class Failure:
    """before: nothing is sent. after: all has come, and what has come is overwritten, as by half of a message."""

    step: int
    phase: str
    when: Literal["before", "after"] = "after"
    skip: int = 0  # how often the phase ends well in that step


@dataclass
class Garbled:
    """Work that ends with an error."""

    work: Work
    out: Tensor
    phase: str

    def wait(self) -> None:
        self.work.wait()
        self.out.fill_(-1 if self.out.is_floating_point() else 77)
        raise CollectiveError(f"{self.phase} did not end: a rank died")


class Failing(Watched):
    """`step` is the coming one."""

    def __init__(self, group: Any, failure: Failure | None, root: Failing | None = None) -> None:
        """root: what it was split from, whose step counts."""
        super().__init__(group)
        self.step, self._failure, self._root = 0, failure, root or self
        self.met = 0  # how often the phase came in the failing step

    def split(self, color: int) -> Failing:
        part: Any = super().split(color)
        return Failing(part.group, self._failure, self._root)

    def expect(self, out: Tensor, phase: str) -> None:
        """Nothing: a receive that no message ends would take one of the next run."""

    def around(self, start: Callable[[], Work], out: Tensor, phase: str) -> Work:
        at = self._failure
        if at is None or self._root.step != at.step or not phase.startswith(at.phase):
            return start()
        self._root.met += 1
        if self._root.met <= at.skip:
            return start()
        if at.when == "before":
            raise CollectiveError(f"{phase} did not begin: a rank died")
        return Garbled(start(), out, phase)

"""A fault strikes at one moment of one collective of one step, on the rank itself, from within its transport."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from onebit.collectives.transport.protocol import Work
from onebit.collectives.transport.torch import TorchTransport
from perf.lab.network import LabUnavailable, NetworkLab
from tests.limits import HUNG

How = Literal["kill", "stop", "cut", "orphan"]  # the last: killed, with a child that holds what the process had open
FINITE, AVERAGE = "agreeing on finite gradients", "averaging gradients (all-reduce)"
EXCHANGE = "the exchange (all-gather of chunk"
NODE, SPREAD = "averaging gradients over the node (all-to-all)", "the spread over the node (all-gather of chunk"
GATHER, SCATTER = "the gather phase (all-to-all of chunk", "the scatter phase (all-gather of chunk"


@dataclass(frozen=True)
class Point:
    """A moment, and the phases in which the survivors may learn that the rank is gone."""

    stage: int
    name: str
    phase: str
    when: Literal["before", "under way", "after"]
    survivors: tuple[str, ...]
    reply: Literal["direct", 1] = 1
    each: int = 1  # ranks a node

    @property
    def ranks(self) -> int:
        """How many train."""
        return 3 if self.each == 1 else 2 * self.each


POINTS = (
    Point(1, "before the all-reduce", AVERAGE, "before", (AVERAGE,)),
    Point(1, "in the all-reduce", AVERAGE, "under way", (AVERAGE, FINITE)),
    Point(1, "after the all-reduce", AVERAGE, "after", (AVERAGE, FINITE)),
    Point(2, "before the all-to-all", f"{GATHER} 0", "before", (GATHER,)),
    Point(2, "in the all-to-all", f"{GATHER} 0", "under way", (GATHER,)),
    Point(2, "between the phases", f"{GATHER} 1", "after", (GATHER, SCATTER)),
    Point(2, "before the all-gather", f"{SCATTER} 1", "before", (SCATTER,)),
    Point(2, "in the all-gather", f"{SCATTER} 1", "under way", (SCATTER, FINITE)),
    Point(2, "after the all-gather", f"{SCATTER} 1", "after", (SCATTER, FINITE)),
    Point(2, "before the exchange", f"{EXCHANGE} 0", "before", (EXCHANGE,), "direct"),
    Point(2, "in the exchange", f"{EXCHANGE} 1", "under way", (EXCHANGE, FINITE), "direct"),
    Point(2, "before a node's average", NODE, "before", (NODE, FINITE), each=2),
    Point(2, "in a node's average", NODE, "under way", (NODE, FINITE), each=2),
    Point(2, "before a node's spread", f"{SPREAD} 0", "before", (SPREAD, SCATTER, FINITE), each=2),
    Point(2, "in a node's spread", f"{SPREAD} 1", "under way", (SPREAD, NODE, FINITE), each=2),
)


@dataclass(frozen=True)
class Fault:
    how: How
    point: int  # of POINTS
    victim: int

    @property
    def at(self) -> Point:
        return POINTS[self.point]

    @property
    def timeout(self) -> float:
        """Seconds that a collective waits. Of a rank that dies all others learn by the end of its connections, but for
        those of another node."""
        return 30.0 if self.how == "kill" and self.at.each == 1 else 4.0

    def __str__(self) -> str:
        return f"{self.how} rank {self.victim} in stage {self.at.stage}, {self.at.name}"


class Watched(TorchTransport):
    """A TorchTransport whose collectives go through `around`, which starts them."""

    def around(self, start: Callable[[], Work], out: Tensor, phase: str) -> Work:
        raise NotImplementedError

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return self.around(partial(super().all_to_all, out, sent, phase), out, phase)

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return self.around(partial(super().all_gather, out, sent, phase), out, phase)

    def all_sum(self, values: Tensor, phase: str) -> Work:
        return self.around(partial(super().all_sum, values, phase), values, phase)


@dataclass
class AndThen:
    """Some work, and what happens when it has ended."""

    work: Work
    then: Callable[[], None]

    def wait(self) -> None:
        self.work.wait()
        self.then()


class Striking(Watched):
    """Calls `strike` at one moment of step `due`. root: what it was split from, whose step counts."""

    def __init__(
        self, group: Any, at: Any = None, due: int = 0, strike: Any = bool, root: Striking | None = None
    ) -> None:
        super().__init__(group)
        self._at, self._due, self._strike, self._root = at, due, strike, root or self
        self._step, self.began = 0, 0.0

    def split(self, color: int) -> Striking:
        part: Any = super().split(color)
        return Striking(part.group, self._at, self._due, self._strike, self._root)

    def begin(self, step: int) -> None:
        self._step, self.began = step, time.monotonic()

    def around(self, start: Callable[[], Work], out: Tensor, phase: str) -> Work:
        at = self._at
        if at is None or self._root._step != self._due or not phase.startswith(at.phase):
            return start()
        if at.when == "before":
            self._strike()
        work = start()
        if at.when == "under way":
            self._strike()
        return AndThen(work, self._strike) if at.when == "after" else work


def strike_of(how: How, folder: Path) -> Callable[[], None]:
    """What a rank does to itself; one that is cut off leaves a file, and goes on when its link is down."""

    def be_cut() -> None:
        (folder / "struck").touch()
        stop = time.monotonic() + HUNG
        while not (folder / "cut").exists():
            if time.monotonic() > stop:
                raise TimeoutError("nobody took the link down")
            time.sleep(0.01)

    def leave_a_child() -> None:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    if how in ("cut", "orphan"):
        return be_cut if how == "cut" else leave_a_child
    return lambda: os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def lab_of(hosts: int, stack: ExitStack) -> NetworkLab | None:
    """A network lab until the stack is closed; None where this machine can't hold one."""
    try:
        return stack.enter_context(NetworkLab(hosts))
    except LabUnavailable as why:
        print(f"skipped what needs the lab: {why}")
        return None


def cut_off(lab: NetworkLab, run: Any, folder: Path, victim: int) -> None:
    """Take the link down when the rank has come to that point, and let all ranks come to their end."""
    try:
        stop = time.monotonic() + HUNG
        while not (folder / "struck").exists():
            if time.monotonic() > stop or not run.running():
                raise RuntimeError("\n".join(rank.report() for rank in run.ranks))
            time.sleep(0.02)
        lab.link_down(victim)
        (folder / "cut").touch()
        run.wait(60, check=False)
    finally:
        run.stop()
        lab.link_up(victim)

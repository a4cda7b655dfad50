"""What the demo's ranks have found: losses, bytes, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from onebit.cli.demo.train import End, Settings, Start, Step
from onebit.cli.paced_link import is_kept


@dataclass
class Record:
    """What rank 0 has printed so far. Lists have an entry for each optimizer."""

    settings: Settings
    start: Start | None = None
    steps: list[Step] = field(default_factory=list)
    end: End | None = None

    def add(self, what: Start | Step | End | None) -> None:
        if isinstance(what, Start):
            self.start = what
        elif isinstance(what, Step):
            self.steps.append(what)
        elif isinstance(what, End):
            self.end = what

    @property
    def freeze(self) -> int | None:
        """The first step of stage 2."""
        return next((s.step for s in self.steps if s.compressing), None)

    @property
    def losses(self) -> list[float]:
        """Losses of held-out text at the end."""
        return [points[-1][1] for points in self.held_out()]

    @property
    def seconds(self) -> list[float]:
        """Seconds of all steps."""
        return [sum(each) for each in zip(*(s.seconds for s in self.steps), strict=True)]

    def sent(self) -> list[list[int]]:
        """Bytes in all, and from the step on in which the second's stage 2 begins."""
        rows = [s.sent for s in self.steps]
        before = rows[self.freeze - 2] if self.freeze else rows[-1]
        return [[all_of_it, all_of_it - b] for all_of_it, b in zip(rows[-1], before, strict=True)]

    def held_out(self) -> list[list[tuple[float, float]]]:
        """Pairs of seconds of training, and the loss of held-out text then."""
        curves: list[list[tuple[float, float]]] = [[] for _ in self.settings.names]
        passed = [0.0 for _ in curves]
        for step in self.steps:
            passed = [before + own for before, own in zip(passed, step.seconds, strict=True)]
            for curve, at, loss in zip(curves, passed, step.held_out or (), strict=False):
                curve.append((at, loss))
        return curves

    def times_as_soon(self) -> float | None:
        """How many times as soon as the first optimizer the last one has the first's last loss; None if it ends above.

        Between two points of its curve the loss falls in a straight line.
        """
        first, *_, last = self.held_out()
        end, goal = first[-1]
        before = last[0]
        if last[-1][1] > goal:
            return None
        for point in last:
            if point[1] <= goal:
                fall = before[1] - point[1]
                share = (before[1] - goal) / fall if fall > 0 else 1.0
                return end / (before[0] + share * (point[0] - before[0]))
            before = point
        return None

    @property
    def rates(self) -> list[float]:
        """Rates of the paced link, as measured before and after training."""
        ends = [end.rate for end in (self.start, self.end) if end is not None]
        return [rate for rate in ends if rate is not None]

    @property
    def link_is_kept(self) -> bool:
        """Return whether seconds are those of the link that was asked for, or none was."""
        link = self.settings.link
        return link is None or all(is_kept(link, rate) for rate in self.rates)


def smoothed(steps: Sequence[Step], window: int) -> list[list[float]]:
    """Average the last `window` training losses at every step, of each optimizer."""
    each = zip(*(s.losses for s in steps), strict=True)
    return [[fmean(one[max(0, i - window) : i]) for i in range(1, len(one) + 1)] for one in each]

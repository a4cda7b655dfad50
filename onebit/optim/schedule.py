"""Which steps of 0/1 Adam do what (Lu et al. 2023, sections 4 and 5). Steps are those taken.

T_v    the variance is updated, with a full-precision average         t_0 = 1,  t_(j+1) = t_j + 2^floor(j / kappa)
T_u    after local steps all agree again             t_0 = F,  t_(j+1) = t_j + min(clipper, 2^floor((t_j - F) / scaler))
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

_LEAST_DECAY = 0.9  # of a variance that is updated once in many steps
_MOST_BETAS = 64  # whose weights are remembered


class SpacedSteps:
    """t_0 = first,  t_(j+1) = t_j + gap(j, t_j)"""

    def __init__(self, first: int, gap: Callable[[int, int], int]) -> None:
        self._steps, self._gap = [first], gap

    def __getitem__(self, index: int) -> int:
        while len(self._steps) <= index:
            self._steps.append(self._steps[-1] + self._gap(len(self._steps) - 1, self._steps[-1]))
        return self._steps[index]

    def __contains__(self, step: int) -> bool:
        index = self.index(step)
        return index >= 0 and self._steps[index] == step

    def index(self, step: int) -> int:
        """The index of the last one up to `step`; -1 if there is none."""
        while self._steps[-1] < step:
            self[len(self._steps)]
        return bisect_right(self._steps, step) - 1


class VarianceSchedule:
    """The full steps, none of them after `last`, and what each weighs in the variance."""

    def __init__(self, kappa: int, last: int | None = None) -> None:
        self.kappa, self.last = kappa, last
        self._steps = SpacedSteps(1, lambda j, _: 2 ** (j // kappa))
        self._weights: dict[float, list[float]] = {}  # by beta2, after each full step

    def is_full(self, step: int) -> bool:
        return step in self._steps and (self.last is None or step <= self.last)

    @property
    def dense_start(self) -> int:
        """The last of the full steps that follow one another at the beginning."""
        return self.kappa + 1 if self.last is None else min(self.kappa + 1, self.last)

    def next_full(self, step: int) -> int | None:
        """The first full step after `step`, if there is one."""
        found = self._steps[self._steps.index(step) + 1]
        return found if self.last is None or found <= self.last else None

    def decay(self, step: int, beta2: float) -> float:
        """b of the last full step up to `step`: v = b v + (1-b) g^2. beta2 for each step since the full step before,
        and not less than 0.9, so that the variance is not that of a single gradient."""
        index = self._index(step)
        gap = 1 if index == 0 else self._steps[index] - self._steps[index - 1]
        return max(beta2**gap, min(beta2, _LEAST_DECAY))

    def weight(self, step: int, beta2: float) -> float:
        """What the weights of all gradients in v add up to after `step`: vhat = v / weight."""
        if beta2 not in self._weights and len(self._weights) == _MOST_BETAS:
            self._weights.clear()  # where a schedule changes beta2 with every step
        index, known = self._index(step), self._weights.setdefault(beta2, [])
        while len(known) <= index:
            b = self.decay(self._steps[len(known)], beta2)
            known.append(b * (known[-1] if known else 0.0) + (1 - b))
        return known[index]

    def _index(self, step: int) -> int:
        """The number j of the last full step up to `step`."""
        return self._steps.index(step if self.last is None else min(step, self.last))


class SyncSchedule:
    """Which of the steps after `first` are local, and with which of them ranks synchronise.

    scaler: after so many steps the way from one to the next doubles. clipper: it gets no longer than this. While it is
    one step, steps are compressed ones.
    """

    def __init__(self, first: int, scaler: int, clipper: int) -> None:
        self.scaler, self.clipper = scaler, clipper
        self.first_local = first + scaler + 1 if clipper > 1 else None
        self._steps = SpacedSteps(first, lambda _, t: min(clipper, 2 ** min((t - first) // scaler, 31)))

    def is_alone(self, step: int) -> bool:
        """Return whether a rank moves by its own gradient in this step: it does in every one from the first local one
        on."""
        return self.first_local is not None and step >= self.first_local

    def is_sync(self, step: int) -> bool:
        return step in self._steps

    def is_farther(self, sync: int) -> bool:
        """Return whether a sync that ends local steps is farther from the one before than that was from its own."""
        index = self._steps.index(sync)
        return self._steps[index] - self._steps[index - 1] > self._steps[index - 1] - self._steps[index - 2]

    def next_sync(self, step: int) -> int | None:
        """The first sync after `step` that ends local steps, if there are any."""
        if self.first_local is None:
            return None
        return self._steps[self._steps.index(max(step, self.first_local - 1)) + 1]

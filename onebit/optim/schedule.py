"""Which steps of 0/1 Adam update the variance, with a full-precision average (Lu et al. 2023, section 4).

    t_0 = 1,  t_(j+1) = t_j + 2^floor(j / kappa)

Steps are those taken: one that is skipped is taken again, of the same kind.
"""

from __future__ import annotations

from bisect import bisect_right

_LEAST_DECAY = 0.9  # of a variance that is updated once in many steps


class VarianceSchedule:
    """The full steps, none of them after `last`, and what each weighs in the variance."""

    def __init__(self, kappa: int, last: int | None = None) -> None:
        self.kappa, self.last = kappa, last
        self._steps = [1]
        self._weights: dict[float, list[float]] = {}  # by beta2, after each full step

    def is_full(self, step: int) -> bool:
        return self._steps[self._index(step)] == step

    @property
    def dense_start(self) -> int:
        """The last of the full steps that follow one another at the beginning."""
        return self.kappa + 1 if self.last is None else min(self.kappa + 1, self.last)

    def next_full(self, step: int) -> int | None:
        """The first full step after `step`, if there is one."""
        index = self._index(step) + 1
        if index == len(self._steps):
            self._add()
        found = self._steps[index]
        return found if self.last is None or found <= self.last else None

    def decay(self, step: int, beta2: float) -> float:
        """b of the last full step up to `step`: v = b v + (1-b) g^2. beta2 for each step since the full step before,
        and not less than 0.9, so that the variance is not that of a single gradient."""
        index = self._index(step)
        gap = 1 if index == 0 else self._steps[index] - self._steps[index - 1]
        return max(beta2**gap, min(beta2, _LEAST_DECAY))

    def weight(self, step: int, beta2: float) -> float:
        """What the weights of all gradients in v add up to after `step`: vhat = v / weight."""
        index, known = self._index(step), self._weights.setdefault(beta2, [])
        while len(known) <= index:
            b = self.decay(self._steps[len(known)], beta2)
            known.append(b * (known[-1] if known else 0.0) + (1 - b))
        return known[index]

    def _index(self, step: int) -> int:
        """The number j of the last full step up to `step`."""
        step = step if self.last is None else min(step, self.last)
        while self._steps[-1] < step:
            self._add()
        return bisect_right(self._steps, step) - 1

    def _add(self) -> None:
        self._steps.append(self._steps[-1] + 2 ** ((len(self._steps) - 1) // self.kappa))

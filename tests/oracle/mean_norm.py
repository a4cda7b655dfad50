"""The norm that gradients are clipped by, where no rank has their mean: of a run whose steps are all taken."""

from __future__ import annotations

import math


class MeanNorm:
    def __init__(self, senders: int) -> None:
        self.of_noise = 1 - 1 / senders  # what the mean cancels
        self.full = self.local = self.noise = 0.0  # |mean g|^2, mean |g_i|^2, the share of noise in the latter
        self.compressed_steps = 0

    def norm(self, squares: float, full: bool) -> float:
        """The norm to clip the coming step by, from what its gradients' squares add up to."""
        return math.sqrt(squares if full else squares * (1 - self.noise * self.of_noise))

    def take(self, squares: float, full: bool) -> None:
        """That step."""
        if full:
            if self.compressed_steps:
                self.noise = (self.noise + self._measured(squares, self.local)) / 2
            self.full = self._mean(self.full, squares, 0.3)
            return
        if self.full and squares * (1 - self.of_noise) > 4 * self.full:
            return  # noise alone does not explain it
        self.compressed_steps += 1
        if self.full and self.compressed_steps <= 8:
            before = self.noise * (self.compressed_steps - 1)
            self.noise = (before + self._measured(self.full, squares)) / self.compressed_steps
        self.local = self._mean(self.local, squares, 1 / 8)

    def _measured(self, full: float, local: float) -> float:
        return min(1.0, max(0.0, (1 - full / local) / self.of_noise))

    @staticmethod
    def _mean(before: float, newest: float, weight: float) -> float:
        return weight * min(newest, 4 * before) + (1 - weight) * before if before else newest

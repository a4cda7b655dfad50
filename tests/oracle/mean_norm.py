"""The norm that gradients are clipped by, where no rank has their mean: of a run whose steps are all taken."""

from __future__ import annotations

import math


class MeanNorm:
    def __init__(self, senders: int) -> None:
        self.share_of_mean = 1 - 1 / senders  # of the noise, what the mean cancels
        self.fulls: list[float] = []  # |mean g|^2 of full steps, averaged: the newest counts .3
        self.locals: list[float] = []  # mean |g_i|^2 of compressed steps
        self.recent = math.nan  # of them, the mean of 8; later the newest counts an eighth
        self.noise = 0.0

    def after(self, squares: float, full: bool) -> float:
        """The norm to clip by in the next step, from what its gradients' squares add up to."""
        if full:
            if self.locals:
                self.noise = (self.noise + self._noise(squares)) / 2
            self.fulls.append(squares if not self.fulls else 0.7 * self.fulls[-1] + 0.3 * squares)
            return math.sqrt(squares)
        self.locals.append(squares)
        if len(self.locals) <= 8:
            self.recent = sum(self.locals) / len(self.locals)
            if self.fulls:
                self.noise = self._noise(self.fulls[-1])
        else:
            self.recent = 7 / 8 * self.recent + squares / 8
        return math.sqrt(squares * (1 - self.noise * self.share_of_mean))

    def _noise(self, full: float) -> float:
        return min(1.0, max(0.0, (1 - full / self.recent) / self.share_of_mean))

"""When stage 1 ends, and what is kept of its variance.

    freeze_step = t          after t steps
    freeze_step = "auto"     after the first step t >= 2 D with min(r, 1/r) >= threshold,
                             r = ||vhat_t||_1 / ||vhat_(t-D)||_1,  D = 1 / (1 - beta2)

(paper 001, section 7.1, gives r >= threshold, which a variance that still grows from zero meets at once.)

    d = 1 / (sqrt(vhat_T) + eps)
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from onebit.options import Dead

logger = logging.getLogger("onebit")


class Lagging:
    """Numbers that a step leaves on the device and the host reads when the next step comes.

    By then they have arrived, or arrive while the device has the next backward pass to do: it never runs dry.
    """

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def put(self, values: Tensor) -> None:
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))
        else:
            self._host, self._arrived = values.clone(), None

    def take(self) -> list[float] | None:
        """What was put since the last call, if anything."""
        if self._host is None:
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
        host, self._host = self._host, None
        return host.tolist()


class FreezeRule:
    """Looks at ||vhat||_1 after every step; the same numbers on every rank, so the same decision."""

    def __init__(self, freeze_step: int | Literal["auto"], threshold: float, window: int, speaks: bool) -> None:
        self.freeze_step, self.threshold, self.window, self._speaks = freeze_step, threshold, window, speaks
        self.trace: deque[float] = deque(maxlen=window + 1)
        self.ratio: float | None = None

    @property
    def watches(self) -> bool:
        return self.freeze_step == "auto"

    def see(self, step: int, norm: float) -> None:
        """||vhat||_1 after step `step`."""
        self.trace.append(norm)
        if len(self.trace) > self.window and self.trace[0] > 0:
            self.ratio = norm / self.trace[0]
        if self._speaks and step % self.window == 0:
            seen = "not known yet" if self.ratio is None else f"{self.ratio:.4f}"
            logger.info(
                "step %d, stage 1: the variance's ratio over %d steps is %s (stage 2 begins within %.4g of 1)",
                step, self.window, seen, 1 - self.threshold,
            )  # fmt: skip

    def due(self, step: int) -> bool:
        """Whether stage 1 ends after step `step`, the last one seen."""
        if self.freeze_step != "auto":
            return step >= self.freeze_step
        r = self.ratio
        return step >= 2 * self.window and r is not None and r > 0 and min(r, 1 / r) >= self.threshold

    def state(self) -> list[float]:
        return list(self.trace)

    def restore(self, trace: Sequence[float]) -> None:
        self.trace = deque(trace, maxlen=self.window + 1)
        full = len(self.trace) > self.window and self.trace[0] > 0
        self.ratio = self.trace[-1] / self.trace[0] if full else None


def freeze_variance_(v: Tensor, bias2: float, eps: float, dead: Dead) -> int:
    """v = 1 / (sqrt(v) bias2 + eps) in place, bias2 = 1 / sqrt(1 - beta2^t); how many coordinates had no variance.

    Those get the value of the mean of the others ("floor"), or 0, with which they never move: always so where a
    parameter has no live coordinate to take a mean of.
    """
    without = v == 0
    count = int(without.sum())
    floor = 0.0
    if dead == "floor" and 0 < count < v.numel():
        mean = float(v.sum(dtype=torch.float64)) / (v.numel() - count)
        floor = 1 / (mean**0.5 * bias2 + eps)
    v.sqrt_().mul_(bias2).add_(eps).reciprocal_()
    if count:
        v.masked_fill_(without, floor)
    return count

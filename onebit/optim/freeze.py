"""When stage 1 ends, and what is kept of its variance.

    freeze_step = t          after t steps
    freeze_step = "auto"     after the first step t >= 2 D with min(r, 1/r) >= threshold,
                             r = ||vhat_t||_1 / ||vhat_(t-D)||_1,  D = 1 / (1 - beta2)

(paper 001, section 7.1, gives r >= threshold, which a variance that still grows from zero meets at once.) For LAMB:
when the averaged coefficients of parameters with 95 % of the elements changed by less than 1 - threshold over D steps.

    d = 1 / (sqrt(vhat_T) + eps)        vhat_T at least variance_floor of its parameter's mean
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from onebit.optim.flat_state import Space
from onebit.optim.options import Dead
from onebit.warning import warn

if TYPE_CHECKING:
    from onebit.optim.lamb_state import LambSpace

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
            self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
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


class FreezeRule(ABC):
    """Looks at some numbers after every `stride` steps; they are the same on every rank, and so is the decision."""

    what = ""

    def __init__(self, freeze_step: int | Literal["auto"], threshold: float, window: int, lags: int) -> None:
        """`window` steps lie between what is compared, in `lags` strides."""
        self.freeze_step, self.threshold, self.window = freeze_step, threshold, window
        self._stride = -(-window // lags)
        self._trace: deque[list[float]] = deque(maxlen=-(-window // self._stride) + 1)
        self.ratio: float | None = None

    @abstractmethod
    def measure(self, spaces: Sequence[Space], groups: int) -> list[Tensor]:
        """What has to be heard of a step: fp64, on the device."""

    @abstractmethod
    def hear(self, step: int, numbers: Sequence[float], beta2s: Sequence[float]) -> None:
        """What `measure` found after step `step`. beta2 is 0 where the variance is not bias-corrected."""

    @abstractmethod
    def _compare(self, now: Sequence[float], before: Sequence[float]) -> float | None:
        """The ratio that tells whether stage 1 may end, if there is one."""

    @abstractmethod
    def _settled(self, ratio: float) -> bool: ...

    @property
    def watches(self) -> bool:
        return self.freeze_step == "auto"

    def due(self, step: int) -> bool:
        """Whether stage 1 ends after step `step`, the last one heard of."""
        if self.freeze_step != "auto":
            return step >= self.freeze_step
        return step >= 2 * self.window and self.ratio is not None and self._settled(self.ratio)

    def tell(self, step: int) -> None:
        """Every `window` steps, so that a run too short for "auto" does not stay in stage 1 unnoticed."""
        if step % self.window == 0:
            seen = "not known yet" if self.ratio is None else f"{self.ratio:.4f}"
            logger.info("step %d, stage 1: %s over %d steps is %s", step, self.what, self.window, seen)

    def state(self) -> list[list[float]]:
        return list(self._trace)

    def restore(self, trace: Sequence[Sequence[float]]) -> None:
        self._trace.clear()
        self._trace.extend(map(list, trace))
        self._look()

    def _see(self, step: int, values: list[float]) -> None:
        if step % self._stride == 0:
            self._trace.append(values)
            self._look()

    def _look(self) -> None:
        full = len(self._trace) == self._trace.maxlen
        self.ratio = self._compare(self._trace[-1], self._trace[0]) if full else None


class VarianceRule(FreezeRule):
    """1-bit Adam's: the size of the variance."""

    def __init__(self, freeze_step: int | Literal["auto"], threshold: float, window: int) -> None:
        super().__init__(freeze_step, threshold, window, lags=window)
        self.what = f"the variance's ratio (stage 2 begins within {1 - threshold:.4g} of 1)"

    def measure(self, spaces: Sequence[Space], groups: int) -> list[Tensor]:
        """The sum of v, a number a space and param group."""
        parts = [space.sums[first:stop] for space in spaces for first, stop in space.group_blocks(groups)]
        return [torch.stack([part.sum(dtype=torch.float64) for part in parts])]

    def hear(self, step: int, numbers: Sequence[float], beta2s: Sequence[float]) -> None:
        debias = [1 - beta2**step for beta2 in beta2s]
        self._see(step, [sum(v / debias[i % len(beta2s)] for i, v in enumerate(numbers))])

    def _compare(self, now: Sequence[float], before: Sequence[float]) -> float | None:
        return now[0] / before[0] if before[0] > 0 else None

    def _settled(self, ratio: float) -> bool:
        return ratio > 0 and min(ratio, 1 / ratio) >= self.threshold


class CoefficientRule(FreezeRule):
    """1-bit LAMB's: the share of elements whose parameter's averaged coefficient is stable. Looked at 16 times a
    window, which is what has to be remembered."""

    share = 0.95

    def __init__(
        self,
        freeze_step: int | Literal["auto"],
        threshold: float,
        window: int,
        coeff_beta: float,
        first: int,
        numels: Sequence[int],
    ) -> None:
        """`first`: the steps that were taken before coefficients began to be averaged."""
        super().__init__(freeze_step, threshold, window, lags=16)
        self._coeff_beta, self._first, self._numels = coeff_beta, first, list(numels)
        self.what = f"the share of elements with stable coefficients (stage 2 begins at {self.share:g})"

    def measure(self, spaces: Sequence[Space], groups: int) -> list[Tensor]:
        """The averaged coefficient of every parameter."""
        self._numels = [n for space in spaces for n in space.numels]
        return [cast("LambSpace", space).lamb.average.double() for space in spaces]

    def hear(self, step: int, numbers: Sequence[float], beta2s: Sequence[float]) -> None:
        debias = 1 - self._coeff_beta ** (step - self._first)
        self._see(step, [c / debias for c in numbers])

    def _compare(self, now: Sequence[float], before: Sequence[float]) -> float | None:
        if len(now) != len(before) or len(now) != len(self._numels):
            return None  # parameters were added
        most = 1 - self.threshold
        stable = sum(n for n, a, b in zip(self._numels, now, before, strict=True) if abs(a - b) < most * b)
        return stable / sum(self._numels) if sum(self._numels) else None

    def _settled(self, ratio: float) -> bool:
        return ratio >= self.share


def tell_of_freeze(step: int, without: Sequence[tuple[str, int, int]], dead: Dead) -> None:
    """`without`: of each parameter with coordinates that had no variance its name, their number, and its size."""
    logger.info("Stage 2 begins after step %d: 1 bit an element from here on", step)
    if without:
        listed = ", ".join(f"{name} ({count} of {numel})" for name, count, numel in without[:8])
        more = f" and {len(without) - 8} more" if len(without) > 8 else ""
        still = [name for name, count, numel in without if count == numel or dead == "freeze"]
        what = "they use the mean variance of their parameter's other coordinates"
        if len(still) == len(without):
            what = "they will not move any more"
        elif still:
            what += f"; where there are none ({', '.join(still[:8])}), they will not move"
        warn(f"coordinates without a variance at the freeze: {listed}{more}; {what}")

"""The norm that clipping goes by: that of the mean gradient, also in steps in which no rank has the mean.

Adam clips by |mean g|. In a compressed step a rank has its own g_i, which is longer by the noise that the mean cancels:

    |mean g|^2 = L (1 - s (1 - 1/N)),   L = mean over N senders of |g_i|^2,   s the share of noise in L, from 0 to 1

Clipped by L alone, steps would be shorter than Adam's, and the variance, which full steps update, would not tell.
s is measured where full steps and compressed ones are near each other, with F = |mean g|^2 of full steps:

    s = (1 - F / L) / (1 - 1/N)

In the first COMPRESSED compressed steps F is a running mean of the last full steps, and L that of the steps since the
freeze; in a full step later on s comes half way to what F, and the running mean of the last L, say. Without a full step
that was clipped s is 0: L is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COMPRESSED = 8  # steps that L is a mean of
OF_FULL = 0.3  # of the newest full step in F
OF_SHARE = 0.5  # of the newest measurement in s


class MeanNorm:
    """What clipped steps have shown, the same on all ranks. On a GPU the host reads nothing."""

    def __init__(self, device: torch.device, numbers: Sequence[float] = (0.0,) * 4) -> None:
        self.numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        """F, 0 where no full step was clipped; L; the number of compressed steps; s."""

    def put(self, numbers: Sequence[float]) -> None:
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    def full_step(self, squares: Tensor, flags: Tensor, senders: int) -> None:
        """squares: |mean g|^2, fp64 [1]. flags: int32 [1], not 0 where the step is not taken."""
        if senders == 1:
            return
        full, local, steps, share = self.numbers.split(1)
        now = torch.where(steps > 0, share.lerp(_share(squares, local, senders), OF_SHARE), share)
        full = torch.where(full > 0, full.lerp(squares, OF_FULL), squares)
        self._write(squares, flags, [full, local, steps, now])

    def compressed_step(self, squares: Tensor, flags: Tensor, senders: int) -> None:
        """squares: mean |g_i|^2, fp64 [1]. flags: as in `full_step`."""
        if senders == 1:
            return
        full, local, steps, share = self.numbers.split(1)
        steps = steps + 1
        local = local + (squares - local) / steps.clamp(max=COMPRESSED)
        measured = (steps <= COMPRESSED) & (full > 0)
        share = torch.where(measured, _share(full, local, senders), share)
        self._write(squares, flags, [full, local, steps, share])

    def of_mean(self, squares: Tensor, senders: int) -> Tensor:
        """|mean g|^2, fp64 [1], by mean |g_i|^2."""
        return squares * (1 - self.numbers[3:] * (1 - 1 / senders))

    def _write(self, squares: Tensor, flags: Tensor, numbers: Sequence[Tensor]) -> None:
        """Where a step is taken. Gradients that are all 0 tell nothing."""
        tells = (flags == 0) & squares.isfinite() & (squares > 0)
        self.numbers.copy_(torch.where(tells, torch.cat(list(numbers)), self.numbers))


def _share(full: Tensor, local: Tensor, senders: int) -> Tensor:
    return ((1 - full / local) / (1 - 1 / senders)).clamp(0, 1)

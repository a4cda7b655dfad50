"""The norm that clipping goes by: that of the mean gradient, also in steps in which no rank has the mean.

Adam clips by |mean g|. In a compressed step a rank has its own g_i, which is longer by the noise that the mean cancels:

    |mean g|^2 = L (1 - s (1 - 1/N)),   L = mean over N senders of |g_i|^2,   s the share of noise in L, from 0 to 1

Clipped by L alone, steps would be shorter than Adam's, and the variance, which full steps update, would not tell.
Where full steps and compressed ones are near each other, s is measured by F = |mean g|^2 of full steps:

    s(F, L) = (1 - F / L) / (1 - 1/N)

s is the mean of s(F, L) over the first STEPS compressed steps, with F a running mean of the full steps before. With a
later full step s comes half way to s(F, L), with L a running mean of the compressed steps before. A step counts when it
has ended. Without a full step that was clipped s is 0: L is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS = 8
OF_FULL = 0.3  # what the newest full step counts in F
OF_SHARE = 0.5  # what the newest measurement counts in s
MOST = 4.0  # times F or L, a step counts in it; a compressed step with more than 4 N times F counts nowhere
ANEW = (0.0, 0.0, 0.0, 0.0)


class MeanNorm:
    """What clipped steps have shown, the same on all ranks. On a GPU the host reads nothing."""

    def __init__(self, device: torch.device, numbers: Sequence[float] = ANEW) -> None:
        self.numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        """F, 0 where it is not known; L; the number of compressed steps; s."""

    def put(self, numbers: Sequence[float]) -> None:
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    def full_step(self, squares: Tensor, flags: Tensor, senders: int) -> None:
        """squares: |mean g|^2, fp64 [1]. flags: int32 [1], not 0 where the step was not taken."""
        if senders == 1:
            return
        squares = squares.float().double()  # each rank has added them up, in an order of its own
        full, local, steps, share = self.numbers.split(1)
        share = torch.where(steps > 0, share.lerp(_share(squares, local, senders), OF_SHARE), share)
        self._write(squares, flags, [_mean(full, squares, OF_FULL), local, steps, share])

    def compressed_step(self, squares: Tensor, flags: Tensor, senders: int) -> None:
        """squares: mean |g_i|^2, fp64 [1]. flags: as in `full_step`."""
        if senders == 1:
            return
        full, local, steps, share = self.numbers.split(1)
        steps = steps + 1
        measured = share + (_share(full, squares, senders) - share) / steps
        share = torch.where((steps <= STEPS) & (full > 0), measured, share)
        one_of_many = (full == 0) | (squares <= MOST * senders * full)  # noise makes L at most N times F
        self._write(squares, flags + ~one_of_many, [full, _mean(local, squares, 1 / STEPS), steps, share])

    def of_mean(self, squares: Tensor, senders: int) -> Tensor:
        """|mean g|^2, fp64 [1], by mean |g_i|^2."""
        return squares * (1 - self.numbers[3:] * (1 - 1 / senders))

    def _write(self, squares: Tensor, flags: Tensor, numbers: Sequence[Tensor]) -> None:
        """Write numbers if the step was taken. Gradients that are all 0 tell nothing."""
        tells = (flags == 0) & squares.isfinite() & (squares > 0)
        self.numbers.copy_(torch.where(tells, torch.cat(list(numbers)), self.numbers))


def _share(full: Tensor, local: Tensor, senders: int) -> Tensor:
    return ((1 - full / local) / (1 - 1 / senders)).clamp(0, 1)


def _mean(before: Tensor, newest: Tensor, weight: float) -> Tensor:
    """A running mean, in which one step that is far from the others counts little."""
    return torch.where(before > 0, before.lerp(torch.minimum(newest, MOST * before), weight), newest)

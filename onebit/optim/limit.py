"""How far a step moves a parameter whose variance does not see that gradients have grown.

    u = mhat d,   f_p = min(1, limit / RMS(u over parameter p)),   x = x - lr (f_p u + wd x)
    RMS(u)^2 = sum over blocks of s_b^2 D_b / n_p,   D_b = sum of d^2 over block b

Update clipping, as in Adafactor (Shazeer and Stern 2018, section 5). Adam's own steps have RMS(u) near 1 or below,
however large gradients are; with a frozen variance they grow as gradients do. s_b is the size of m in block b as
messages have it: their scale, its mean where m is the mean of several messages, the larger one of two. So no pass over
memory is needed, and f_p is the same bit for bit on all ranks. What f_p takes from a step is not made up for later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onebit.kernels.data.layout import WORD, Block
from onebit.kernels.data.rotation import elements_mixed
from onebit.kernels.data.wire import HEADER_WORDS, Messages
from onebit.optim.flat_state import FlatState

AUTO = 1.0
"""RMS(u) of update_limit="auto": Adafactor's, and at or above what Adam's full-precision steps have."""


class UpdateLimit:
    """Of one flat state in stage 2, whose momentum `replies` are."""

    def __init__(
        self, state: FlatState, replies: Messages, limit: float, sum_squares_of_d: Callable[[Tensor], Tensor]
    ) -> None:
        """sum_squares_of_d: D, fp32 [blocks], with the numbers of the param groups as they are now."""
        self.state, self._replies, self._limit = state, replies, limit
        self._sum_squares_of_d = sum_squares_of_d
        self._d: Tensor | None = None
        form, rows = replies.format, state.layout.table(state.device).blocks.long()
        row, place = rows[:, Block._fields.index("shard")] * replies.copies, rows[:, Block._fields.index("place")]
        place = place * form.bits if form.bits == 2 or form.scale == "block" else torch.zeros_like(place)
        words = replies.buffer.shape[1] // 4
        self._places = [
            torch.stack([(row + i) * words + HEADER_WORDS + place + k for k in range(form.bits)])
            for i in range(replies.copies)
        ]
        lengths = (rows[:, Block._fields.index("words")] * WORD).tolist()
        mixed = [elements_mixed(n) if form.rotated else 1 for n in lengths]
        self._size_of_scale = torch.tensor(mixed, dtype=torch.float64, device=state.device).sqrt()
        numels = torch.tensor(state.whole_numels, dtype=torch.float64, device=state.device)
        self._numels, self._share_of = numels.clamp(min=1), numels / numels.sum().clamp(min=1)
        self.share = torch.zeros(1, dtype=torch.float64, device=state.device)
        """Of the elements, that of parameters whose last step was made shorter."""

    def forget_d(self) -> None:
        """The variance has changed."""
        self._d = None

    def of_messages(self, hyper: Tensor, weight: Tensor | None = None) -> Tensor:
        """f of a step by m times weight, fp32 [parameters]: by m itself where there is none."""
        if self._d is None:
            self._d = self._sum_squares_of_d(hyper)
        scales, size = self._replies.buffer.view(-1).view(torch.float32), torch.zeros_like(self._size_of_scale)
        for place in self._places:  # one after the other: the sum has one order on every machine
            size += scales[place].amax(0)
        size *= self._size_of_scale / len(self._places)
        squares = self.state.of_parameters(size.square() * self._d)
        return self._of(squares if weight is None else squares * weight.double().square())

    def of_squares(self, squares: Tensor) -> Tensor:
        """f by sums of u^2, fp32 [blocks]."""
        return self._of(self.state.of_parameters(squares))

    def _of(self, squares: Tensor) -> Tensor:
        """squares: the sum of u^2 over this rank's part of every parameter, fp64."""
        mean = self.state.add_parts(squares) / self._numels
        found = (self._limit / mean.sqrt()).clamp(max=1.0)
        torch.sum(self._share_of * (found < 1), 0, keepdim=True, out=self.share)
        return found.float()

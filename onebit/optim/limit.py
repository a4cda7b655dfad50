"""How far a step moves a parameter whose variance does not see that gradients have grown.

    u = mhat d,   f_p = min(1, limit_p / RMS(u over parameter p)),   x = x - lr (f_p u + wd x)
    RMS(u)^2 = sum over blocks of s_b^2 D_b / n_p,   D_b = sum of d^2 over block b
    limit_p = max(1, 3 R_p),   R_p = the least RMS(u) of those steps that came first after p's variance was updated

Update clipping, as in Adafactor (Shazeer and Stern 2018, section 5). Adam's own steps have RMS(u) near 1 or below,
however large gradients are; with a variance that stays as it is they grow as gradients do. Steps by 1-bit messages may
be longer where the variances of a block differ, as those of an embedding's rows do: R_p is what is usual for p.

s_b is the size of m in block b as messages have it: their scale, its mean where m is the mean of several messages. So
no pass over memory is needed, and f_p is the same bit for bit on all ranks. What f_p takes from a step is not made up
for later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onebit.kernels.data.layout import Block
from onebit.kernels.data.wire import HEADER_WORDS, Messages
from onebit.optim.fields import Field
from onebit.optim.flat_state import FlatState

LEAST = 1.0  # limit_p, at least
TIMES = 3.0  # R_p
MOST_SQUARES = 2.0**100  # of d: without eps it may be beyond what fp32 holds
USUAL = Field("usual_step", per="parameter", required=False, always=False)
"""R_p; 0 until it is known, and negative between an update of the variance and the next step by m."""


class UpdateLimit:
    """Of one flat state in stage 2, whose momentum `replies` are."""

    def __init__(
        self, state: FlatState, replies: Messages, limit: float | None, sum_squares_of_d: Callable[[Tensor], Tensor]
    ) -> None:
        """limit: of all parameters, or None for limit_p. sum_squares_of_d: D, fp32 [blocks], with the numbers of the
        param groups as they are now."""
        self.state, self._replies, self._limit = state, replies, limit
        self._sum_squares_of_d = sum_squares_of_d
        self._d: Tensor | None = None
        form, rows = replies.format, state.layout.table(state.device).blocks.long()
        row, place = rows[:, Block._fields.index("shard")] * replies.copies, rows[:, Block._fields.index("place")]
        if form.scale == "tensor":
            place = torch.zeros_like(place)
        words = replies.buffer.shape[1] // 4
        narrow = torch.int32 if replies.buffer.numel() // 4 < 2**31 else torch.int64
        self._places = [((row + i) * words + HEADER_WORDS + place).to(narrow) for i in range(replies.copies)]
        self._numels = torch.tensor(state.whole_numels, dtype=torch.int64, device=state.device)
        self.elements = sum(state.whole_numels)
        self.shortened = torch.zeros(1, dtype=torch.int64, device=state.device)
        """Elements of the parameters whose last step was made shorter."""
        if USUAL.name not in state:
            state.add(USUAL)

    def variance_was_updated(self, flags: Tensor) -> None:
        """By a full-precision step, where flags is 0."""
        usual = self.state[USUAL.name]
        usual.copy_(torch.where(flags == 0, -usual.abs(), usual))
        self._d = None

    def of_messages(self, hyper: Tensor, weight: Tensor | None = None) -> Tensor:
        """f of a step by m times weight, fp32 [parameters]: by m itself where there is none."""
        if self._d is None:
            self._d = self._sum_squares_of_d(hyper).clamp(max=MOST_SQUARES)
        scales, size = self._replies.buffer.view(-1).view(torch.float32), torch.zeros_like(self._d, dtype=torch.float64)
        for places in self._places:  # one after the other: the sum has one order on every machine
            size += scales.index_select(0, places)
        size /= len(self._places)
        squares = self.state.of_parameters(size.square() * self._d)
        rms = self._rms(squares if weight is None else squares * weight.double().square())
        now, usual = rms.float(), self.state[USUAL.name]
        least = torch.where(usual == 0, now, torch.where((usual < 0) & (now > 0), torch.minimum(-usual, now), usual))
        usual.copy_(torch.where(self._replies.flags.amax() == 0, least, usual))
        return self._factor(rms)

    def of_squares(self, squares: Tensor) -> Tensor:
        """f by sums of u^2, fp32 [blocks]."""
        return self._factor(self._rms(self.state.of_parameters(squares)))

    def _rms(self, squares: Tensor) -> Tensor:
        """squares: the sum of u^2 over this rank's part of every parameter, fp64."""
        return (self.state.add_parts(squares) / self._numels.clamp(min=1)).sqrt()

    def _factor(self, rms: Tensor) -> Tensor:
        limit = self._limit
        most = (TIMES * self.state[USUAL.name].abs()).clamp(min=LEAST) if limit is None else limit
        found = torch.where(rms <= most, 1.0, most / rms)
        self.shortened.copy_((self._numels * (found < 1)).sum())
        return found.float()

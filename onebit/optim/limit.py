"""How far a step moves a parameter whose variance does not see that gradients have grown.

    u = mhat d,   x = x - lr (f_p u + wd x),   f_p = limit_p / RMS(u over parameter p) where RMS(u) > trusted_p, else 1
    RMS(u)^2 = sum over blocks of s_b^2 D_b / n_p,   D_b = sum of d^2 over block b
    limit_p = max(1/4, k R_p),   trusted_p = max(limit_p, t R_p)
    R_p = the least RMS(u) of those steps that came first after p's variance was updated

Update clipping, as in Adafactor (Shazeer and Stern 2018, section 5). Adam's own steps have RMS(u) near 1 or below,
however large gradients are; with a variance that stays as it is they grow as gradients do. Steps by 1-bit messages may
be longer where the variances of a block differ, as those of an embedding's rows do: R_p is what is usual for p. Where
gradients are noise Adam's own steps have RMS(u) = sqrt((1 - beta1) / (1 + beta1)), 0.23 with beta1 = 0.9: a parameter
that hardly moved when R_p was taken may still move so far. k is 2, and t is 0: trusted_p is limit_p.

Of steps that are farther apart more cancels: the first sync at each greater distance counts in R_p, too. It takes
sqrt(2) off at most, as noise does over a way twice as long, so that a pause, of steps that were skipped or had no
gradients, makes later steps little shorter. Other syncs don't count.

1-bit LAMB bounds r m d, all that its average coefficient multiplies. Its k is 1.5: LAMB's own steps are equally long.
r m d grows by itself, slowly, mostly to 3 R_p at most, and helps where steps could have been longer: so t is 4.
Gradients that grow thirty times make steps of more at once.

s_b is the size of m in block b as messages have it: their scale, its mean where m is the mean of several messages. So
no pass over memory is needed, and f_p is the same bit for bit on all ranks. A local step is measured by a pass of its
own, and each rank has its own f_p. What f_p takes from a step is not made up for later.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from onebit.kernels.data.wire import Messages
from onebit.kernels.passes import StepLimit
from onebit.optim.fields import Field
from onebit.optim.flat_state import FlatState

LEAST = 0.25  # some more than Adam's own step where gradients are noise
MOST_SQUARES = 2.0**100  # of d: without eps it may be beyond what fp32 holds
USUAL = Field("usual_step", per="parameter", required=False, always=False)
"""R_p; 0 until it is known, and negative between an update of the variance and the next step by an m that is not 0."""


class UpdateLimit:
    """The limit of one flat state's steps in stage 2, whose momentum `replies` are."""

    def __init__(
        self,
        state: FlatState,
        replies: Messages,
        least: float,
        times: float,
        trusted: float,
        sum_squares_of_d: Callable[[Tensor], Tensor],
    ) -> None:
        """limit_p is max(least, times R_p), and trusted_p is max(limit_p, trusted R_p). sum_squares_of_d: D, fp32
        [blocks], with the numbers of the param groups as they are now."""
        self.state, self._replies = state, replies
        bounds = torch.tensor([least, times, trusted], dtype=torch.float32, device="cpu")
        self._least, self._times, self._trusted = bounds.tolist()
        self._sum_squares_of_d = sum_squares_of_d
        self._d: Tensor | None = None
        self._numels = torch.tensor(state.whole_numels, dtype=torch.int64, device=state.device)
        self.elements = sum(state.whole_numels)
        self.shortened = torch.zeros(1, dtype=torch.int64, device=state.device)
        """Elements of the parameters whose last step was made shorter."""
        if USUAL.name not in state:
            state.add(USUAL)

    def variance_was_updated(self, flags: Tensor) -> None:
        """Note that a full-precision step has updated the variance, if flags is 0."""
        usual = self.state[USUAL.name]
        usual.copy_(torch.where(flags == 0, -usual.abs(), usual))
        self._d = None

    def of_messages(self, hyper: Tensor, weight: Tensor | None = None) -> Tensor:
        """f of a step by m times weight, fp32 [parameters]: by m itself where there is none."""
        squares = self.state.of_parameters(self._squares_of_d(hyper), self._replies, weight)
        return self._factor(squares, self._replies)

    def of_sync(self, hyper: Tensor, weight: Tensor, farther: bool) -> Tensor:
        """f of a sync, by m times weight. farther: from the one before than any sync was until now."""
        if not farther:
            return self.of_messages(hyper, weight)
        usual = self.state[USUAL.name]
        before = usual.abs()
        usual.copy_(-before)
        factor = self.of_messages(hyper, weight)
        usual.copy_(torch.maximum(usual, before / math.sqrt(2)))
        return factor

    def of_squares(self, squares: Tensor) -> Tensor:
        """f by sums of u^2, fp32 [blocks]."""
        return self._factor(self.state.of_parameters(squares))

    def _squares_of_d(self, hyper: Tensor) -> Tensor:
        if self._d is None:
            self._d = self._sum_squares_of_d(hyper).clamp(max=MOST_SQUARES)
        return self._d

    def _factor(self, squares: Tensor, replies: Messages | None = None) -> Tensor:
        """f by the sum of u^2 over this rank's part of every parameter. replies: by which R_p may be another now."""
        state, factor = self.state, torch.empty(len(squares), dtype=torch.float32, device=squares.device)
        state.backend.run(StepLimit(
            state.layout.all(), state.add_parts(squares), self._numels, replies, state[USUAL.name], self._least,
            self._times, self._trusted, factor, self.shortened,
        ))  # fmt: skip
        return factor

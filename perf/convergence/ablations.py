"""What the papers compare with, on the library's own pieces. Not for use: each leaves out what makes 1 bit work.

LambBasic1Bit    LAMB, then 1-bit momentum with variance and coefficients frozen (Li et al. 2021, section 3.4)
FrozenAdam       1-bit Adam's freeze without its compression ("1-bit Adam (32 bits)", Tang et al. 2021, section 7.1)
NaiveAdam        Adam on gradients that are averaged with 1 bit; the variance goes on (Tang et al. 2021, section 3)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from onebit import OneBitAdam, OneBitLamb
from onebit.collectives import CompressedAllReduce
from onebit.collectives.averaging import average_
from onebit.collectives.transport import transport_for
from onebit.optim import param_groups as parameters
from onebit.optim.flat_state import Space
from onebit.optim.lamb_state import LambSpace


class LambBasic1Bit(OneBitLamb):
    """x = x - lr c_avg (m d + wd x): no fresh variance, no ratio."""

    def _compressed(self, space: Space, hyper: Tensor, flags: Tensor) -> None:
        replies = space.all_reduce_momentum(hyper, flags)
        c_avg = cast(LambSpace, space).lamb.average
        space.backend.adam_update(space.layout.all(), space.points, space.d, replies, space.master, hyper, c_avg)


class FrozenAdam(OneBitAdam):
    """m = b1 m + (1-b1) mean g;  x = x - lr (m d + wd x), all of it in 32 bits. The residual's place holds b1 m."""

    def _compressed(self, space: Space, hyper: Tensor, flags: Tensor) -> None:
        if int(flags):
            return
        kept = [space.views(i) for i in range(len(space.params))]
        by_group = parameters.rows(self.param_groups, 1, self._options.bias_correction)
        rows = [by_group[g] for g in space.groups]
        factor = float(hyper[0, -1])
        for p, views, h in zip(space.params, kept, rows, strict=True):
            if p.grad is not None:
                views["residual"].add_(p.grad.float(), alpha=factor * h.one_minus_beta1)
        average_([views["residual"] for views in kept], self._transport)
        for p, views, h in zip(space.params, kept, rows, strict=True):
            x, m = views.get("master", p.detach()), views["residual"]
            x.sub_(m * views["denominator"] + h.weight_decay * x, alpha=h.lr)
            p.detach().copy_(x)
            m.mul_(h.beta1)


class NaiveAdam(torch.optim.AdamW):
    """AdamW; from step `warmup` + 1 on its gradients are averaged with 1 bit an element, with error feedback or not."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        warmup: int = 0,
        feedback: bool = True,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self.warmup, self.feedback, self.steps_done = warmup, feedback, 0
        self._transport = transport_for(process_group)
        self._held = [p for group in self.param_groups for p in group["params"]]
        self.all_reduce = CompressedAllReduce(
            [p.numel() for p in self._held], device=self._held[0].device, chunks=1, process_group=process_group
        )

    @property
    def wire_bytes(self) -> int:
        return self.all_reduce.wire_bytes

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._held]
        if self.steps_done < self.warmup:
            average_(grads, self._transport)
        else:
            self.all_reduce(grads)
            if not self.feedback:
                self._forget()
        for p, g in zip(self._held, grads, strict=True):
            p.grad = g
        self.steps_done += 1
        super().step()

    def _forget(self) -> None:
        exchange = self.all_reduce.exchange
        for residual in (exchange.residual, exchange.server_residual):
            residual.value.zero_()

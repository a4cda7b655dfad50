"""What 1-bit LAMB keeps, beyond 1-bit Adam's: a fresh variance and, a parameter, coefficients and ratios.

    stage 1    exp_avg, exp_avg_sq; c_avg a parameter                          8 B an element
    stage 2    residual, d, v, m, m_prev, E; c_avg, r, gamma a parameter       4 + 4 + 4 + 1/8 + 1/8 + 4/N B

v_T comes back from d, so that it is not kept. m_prev is a copy of the last message, made before the next one comes.
Only the first compressed step needs an m_prev that no message holds: exp_avg is kept until that step was taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.wire import Messages
from onebit.optim.flat_state import Space, floored_, freeze_variance_, packed


class LambSpace(Space):
    """`_second` stays the variance, corrected at the freeze and fresh from there on; d has a buffer of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lamb = LambState.initial(self.layout, self.device)
        self.counted: Tensor | None = None  # uint8 [elements / 8]: where v_T was not 0, if it was anywhere
        self._d: Tensor | None = None
        self._dense: Tensor | None = None
        self._previous: Messages | None = None

    @property
    def d(self) -> Tensor:
        assert self._d is not None
        return self._d[: self.layout.elements]

    @property
    def dense_momentum(self) -> Tensor | None:
        """m at the freeze, scaled as messages are, until a compressed step was taken: fp32 [elements]."""
        return None if self._dense is None else self._dense[: self.layout.elements]

    def variance(self) -> Tensor:
        return self.exp_avg_sq

    def previous(self) -> Tensor | Messages:
        """m of the last step, where the exchange has left it alone."""
        assert self._previous is not None
        return self._previous if self._dense is None else self._dense[: self.layout.elements]

    def remember(self) -> None:
        assert self.exchange is not None and self._previous is not None
        if self._dense is None:
            self._previous.buffer.copy_(self.exchange.replies.buffer)

    def forget_dense_momentum(self) -> None:
        self._dense = None

    def views(self, index: int) -> dict[str, Tensor]:
        if self.exchange is None:
            return super().views(index)
        found = super().views(index)
        return found | {"exp_avg_sq": found["denominator"], "denominator": self.view(self.d, index)}

    def together(self) -> dict[str, Tensor]:
        lamb, more = self.lamb, {"the counted coordinates": self.counted, "gamma": self.gamma}
        numbers = {"coefficients": lamb.coefficient, "averaged coefficients": lamb.average, "ratios": lamb.ratio}
        return {**super().together(), **numbers, **{k: v for k, v in more.items() if v is not None}}

    def take(self, index: int, other: Space, index_there: int) -> None:
        super().take(index, other, index_there)
        assert isinstance(other, LambSpace)
        for here, there in ((self.lamb.average, other.lamb.average), (self.lamb.coefficient, other.lamb.coefficient)):
            here[index] = there[index_there]

    def freeze(self, rows: Sequence[Hyper]) -> dict[int, int]:
        chunks, m = self.choose_chunks(), self._first
        self.gamma = self._momentum_scaling() if self.options.scale == "tensor" else None
        self._d = self._zeros()
        counted = torch.zeros(self._room, dtype=torch.bool, device=self.device)
        without = {}
        for i, group in enumerate(self.groups):
            v, d, h = self.view(self._second, i), self.view(self._d, i), rows[group]
            floored_(v.mul_(h.bias2**2), self.options.variance_floor)
            self.view(counted, i).copy_(v != 0)
            without[i] = freeze_variance_(d.copy_(v), h._replace(bias2=1.0), self.options.dead)
            if self.gamma is not None:
                d.div_(self.gamma[i])
                self.view(m, i).mul_(self.gamma[i])
        self._dense = m.clone()
        for i, group in enumerate(self.groups):
            self.view(m, i).mul_(rows[group].beta1)
        self.begin_exchange(chunks)
        if any(without.values()):
            self.counted = packed(counted[: self.layout.elements])
        return {i: count for i, count in without.items() if count}

    def begin_exchange(self, chunks: int) -> None:
        if self._d is None:
            self._d = self._zeros()
        super().begin_exchange(chunks)
        assert self.exchange is not None
        blocks = torch.zeros((2, self.layout.blocks), dtype=torch.float32, device=self.device)
        self.lamb = replace(self.lamb, partial=blocks)
        self._previous = self.exchange.format.empty(self.exchange.replies.rows, self.device)

    def fold_momentum(self, index: int, m: Tensor, beta1: float) -> None:
        super().fold_momentum(index, m, beta1)
        if self._dense is None:
            self._dense = self._zeros()
        self.view(self._dense, index).copy_(m)

    def save(self) -> dict[str, list[Tensor]]:
        """What is saved of each parameter, beyond views and messages."""
        saved = {"coefficient_average": list(self.lamb.average), "ratio": list(self.lamb.ratio)}
        everything = range(len(self.params))
        if self.gamma is not None:
            saved["gamma"] = list(self.gamma)
        if self._dense is not None:
            saved["first_momentum"] = [self.view(self._dense, i) for i in everything]
        if self.counted is not None:
            saved["counted_bits"] = [self.counted[self._bytes(i)] for i in everything]
        return saved

    def load(self, index: int, saved: Mapping[str, Any]) -> None:
        for name, own in (("coefficient_average", self.lamb.average), ("ratio", self.lamb.ratio)):
            if name in saved:
                own[index] = saved[name]
        if self.exchange is None:
            return
        if "gamma" in saved:
            if self.gamma is None:
                self.gamma = torch.ones(self.layout.parameters, dtype=torch.float32, device=self.device)
            self.gamma[index] = saved["gamma"]
        if "first_momentum" in saved:
            self._dense = self._zeros() if self._dense is None else self._dense
            self.view(self._dense, index).copy_(saved["first_momentum"])
        if "counted_bits" in saved:
            if self.counted is None:
                self.counted = torch.zeros(self.layout.elements // 8, dtype=torch.uint8, device=self.device)
            self.counted[self._bytes(index)] = saved["counted_bits"].to(self.device)

    def _bytes(self, index: int) -> slice:
        """Where a parameter's bits lie among packed ones: a block begins with a byte."""
        start = int(self.layout.first[index]) * self.layout.block_size // 8
        return slice(start, start + -(-self.numels[index] // 8))

    def _momentum_scaling(self) -> Tensor:
        """gamma_p = (mean over parameters of rms(m)) / rms(m_p), 1 where rms is 0."""
        parts = [self.view(self._first, i) for i in range(len(self.params))]
        norms = torch.stack([torch.linalg.vector_norm(m, dtype=torch.float64) for m in parts])
        rms = norms / torch.tensor(self.numels, dtype=torch.float64, device=self.device).clamp(min=1).sqrt()
        return torch.where(rms > 0, rms.mean() / rms, 1.0).float()

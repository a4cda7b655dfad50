"""Local SGD as DiLoCo has it (Douillard et al. 2023): AdamW on every rank, now and then a step by what all have moved.

inner    x_i = AdamW(x_i, g_i)                          every step, nothing on the wire
outer    d = mean(x - x_i);  v = mu v + d;  x = x - outer_lr (d + mu v);  x_i = x     every `every` steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from onebit.collectives.averaging import average_
from onebit.collectives.transport.protocol import Transport


class LocalSGD(torch.optim.AdamW):
    """AdamW on every rank, with an outer step after every so many."""

    def __init__(self, params: Any, every: int, **inner: Any) -> None:
        super().__init__(params, **inner)
        self.every, self.taken, self.synchronized = every, 0, True

    @property
    def kind(self) -> str:
        """The kind of the coming step."""
        return "local" if (self.taken + 1) % self.every else "sync"

    def synchronize(self) -> None:
        """The outer step, unless nobody has taken a step since the last."""
        raise NotImplementedError

    def at_last_sync(self) -> AbstractContextManager[None]:
        """Put the model meanwhile to what all ranks had at the last sync."""
        raise NotImplementedError


class DiLoCo(LocalSGD):
    """Outer numbers are the paper's: Nesterov momentum 0.9, a rate of 0.7."""

    def __init__(
        self, params: Any, transport: Transport, every: int = 16, outer_lr: float = 0.7, mu: float = 0.9, **inner: Any
    ) -> None:
        super().__init__(params, every, **inner)
        self._transport, self._outer_lr, self._mu = transport, outer_lr, mu
        self._params: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self._last = [p.detach().clone() for p in self._params]
        self._velocity = [torch.zeros_like(p) for p in self._last]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)  # type: ignore[arg-type]
        self.taken, self.synchronized = self.taken + 1, False
        if self.taken % self.every == 0:
            self.synchronize()
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        if self.synchronized:
            return
        moved = torch._foreach_sub(self._last, self._params)
        average_(list(moved), self._transport)
        torch._foreach_mul_(self._velocity, self._mu)
        torch._foreach_add_(self._velocity, moved)
        torch._foreach_add_(self._last, moved, alpha=-self._outer_lr)
        torch._foreach_add_(self._last, self._velocity, alpha=-self._outer_lr * self._mu)
        torch._foreach_copy_(self._params, self._last)
        self.synchronized = True

    @contextmanager
    def at_last_sync(self) -> Iterator[None]:
        own = [p.detach().clone() for p in self._params]
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._last)
            try:
                yield
            finally:
                torch._foreach_copy_(self._params, own)

"""The tensors of a case on a backend, and a method for each pass."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from tests import oracle
from tests.kernels.cases import (
    STEP,
    Chunk,
    Inputs,
    assert_all_close,
    assert_guards,
    frozen_bits,
    numpy,
    stored,
)

COEFFICIENTS = {"coeff_beta": 0.9, "min_coeff": 0.01, "max_coeff": 0.3}
FACTORS = {"factor_min": 0.5, "factor_max": 4.0, "factor_threshold": 0.1}
ELEMENTWISE = 2e-6  # a dozen fp32 roundings, and hyper-parameters in fp32


class World(Inputs):
    """The tensors of one case on a backend, each made when it is first used, and a method a pass, which runs it over
    all chunks or over one."""

    @cached_property
    def params(self) -> Pointers:
        return self.pointers(list(self.x), self.case.param, "parameter")

    @cached_property
    def grads(self) -> Pointers:
        return self.pointers(self.g, self.case.grad, "gradient")

    @cached_property
    def master(self) -> Tensor | None:
        return self.flat(self.x) if self.case.master else None

    @cached_property
    def exp_avg(self) -> Tensor:
        return self.flat(self.m)

    @cached_property
    def exp_avg_sq(self) -> Tensor:
        return self.flat(self.v)

    @cached_property
    def anchor(self) -> Tensor:
        return self.flat(self.anchor64)

    @cached_property
    def d(self) -> Tensor:
        return self.flat(self.d64)

    @cached_property
    def replies(self) -> Messages:
        return self.all_messages()

    @cached_property
    def momentum(self) -> Tensor | Messages | None:
        """As the case has it, before the last replies."""
        if self.case.momentum == "packed":
            return self.all_messages(5)
        return self.flat(self.m) if self.case.momentum == "dense" else None

    @cached_property
    def residuals(self) -> list[Residual | None]:
        return [self.residual(c.span, c.rows.start, self.form) for c in self.chunks()]

    @cached_property
    def sent(self) -> Messages:
        return self.fresh(self.rows)

    @cached_property
    def squares(self) -> Tensor:
        return torch.full((self.layout.blocks,), float("nan"), device=self.device)

    @cached_property
    def sums(self) -> Tensor:
        return torch.full_like(self.squares, float("nan"))

    @cached_property
    def counts(self) -> Tensor:
        return torch.full_like(self.squares, float("nan"))

    @cached_property
    def written_live(self) -> Tensor:
        return torch.full((self.elements // 8,), 0xA5, dtype=torch.uint8, device=self.device)

    @cached_property
    def flag(self) -> Tensor:
        return self.flags()

    @cached_property
    def state(self) -> LambState:
        state, rng = LambState.initial(self.layout, self.device), np.random.default_rng(3)
        state.partial.fill_(float("nan"))
        state.average.copy_(torch.from_numpy(rng.uniform(0.01, 0.3, len(self.x))))
        state.ratio.copy_(torch.from_numpy(rng.uniform(0.9, 1.1, len(self.x))))
        return state

    @cached_property
    def roots(self) -> tuple[Tensor, Tensor]:
        return self.per_parameter(self.least64), self.per_parameter(self.at_zero64)

    def of_master(self, c: Chunk) -> Tensor | None:
        return None if self.master is None else self.master[c.part]

    def of_replies(self, c: Chunk) -> Messages:
        return self.of_chunk(self.replies, c)

    def of_chunk(self, messages: Messages, c: Chunk) -> Messages:
        copies = messages.copies
        return messages.slice(c.rows.start * copies, self.case.ranks * copies)

    def mask(self, part: slice) -> Tensor | None:
        return self.packed(self.live[part]) if self.masked else None

    def scaling(self) -> Tensor | None:
        return self.per_parameter(self.gamma) if self.masked else None

    def scan(self, chunk: int | None = None) -> None:
        for c in self.chunks(chunk):
            self.passes.scan(c.span, self.grads, self.hyper(), self.flag, self.squares[c.blocks])

    def compress(self, chunk: int | None = None) -> None:
        for c in self.chunks(chunk):
            m = self.momentum
            if m is not None:
                m = self.of_chunk(m, c) if isinstance(m, Messages) else m[c.part]
            self.passes.compress(
                c.span, self.grads, m, self.residuals[c.index], self.hyper(), self.flag,
                self.of_chunk(self.sent, c), live=self.mask(c.part), gamma=self.scaling(),
            )  # fmt: skip

    def received(self, chunk: int, rank: int) -> Messages:
        """What a rank gets for its shard, from each."""
        return self.random_messages([self.layout.shard(chunk, rank)] * self.case.ranks, 1 + rank)

    def average(
        self, chunk: int, rank: int, bits: int = 1, received: Messages | None = None
    ) -> tuple[Messages, Residual]:
        shard, form = self.layout.shard(chunk, rank), self.form.with_bits(2) if bits == 2 else self.form
        residual, out = self.residual(shard, chunk * self.case.ranks + rank, form), self.fresh(1, form)
        mask, received = self.mask(self.plan.shard(chunk, rank)), received or self.received(chunk, rank)
        self.passes.average(shard, received, residual, out, live=mask)
        return out, residual

    def decode(self, chunk: int | None = None) -> None:
        for c in self.chunks(chunk):
            self.passes.decode(c.span, self.of_replies(c), self.params)

    def adam_warmup(self, chunk: int | None = None, **hyper: Any) -> None:
        for c in self.chunks(chunk):
            self.passes.adam_warmup(
                c.span, self.params, self.grads, self.exp_avg[c.part], self.exp_avg_sq[c.part], self.of_master(c),
                self.hyper(**hyper), self.flag, self.sums[c.blocks],
            )  # fmt: skip

    def adam_update(self, chunk: int | None = None) -> None:
        for c in self.chunks(chunk):
            self.passes.adam_update(
                c.span, self.params, self.d[c.part], self.of_replies(c), self.of_master(c), self.hyper()
            )

    def lamb_update(self, chunk: int | None = None) -> None:
        for c in self.chunks(chunk):
            self.passes.adam_update(
                c.span, self.params, self.d[c.part], self.of_replies(c), self.of_master(c), self.hyper(),
                self.per_parameter(self.c64),
            )  # fmt: skip

    def lamb_warmup(self, step: int = STEP) -> None:
        self.passes.lamb_warmup(
            self.layout.all(), self.params, self.grads, self.exp_avg, self.exp_avg_sq, self.master, self.hyper(step),
            self.flag, self.state, **COEFFICIENTS,
        )  # fmt: skip

    def lamb_statistics(self, ratio: str = "variance", **factors: float) -> None:
        previous = self.momentum if isinstance(self.momentum, Messages) else self.exp_avg
        self.passes.lamb_statistics(
            self.layout.all(), self.replies, previous, self.d, self.exp_avg_sq, self.hyper(), self.state,
            **{**FACTORS, **factors}, ratio=ratio, live=self.mask(slice(None)), gamma=self.scaling(),
        )  # fmt: skip

    def zero_one_full(self, chunk: int | None = None) -> None:
        for c in self.chunks(chunk):
            self.passes.zero_one_full(
                c.span, self.params, self.grads, self.exp_avg_sq[c.part], self.of_replies(c), self.residuals[c.index],
                self.of_master(c), self.hyper(), self.flag, *self.roots, self.written_live[c.bits()],
                self.sums[c.blocks], self.counts[c.blocks],
            )  # fmt: skip

    def zero_one_update(self, chunk: int | None = None) -> None:
        for c in self.chunks(chunk):
            self.passes.zero_one_update(
                c.span, self.params, self.exp_avg_sq[c.part], self.of_replies(c), self.of_master(c), self.hyper(),
                *self.roots,
            )  # fmt: skip

    def zero_one_local(self, chunk: int | None = None) -> None:
        for c in self.chunks(chunk):
            self.passes.zero_one_local(
                c.span, self.params, self.grads, self.exp_avg_sq[c.part], self.exp_avg[c.part],
                self.residuals[c.index], self.of_master(c), self.hyper(), self.flag, *self.roots,
            )  # fmt: skip

    def zero_one_sync(self, chunk: int | None = None) -> None:
        for c in self.chunks(chunk):
            self.passes.zero_one_sync(
                c.span, self.params, self.exp_avg_sq[c.part], self.exp_avg[c.part], self.anchor[c.part],
                self.of_replies(c), self.of_master(c), self.hyper(), *self.roots, self.per_parameter(self.decay64),
                self.per_parameter(self.factor64),
            )  # fmt: skip

    def moved(self) -> oracle.Arrays:
        """x: the master copy where there is one."""
        return [numpy(t) for t in self.params.tensors] if self.master is None else self.unpadded(self.master)

    def left_out(self) -> oracle.Arrays:
        """e of the residuals of all chunks."""
        return self.unpadded(torch.cat([residual.left_out() for residual in self.residuals]))

    def everything(self) -> list[bytes]:
        """Every byte of all tensors."""
        return frozen_bits(
            *(getattr(self, name) for name, of in vars(World).items() if isinstance(of, cached_property))
        )

    def check_parameters(self, expected: oracle.Arrays, sizes: oracle.Arrays) -> None:
        """x, and the master copy that x is rounded from, where there is one."""
        assert_guards(self.params)
        found = [numpy(t) for t in self.params.tensors]
        if self.master is None:
            assert_all_close(found, expected, ELEMENTWISE + self.half_place, sizes)
            return
        assert_all_close(self.moved(), expected, ELEMENTWISE, sizes)
        for x, copy in zip(found, self.moved(), strict=True):
            assert x.tolist() == stored(copy, self.case.param, self.name).tolist()

"""Elements past the 2^31st: a model of which only the last blocks are ever touched, and so in memory.

The last two programs of compress and of adam_update run, and the CPU's pass over these blocks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit.kernels import cpu, gpu
from onebit.kernels.data.hyper import hyper_table
from onebit.kernels.data.layout import MOST_BLOCK_SIZE, Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, Messages
from onebit.kernels.passes import AdamUpdate, Compress, Gradients, Parameters
from onebit.kernels.tuning.workload import HYPER
from tests.kernels.agreement import ROUNDED
from tests.kernels.compare import assert_close, numpy

NAME = "past 2^31 elements"
PASSES = ("compress", "adam_update")
LAST = 2  # blocks
NUMEL = 2**31 + MOST_BLOCK_SIZE + 5


class Giant:
    """One parameter. Memory that nothing is written to takes none."""

    def __init__(self) -> None:
        self.layout = Layout([NUMEL], block_size=MOST_BLOCK_SIZE)
        self.span, self.form = self.layout.all(), Format(self.layout)
        self.last = self.span.blocks(self.span.count - LAST, LAST)
        self.tail = slice(self.last.start, self.last.start + self.last.elements)
        self.x, self.g, self.value, self.d = (self._zeros(i) for i in range(4))
        self.params, self.grads = (Pointers.to(self.layout, [each[:NUMEL]]) for each in (self.x, self.g))
        self.sent, self.replies = (self._messages(seed) for seed in (5, 6))
        self.hyper, self.flags = hyper_table([HYPER], torch.device("cpu")), torch.zeros(1, dtype=torch.int32)

    def _zeros(self, seed: int) -> Tensor:
        found = torch.from_numpy(np.zeros(self.layout.elements, np.float32))  # pages come when they are written to
        found[self.tail] = torch.randn(self.last.elements, generator=torch.Generator().manual_seed(seed))
        return found

    def _messages(self, seed: int) -> Messages:
        buffer = torch.from_numpy(np.zeros((1, self.form.nbytes), np.uint8))
        bits = Messages(buffer, self.form).bits(0, self.span)[self.last.start // 8 :]
        bits.random_(0, 256, generator=torch.Generator().manual_seed(seed))
        Messages(buffer, self.form).scales(0, self.span)[-LAST:] = 0.5
        return Messages(buffer, self.form)

    def run(self, each: str, backend: Any, *, only_last: bool) -> None:
        """A pass over all blocks or over the last."""
        span = self.last if only_last else self.span
        value, d = (flat[self.tail] if only_last else flat for flat in (self.value, self.d))
        if each == "compress":
            residual = Residual(value, None, None, None, None, (span.elements,))
            gradients = Gradients(self.grads, self.hyper, self.flags)
            backend.run(Compress(span, gradients, self.replies, residual, self.sent))
        else:
            backend.run(AdamUpdate(span, Parameters(self.params, None), d, self.replies, self.hyper))

    def outputs(self) -> list[Tensor]:
        """What passes have written of the last blocks: parameters, scales, residuals and bits."""
        scales = self.sent.scales(0, self.span)[-LAST:]
        return [self.x[self.tail], scales, self.value[self.tail], self.sent.bits(0, self.span)[self.tail.start // 8 :]]

    @property
    def tables(self) -> list[Pointers]:
        return [self.params, self.grads]


def check(each: str, around: Callable[[Giant], AbstractContextManager[object]]) -> None:
    ours, theirs = Giant(), Giant()
    with around(ours):
        ours.run(each, gpu, only_last=False)
    theirs.run(each, cpu, only_last=True)
    for got, want, tolerance in zip(ours.outputs(), theirs.outputs(), (0.0, ROUNDED, ROUNDED, 0.0), strict=True):
        assert_close(numpy(got), numpy(want), tolerance, 1.0 if want.numel() > LAST else 0.0)

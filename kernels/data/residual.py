"""The error that compression has left out so far, to be added to what is compressed next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.kernels.data.wire import Format


@dataclass(frozen=True)
class Residual:
    """The error that compression has left out so far, for one span and the messages it is compressed into.

    With block scales `value` is e. A tensor scale is known only after the whole message was read; there `value` keeps
    c, and the next step computes e = c - scale * sigma(c) as it reads it.
    """

    value: Tensor  # fp32 [elements of the span]
    scale: Tensor | None  # fp32 [messages], with a tensor scale
    partial: Tensor | None  # fp32 [blocks]: scratch for the sum over a message
    counted: Tensor | None  # int32 [blocks]: scratch for the count over a message
    counter: Tensor | None  # int32 [messages]: scratch, 0 between launches
    before: Tensor | None = None  # fp32 [elements]: where compress and average write what `value` was, if wanted

    @classmethod
    def zeros(
        cls, span: Span, form: Format, device: torch.device | str = "cpu", value: Tensor | None = None
    ) -> Residual:
        """A residual of zeros, or one on the memory of `value`, which is then changed in place."""
        if value is None:
            value = torch.zeros(span.elements, dtype=torch.float32, device=device)
        if form.scale == "block":
            return cls(value, None, None, None, None)
        rows = span.count // form.shard_blocks
        return cls(
            value,
            torch.zeros(rows, dtype=torch.float32, device=device),
            torch.zeros(span.count, dtype=torch.float32, device=device),
            torch.zeros(span.count, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    def left_out(self) -> Tensor:
        """e, fp32 [elements]. Its values in padding and for coordinates that take no part mean nothing."""
        if self.scale is None:
            return self.value
        scale = self.scale.repeat_interleave(len(self.value) // len(self.scale))
        return self.value - torch.where(self.value >= 0, scale, -scale)

    def materialize(self) -> None:
        """With a tensor scale: set `value` to e and the scale to 0, from which the same e is computed."""
        if self.scale is not None:
            for value, scale in zip(self.value.view(len(self.scale), -1), self.scale, strict=True):
                value.sub_(torch.where(value >= 0, scale, -scale))
            self.scale.zero_()

    def part(self, first: int, span: Span, form: Format) -> Residual:
        """A view of the part that belongs to `span`, which starts at block `first` of this residual."""

        def cut(state: Tensor | None, unit: int) -> Tensor | None:
            return None if state is None else state.narrow(0, first // unit, span.count // unit)

        value = self.value.narrow(0, first * form.block_size, span.elements)
        return Residual(
            value,
            cut(self.scale, form.shard_blocks),
            cut(self.partial, 1),
            cut(self.counted, 1),
            cut(self.counter, form.shard_blocks),
        )

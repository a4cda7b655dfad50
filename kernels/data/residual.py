"""The error that compression has left out so far, to be added to what is compressed next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.kernels.data.record import NamedRecord
from onebit.kernels.data.wire import Format


@dataclass(frozen=True)
class Residual(NamedRecord):
    """The error that compression has left out so far, for one span and the messages it is compressed into.

    With block scales `value` is e. A tensor scale is known only after the whole message was read; there `value` keeps
    c, and the next step computes e = c - scale * sigma(c) as it reads it.
    """

    value: Tensor  # [elements of the span], of the format's dtype
    scale: Tensor | None  # fp32 [messages], with a tensor scale
    partial: Tensor | None  # fp32 [blocks]: scratch for the sum over a message
    counted: Tensor | None  # int32 [blocks]: scratch for the count over a message
    counter: Tensor | None  # int32 [messages]: scratch, 0 between launches
    sizes: tuple[int, ...]  # elements of each message
    before: Tensor | None = None  # like `value`: where compress and average write what that was, if wanted

    @classmethod
    def zeros(
        cls,
        spans: Span | Sequence[Span],
        form: Format,
        device: torch.device | str = "cpu",
        value: Tensor | None = None,
    ) -> Residual:
        """A residual of zeros for one span or for several, one after the other; or one on the memory of `value`, which
        is then changed in place."""
        shards = [shard for span in ([spans] if isinstance(spans, Span) else spans) for shard in span.shards()]
        sizes = tuple(shard.elements for shard in shards)
        if value is None:
            value = torch.zeros(sum(sizes), dtype=form.residual_dtype, device=device)
        if form.scale == "block":
            return cls(value, None, None, None, None, sizes)
        rows, blocks = len(shards), sum(shard.count for shard in shards)
        return cls(
            value,
            torch.zeros(rows, dtype=torch.float32, device=device),
            torch.zeros(blocks, dtype=torch.float32, device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            sizes,
        )

    def left_out(self) -> Tensor:
        """e, [elements]. Its values in padding and for elements that take no part mean nothing."""
        if self.scale is None:
            return self.value
        scale = self.scale.repeat_interleave(torch.tensor(self.sizes, device=self.scale.device))
        return self.value - torch.where(self.value >= 0, scale, -scale)

    def materialize(self) -> None:
        """Set `value` to e, and the scale, if there is one, to 0, from which the same e is computed."""
        if self.scale is not None:
            for value, scale in zip(self.value.split(self.sizes), self.scale, strict=True):
                value.sub_(torch.where(value >= 0, scale, -scale))
            self.scale.zero_()

    def parts(self, spans: Sequence[Span]) -> list[Residual]:
        """Views of the parts that belong to each of the spans that it was made for."""
        found, element, block, row = [], 0, 0, 0
        for span in spans:
            rows = len(span.shards())
            found.append(
                Residual(
                    self.value.narrow(0, element, span.elements),
                    None if self.scale is None else self.scale.narrow(0, row, rows),
                    None if self.partial is None else self.partial.narrow(0, block, span.count),
                    None if self.counted is None else self.counted.narrow(0, block, span.count),
                    None if self.counter is None else self.counter.narrow(0, row, rows),
                    self.sizes[row : row + rows],
                )
            )
            element, block, row = element + span.elements, block + span.count, row + rows
        return found

"""Messages and what ranks keep of some spans, element by element, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebit.checkpoint.names import ORDER
from onebit.kernels.data.bits import packed, unpacked
from onebit.kernels.data.layout import Layout, Span
from onebit.optim.memory_order import Order


def saved_order(own: Mapping[str, Any]) -> Order:
    """In which one parameter's bits and pieces were saved."""
    return tuple(own[ORDER].tolist()) if ORDER in own else None


def decoded(bits: Tensor, scales: Tensor, numel: int, size: int) -> Tensor:
    """fp32 [messages, numel] of one parameter's bits and scales, of one message or several; size: of a block."""
    of_elements = scales.repeat_interleave(lengths_of(numel, size).to(scales.device), -1)
    flat = ((unpacked(bits).float() * 2 - 1) * of_elements)[..., :numel]
    return flat if flat.ndim == 2 else flat[None]


def encoded(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The reverse, where values have one magnitude a block of `size`: bits and scales of blocks."""
    numel, blocks = values.numel(), -(-values.numel() // size)
    padded = pad(values.float(), (0, blocks * size - numel)).view(blocks, size)
    positive, scales = ~torch.signbit(padded), padded.abs().amax(1)
    return packed(positive.view(-1)[: int(lengths_of(numel, size).sum())]), scales


def lengths_of(numel: int, size: int) -> Tensor:
    """int64: the lengths of a parameter's blocks."""
    return torch.from_numpy(Layout([numel], block_size=size).lengths()[: -(-numel // size)])


def gathered(values: Tensor, spans: Sequence[Span], index: int) -> Tensor:
    """Of one parameter's numbers those that lie in spans, one after the other."""
    flat = values.view(-1)
    parts = [flat[part] for span in spans for part, _ in span.of_parameter(index)]
    return torch.cat(parts) if parts else flat[:0]


def scattered(values: Tensor, spans: Sequence[Span], index: int, numel: int) -> Tensor:
    """The reverse: 0 elsewhere."""
    flat, start = torch.zeros(numel, dtype=values.dtype, device=values.device), 0
    for part, _ in (found for span in spans for found in span.of_parameter(index)):
        stop = start + part.stop - part.start
        flat[part], start = values[start:stop], stop
    return flat

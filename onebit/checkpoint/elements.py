"""Messages and what ranks keep of some spans, element by element, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebit.checkpoint.names import ORDER
from onebit.kernels.data.bits import packed, unpacked
from onebit.kernels.data.layout import Span
from onebit.optim.memory_order import Order


def saved_order(own: Mapping[str, Any]) -> Order:
    """In which one parameter's bits and pieces were saved."""
    return tuple(own[ORDER].tolist()) if ORDER in own else None


def decoded(bits: Tensor, scales: Tensor, per_element: int) -> Tensor:
    """fp32 [messages, blocks * block_size] of one parameter's bits and scales, of one message or several."""
    ones, scales = unpacked(bits), scales.unsqueeze(-1)
    if per_element == 2:
        ones, large = ones.chunk(2, -1)
        scales = torch.where(large, scales[:, 1], scales[:, 0])
    flat = ((ones.float() * 2 - 1) * scales).flatten(-2)
    return flat if flat.ndim == 2 else flat[None]


def encoded(values: Tensor, size: int, per_element: int) -> tuple[Tensor, Tensor]:
    """The reverse, where values have one magnitude a block of `size`, with 2 bits two: bits and scales of blocks."""
    blocks = -(-values.numel() // size)
    padded = pad(values.float(), (0, blocks * size - values.numel())).view(blocks, size)
    ones, magnitudes = ~torch.signbit(padded), padded.abs()
    if blocks == 0:
        return packed(torch.cat([ones] * per_element, 1)), magnitudes.new_zeros((0, 2) if per_element == 2 else 0)
    most = magnitudes.amax(1)
    if per_element == 1:
        return packed(ones), most
    valid = torch.arange(blocks * size, device=values.device).view(blocks, size) < values.numel()
    least = torch.where(valid, magnitudes, torch.inf).amin(1)
    large = valid & (magnitudes > least[:, None])
    return packed(torch.cat([ones, large], 1)), torch.stack([least, most], 1)


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

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


def decoded(bits: Tensor, scales: Tensor, per_element: int, numel: int, size: int) -> Tensor:
    """fp32 [messages, numel] of one parameter's bits and scales, of one message or several; size: of a block."""
    positive, *large = unpacked(planes_of(bits, per_element, numel, size)).unbind(-2)
    lengths = lengths_of(numel, size).to(scales.device)
    if large:
        of_small, of_large = scales.repeat_interleave(lengths, -2).unbind(-1)
        scale = torch.where(large[0], of_large, of_small)
    else:
        scale = scales.repeat_interleave(lengths, -1)
    flat = ((positive.float() * 2 - 1) * scale)[..., :numel]
    return flat if flat.ndim == 2 else flat[None]


def encoded(values: Tensor, size: int, per_element: int) -> tuple[Tensor, Tensor]:
    """The reverse, where values have one magnitude a block of `size`, with 2 bits two: bits and scales of blocks."""
    numel, blocks = values.numel(), -(-values.numel() // size)
    padded = pad(values.float(), (0, blocks * size - numel)).view(blocks, size)
    positive, magnitudes = ~torch.signbit(padded), padded.abs()
    if blocks == 0:
        return packed(positive.view(0)), magnitudes.new_zeros((0, 2) if per_element == 2 else 0)
    planes, scales = [positive], magnitudes.amax(1)
    if per_element == 2:
        valid = torch.arange(blocks * size, device=values.device).view(blocks, size) < numel
        least = torch.where(valid, magnitudes, torch.inf).amin(1)
        planes.append(valid & (magnitudes > least[:, None]))
        scales = torch.stack([least, scales], 1)
    kept = int(lengths_of(numel, size).sum())
    return joined_planes(packed(torch.stack(planes).flatten(1)[:, :kept]), numel, size), scales


def lengths_of(numel: int, size: int) -> Tensor:
    """int64: the lengths of a parameter's blocks."""
    return torch.from_numpy(Layout([numel], block_size=size).lengths()[: -(-numel // size)])


def planes_of(bits: Tensor, per_element: int, numel: int, size: int) -> Tensor:
    """uint8 [.., per_element, bytes], from the bits of one block after the other, uint8 [.., bytes]: with 2 bits those
    of a block are its signs, then which of its elements are large."""
    blocks, its_bytes = numel // size, size // 8
    whole, last = bits.tensor_split([blocks * per_element * its_bytes], -1)
    whole = whole.unflatten(-1, (blocks, per_element, its_bytes)).transpose(-3, -2).flatten(-2)
    return torch.cat([whole, last.unflatten(-1, (per_element, last.shape[-1] // per_element))], -1)


def joined_planes(planes: Tensor, numel: int, size: int) -> Tensor:
    """The reverse."""
    blocks, its_bytes = numel // size, size // 8
    whole, last = planes.tensor_split([blocks * its_bytes], -1)
    whole = whole.unflatten(-1, (blocks, its_bytes)).transpose(-3, -2).flatten(-3)
    return torch.cat([whole, last.flatten(-2)], -1)


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

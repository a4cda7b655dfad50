"""What parts of a saved state are called, beside the fields of the algorithm, and the forms of messages and residuals.

    what whole parameters save               sharded ones (FSDP2), placed as the parameter is, for DCP to reshard
        a field with one bit an element        uint8, one number an element
        momentum_bits, momentum_scales         momentum_of_message_0, ..: fp32; with direct replies one a rank
        residual of a slice                    in the parameter's shape: there is one slice
        server_residual_of_rank_3              in the parameter's shape: 0 where rank 3 averages nothing

`momentum` and `blocks_of_momentum` read a momentum of either form, `spread` a residual of either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebit.kernels.data.bits import packed, unpacked
from onebit.kernels.data.layout import Layout, Span
from onebit.optim.memory_order import Order, in_shape
from onebit.optim.sharding import as_whole, is_sharded, local

Saved = Mapping[str, Any]  # one parameter's
BITS, SCALES = "momentum_bits", "momentum_scales"
ORDER = "memory_order"


def residual_name(rank: int) -> str:
    return f"residual_of_rank_{rank}"


def server_residual_name(rank: int) -> str:
    return f"server_residual_of_rank_{rank}"


def message_name(rank: int) -> str:
    return f"momentum_of_message_{rank}"


def rank_of(name: object, kind: str = "residual") -> int | None:
    """Whose residual a name says it is."""
    found = re.fullmatch(rf"{kind}_of_rank_([0-9]{{1,9}})", str(name))
    return int(found[1]) if found else None


def owner_of(name: object) -> int | None:
    """Whose residual, or server's residual, a name says it is."""
    return rank_of(name, "(?:server_)?residual")


def is_by_element(own: Saved) -> bool:
    return message_name(0) in own


def saved_order(own: Saved) -> Order:
    """How one parameter lay in memory when its bits and spans were saved."""
    return tuple(own[ORDER].tolist()) if ORDER in own else None


def by_element(own: Saved, like: Tensor, index: int, size: int, served: Sequence[Span]) -> dict[str, Any]:
    """A state of `like`, the index-th parameter, in the form of sharded ones. size: of a block. served: the spans that
    this rank averages."""
    part = local(like)
    found: dict[str, Any] = {}
    for name, value in own.items():
        if name in (BITS, SCALES):
            continue
        if isinstance(value, Tensor) and value.ndim > 0:
            if rank_of(name, "server_residual") is not None:
                value = spread(value, served, index, part.numel())
            elif value.dtype == torch.uint8:
                value = unpacked(value)[: part.numel()].to(torch.uint8)
            value = as_whole(value.view(part.shape), like)
        found[name] = value
    if BITS in own:
        for rank, values in enumerate(decoded(own[BITS], own[SCALES], part.numel(), size)):
            found[message_name(rank)] = as_whole(values.view(part.shape), like)
    return found


def momentum(own: Saved, shape: Sequence[int], size: int) -> Tensor:
    """fp32 [messages, *shape], what each message says of one parameter. size: of a block."""
    if BITS in own:
        numel, order = torch.Size(shape).numel(), saved_order(own)
        return torch.stack([in_shape(m, shape, order) for m in decoded(own[BITS], own[SCALES], numel, size)])
    return torch.stack([message.float() for message in _messages(own)])


def blocks_of_momentum(own: Saved, size: int) -> tuple[Tensor, Tensor]:
    """The same messages as bits and scales of blocks: uint8 [messages, bytes] and fp32 [messages, blocks]."""
    if BITS in own:
        return torch.atleast_2d(own[BITS]), torch.atleast_2d(own[SCALES])
    bits, scales = zip(*(encoded(message.reshape(-1), size) for message in _messages(own)), strict=True)
    return torch.stack(bits), torch.stack(scales)


def decoded(bits: Tensor, scales: Tensor, numel: int, size: int) -> Tensor:
    """fp32 [messages, numel] of one parameter's bits and scales, of one message or several. size: of a block."""
    of_elements = scales.repeat_interleave(lengths_of(numel, size).to(scales.device), -1)
    return torch.atleast_2d(torch.where(unpacked(bits), of_elements, -of_elements)[..., :numel])


def encoded(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The reverse, where values have one magnitude a block of `size`: bits and scales of blocks."""
    numel, blocks = values.numel(), -(-values.numel() // size)
    padded = pad(values.float(), (0, blocks * size - numel), value=-0.0).view(blocks, size)  # whose bits are 0
    positive, scales = ~torch.signbit(padded), padded.abs().amax(1)
    return packed(positive.view(-1)[: int(lengths_of(numel, size).sum())]), scales


def lengths_of(numel: int, size: int) -> Tensor:
    """int64: the lengths of a parameter's blocks."""
    return torch.from_numpy(Layout([numel], block_size=size).lengths()[: -(-numel // size)])


def spread(values: Tensor, spans: Sequence[Span], index: int, numel: int) -> Tensor:
    """Of one parameter a value for every element, from those of its elements in spans, one after the other; 0 in the
    others. Values for all elements stay as they are."""
    if values.numel() == numel:
        return values
    flat, start = torch.zeros(numel, dtype=values.dtype, device=values.device), 0
    for part, _ in (found for span in spans for found in span.of_parameter(index)):
        stop = start + part.stop - part.start
        flat[part], start = values[start:stop], stop
    return flat


def room_for(
    size: Sequence[int], dtype: torch.dtype, like: Tensor | None, device: torch.device | str = "cpu"
) -> Tensor:
    """Zeros to read into: on `device`, or placed as `like` is, a sharded parameter with an element for each of them."""
    if like is not None and is_sharded(like) and tuple(size) == tuple(like.shape):
        return as_whole(torch.zeros(local(like).shape, dtype=dtype, device=like.device), like)
    return torch.zeros(size, dtype=dtype, device=device)


def _messages(own: Saved) -> list[Tensor]:
    """By element, of rank 0, 1 and so on."""
    return [own[name] for name in takewhile(own.__contains__, map(message_name, range(len(own))))]

"""States of sharded parameters (FSDP2), element by element, so that any number of shards can load them.

    what the schema has                        what is saved instead; DTensors are placed as the parameter is
        a field with one bit an element        uint8, one number an element
        momentum_bits, momentum_scales         momentum_of_message_0, ..: fp32; with direct replies one a rank
        server_residual_of_rank_3              0 where rank 3 averages nothing

torch.distributed.checkpoint reshards DTensors. On the same shards and replicas a momentum becomes the bits again that
it was; on others it is folded into the residual.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.elements import decoded, encoded, gathered, scattered
from onebit.checkpoint.names import (
    BITS,
    DENSE,
    SCALES,
    message_name,
    message_of,
    rank_of,
    residual_name,
    server_rank_of,
    server_residual_name,
)
from onebit.kernels.data.bits import packed, unpacked
from onebit.kernels.data.layout import Span
from onebit.optim.sharding import as_whole, is_sharded, local

Saved = dict[str, Any]  # one parameter's


def by_element(own: Saved, like: Tensor, index: int, size: int, shards: Sequence[Span]) -> Saved:
    """What the schema has of one parameter, `like`, which is the index-th. size: of a block. shards: what this rank
    averages."""
    part = local(like)
    found: Saved = {}
    for name, value in own.items():
        if name in (BITS, SCALES):
            continue
        if not isinstance(value, Tensor) or value.ndim == 0:
            found[name] = value
            continue
        if server_rank_of(name) is not None:
            value = scattered(value, shards, index, part.numel())
        elif value.dtype == torch.uint8:
            value = unpacked(value)[: part.numel()].to(torch.uint8)
        found[name] = as_whole(value.view(part.shape), like)
    if BITS in own:
        for rank, values in enumerate(decoded(own[BITS], own[SCALES], part.numel(), size)):
            found[message_name(rank)] = as_whole(values.view(part.shape), like)
    return found


def as_it_was(
    own: Saved, index: int, size: int, packed_fields: Collection[str], shards: Sequence[Span], place: int
) -> Saved:
    """On the same shards and replicas: as the schema has it. size: of a block. place: this rank's."""
    found = _without_messages(own, packed_fields)
    found = {name: value for name, value in found.items() if {rank_of(name), server_rank_of(name)} <= {None, place}}
    if (name := server_residual_name(place)) in found:
        found[name] = gathered(found[name], shards, index)
        if not found[name].numel():
            del found[name]
    messages = [encoded(value.view(-1), size) for value in _messages(own)]
    if messages:
        of_all = [torch.stack(each) for each in zip(*messages, strict=True)]
        found[BITS], found[SCALES] = of_all if len(messages) > 1 else (each[0] for each in of_all)
    return found


def as_folded(own: Saved, packed_fields: Collection[str], ranks: int, place: int | None, here: int) -> Saved:
    """On other shards or replicas: the mean of all residuals as this rank's, with what servers had left out, and the
    mean momentum, which is to be folded into it.

    ranks: that saved it. place: among them, of a rank whose own residuals will do, as each of the others loads its
    own; None where all are needed. here: this rank's place now. Without those residuals there are none.
    """
    found = _without_messages(own, packed_fields)
    residuals = {rank_of(name): found.pop(name) for name in own if rank_of(name) is not None}
    servers = {server_rank_of(name): found.pop(name) for name in own if server_rank_of(name) is not None}
    found[DENSE] = torch.stack([value.float() for value in _messages(own)]).mean(0)
    chosen = list(range(ranks)) if residuals.keys() >= set(range(ranks)) else [place]
    if all(rank in residuals for rank in chosen):
        e = torch.stack([residuals[rank].double() for rank in chosen]).mean(0)
        left_out = [servers[rank].double() for rank in chosen if rank in servers]
        found[residual_name(here)] = (e + ranks / len(chosen) * sum(left_out)).float()
    return found


def room_for(
    size: Sequence[int], dtype: torch.dtype, like: Tensor | None, device: torch.device | str = "cpu"
) -> Tensor:
    """Zeros to read into: on `device`, or placed as `like` is, a sharded parameter with an element for each of them."""
    if like is not None and is_sharded(like) and tuple(size) == tuple(like.shape):
        return as_whole(torch.zeros(local(like).shape, dtype=dtype, device=like.device), like)
    return torch.zeros(size, dtype=dtype, device=device)


def is_by_element(own: Saved) -> bool:
    return message_name(0) in own


def _without_messages(own: Saved, packed_fields: Collection[str]) -> Saved:
    found = {name: value for name, value in own.items() if message_of(name) is None}
    return {name: packed(v.view(-1)) if name in packed_fields else v for name, v in found.items()}


def _messages(own: Saved) -> list[Tensor]:
    names = [name for name in own if message_of(name) is not None]
    return [own[name] for name in sorted(names, key=lambda name: message_of(name) or 0)]

"""A span as a matrix, one row a block: what every pass of the reference is written in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onebit.kernels.data.bits import unpacked
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers


def rows(span: Span, flat: Tensor) -> Tensor:
    """A span's flat values as [blocks, block_size], 0 past a block's length."""
    inside = room(span, flat.device)
    found = torch.zeros(inside.shape, dtype=flat.dtype, device=flat.device)
    found[inside] = flat.view(-1)
    return found


def flat(span: Span, rows: Tensor) -> Tensor:
    """The reverse."""
    return rows[room(span, rows.device)]


def room(span: Span, device: torch.device) -> Tensor:
    """bool [blocks, block_size]: what belongs to a block, valid or not."""
    lengths = torch.from_numpy(span.lengths()).to(device)
    return torch.arange(span.layout.block_size, device=device) < lengths[:, None]


def gather(span: Span, pointers: Pointers) -> Tensor:
    """The tensors' elements in fp32 [blocks, block_size]; 0 in padding and where there is no tensor."""
    values = torch.zeros(span.elements, dtype=torch.float32, device=pointers.device)
    for s in span.segments():
        tensor = pointers.tensors[s.parameter]
        if tensor is not None:
            values[s.offset : s.offset + s.stop - s.start] = tensor.view(-1)[s.start : s.stop]
    return rows(span, values)


def scatter(span: Span, pointers: Pointers, step: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors' elements x by step(x); step maps [blocks, block_size] to the same shape."""
    values = flat(span, step(gather(span, pointers)))
    for s in span.segments():
        tensor = pointers.tensors[s.parameter]
        if tensor is not None:
            tensor.view(-1)[s.start : s.stop] = values[s.offset : s.offset + s.stop - s.start]


def put(span: Span, target: Tensor, values: Tensor, mask: Tensor) -> None:
    """Write values, [blocks, block_size], to flat state where the mask is set."""
    target.copy_(torch.where(flat(span, mask), flat(span, values), target))


def hyper_columns(span: Span, hyper: Tensor) -> Hyper:
    """Each hyper-parameter as a column [blocks, 1] instead of a float."""
    group = torch.from_numpy(span.layout.group[span.layout.owner(span.first, span.count)])
    return Hyper._make(hyper[group.to(hyper.device)].unsqueeze(-1).unbind(1))


def owner_of_blocks(span: Span, device: torch.device) -> Tensor:
    """int64 [blocks]: the parameter that each block belongs to."""
    return torch.from_numpy(span.layout.owner(span.first, span.count)).to(device)


def parameter_column(span: Span, values: Tensor) -> Tensor:
    """[blocks, 1]: from one value a parameter, the value of each block's parameter."""
    return values[owner_of_blocks(span, values.device)][:, None]


def element_mask(span: Span, device: torch.device, live: Tensor | None = None) -> Tensor:
    """bool [blocks, block_size]: which elements are valid, and have their bit in the live mask where there is one."""
    counts = torch.from_numpy(span.counts()).to(device)
    mask = torch.arange(span.layout.block_size, device=device) < counts[:, None]
    return mask if live is None else mask & rows(span, unpacked(live))


def signed(positive: Tensor, scale: Tensor) -> Tensor:
    """+scale where `positive`, -scale elsewhere."""
    return torch.where(positive, scale, -scale)

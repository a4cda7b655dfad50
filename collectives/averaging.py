"""Uncompressed means over ranks: what is done with gradients where DDP does not.

    average_          every tensor, on every rank: stage 1
    average_slices    with two levels, over the ranks of a node: each gets the mean of its own slice of every chunk

Tensors travel in buckets of some 25 MB, two under way at a time; a tensor that fills a bucket is sent as it lies. On
the way they may be of a narrower dtype than their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from onebit.collectives.transport.protocol import Ranks, Transport, Work
from onebit.kernels.data.layout import Span

BUCKET_BYTES = 25 * 2**20
_UNDER_WAY = 2


def average_(
    tensors: Sequence[Tensor],
    transport: Ranks,
    factor: Tensor | None = None,
    wire_dtype: torch.dtype | None = None,
    phase: str = "averaging gradients (all-reduce)",
) -> None:
    """Replace every tensor by its mean over ranks, the same bit for bit on all of them.

    factor: a scalar that may differ from rank to rank; each rank's tensors are multiplied by its own before the mean,
    in fp32, and the mean is divided by it: ranks whose loss is scaled differently get the mean in their own scale.
    wire_dtype: what they are rounded to on the way, where that is narrower: 2 instead of 4 bytes an element.
    phase: what an error says it was.
    """
    if transport.size == 1:
        return

    def start(bucket: list[Tensor]) -> Callable[[], None]:
        own = bucket[0].dtype
        wire = narrower(own, wire_dtype)
        flat = _packed(bucket, factor).mul_(1 / transport.size)
        if wire != own:
            flat = flat.to(wire)
        work = transport.all_sum(flat, phase)
        return partial(_unpack, work, flat, bucket, factor)

    _some_at_a_time(map(start, _buckets(tensors)))


def average_slices(
    slices: Sequence[Span],
    tensors: Sequence[Tensor | None],
    into: Sequence[Tensor],
    node: Transport,
    factor: Tensor | None = None,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Write to `into` the mean over the node's ranks of the elements of this rank's slice; others stay as they are.

    slices: of one chunk, by rank. tensors, into: contiguous, one a parameter of the layout; None is zeros. They may be
    the same. factor, wire_dtype: as for `average_`. Each rank is sent its slice (all-to-all) and adds in fp32.
    """
    dtype = into[0].dtype
    wire = narrower(dtype, wire_dtype)
    most = max(1, BUCKET_BYTES // (node.size * wire.itemsize))

    def start(parts: Sequence[Span]) -> Callable[[], None]:
        longest = max(part.elements for part in parts)
        sent = torch.zeros((node.size, longest), dtype=wire, device=into[0].device)
        for row, part in zip(sent, parts, strict=True):
            _read(part, tensors, row, factor)
        came = torch.empty_like(sent)
        phase = "averaging gradients over the node (all-to-all)"
        work = node.all_to_all(came.view(torch.uint8), sent.view(torch.uint8), phase)
        return partial(_write_mean, work, came, parts[node.rank], into, factor)

    _some_at_a_time(map(start, zip(*buckets_of_slices(slices, most), strict=True)))


def _some_at_a_time(started: Iterable[Callable[[], None]]) -> None:
    """Finish each when as many as may be are under way."""
    under_way: list[Callable[[], None]] = []
    for finish in started:
        under_way.append(finish)
        if len(under_way) == _UNDER_WAY:
            under_way.pop(0)()
    for finish in under_way:
        finish()


def buckets_of_slices(slices: Sequence[Span], most: int) -> list[list[Span]]:
    """Each slice in equally many parts of some `most` elements; what is over is in the last. A part may be empty."""
    count = max(-(-each.elements // most) for each in slices)
    found = []
    for each in slices:
        ends = np.cumsum(each.lengths())
        cuts = [0, *np.searchsorted(ends, [each.elements * k // count for k in range(1, count)]).tolist(), each.count]
        found.append([each.blocks(a, b - a) for a, b in itertools.pairwise(cuts)])
    return found


def _read(span: Span, tensors: Sequence[Tensor | None], row: Tensor, factor: Tensor | None) -> None:
    """A span's elements, multiplied by `factor` in fp32."""
    for s in span.segments():
        if (tensor := tensors[s.parameter]) is not None:
            values = tensor.view(-1)[s.start : s.stop]
            row[s.offset : s.offset + s.stop - s.start] = values if factor is None else values.float() * factor


def _write_mean(work: Work, came: Tensor, span: Span, into: Sequence[Tensor], factor: Tensor | None) -> None:
    work.wait()
    mean = came.sum(0, dtype=torch.float32).div_(len(came))
    if factor is not None:
        mean.div_(factor)
    for s in span.segments():
        into[s.parameter].view(-1)[s.start : s.stop] = mean[s.offset : s.offset + s.stop - s.start]


def narrower(own: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """What numbers of dtype `own` travel as."""
    return wire if wire is not None and wire.itemsize < own.itemsize else own


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one dtype, as many as fit."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _packed(bucket: list[Tensor], factor: Tensor | None) -> Tensor:
    if factor is None and len(bucket) == 1 and bucket[0].is_contiguous():
        return bucket[0].view(-1)
    flat = torch.cat([t.reshape(-1) for t in bucket])
    return flat if factor is None else flat.float().mul_(factor)


def _unpack(work: Work, flat: Tensor, bucket: list[Tensor], factor: Tensor | None) -> None:
    work.wait()
    if len(bucket) == 1 and flat.data_ptr() == bucket[0].data_ptr():
        return
    if factor is not None:
        flat = flat.float().div_(factor)
    parts = flat.split([t.numel() for t in bucket])
    torch._foreach_copy_(bucket, [part.view(t.shape) for t, part in zip(bucket, parts, strict=True)])

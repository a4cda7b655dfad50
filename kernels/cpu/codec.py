"""compress, average and decode for CPU tensors.

A sign times a scale is exact, so y + sigma * s rounds once with or without a fused multiply-add: `addcmul` gives the
bits that the Triton kernels give.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebit.kernels.cpu.messages import Encoder, Packed
from onebit.kernels.cpu.tiles import (
    Scratch,
    Tile,
    cut,
    for_tiles,
    groups_of,
    of_tile,
    per_block,
    pieces,
    scaled,
    segment_of,
)
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages


def compress(
    span: Span,
    grads: Pointers,
    momentum: Tensor | Messages | None,
    residual: Residual,
    hyper: Tensor,
    flags: Tensor,
    out: Messages,
    *,
    live: Tensor | None = None,
    gamma: Tensor | None = None,
) -> None:
    """`onebit.kernels.reference.compress` in tiles."""
    _write_headers(out, int(flags.max()))
    if int(flags.max()):
        return
    groups = groups_of(hyper)
    beta1 = per_block(span, groups, "beta1")
    packed = Packed(momentum, beta1) if isinstance(momentum, Messages) else None
    dense = momentum.view(span.count, -1) if isinstance(momentum, Tensor) else None
    gammas = [1.0] * span.layout.parameters if gamma is None else gamma.tolist()
    encoder = Encoder(span, residual, out, live)

    def work(tile: Tile, scratch: Scratch) -> None:
        c, buffer = encoder.left_out(tile, scratch), scratch.buffer(0, tile)
        for s in tile.segments:
            h = groups[s.group]
            y = scaled(grads, s, buffer, h.grad_scale, h.one_minus_beta1, gammas[s.parameter])
            if momentum is None:
                cut(c, s).add_(0 if y is None else y)
            elif y is None:
                cut(buffer, s).zero_()
            elif y.data_ptr() != cut(buffer, s).data_ptr():
                cut(buffer, s).copy_(y)
        if packed is not None:
            c.add_(buffer.addcmul_(scratch.signs(1, tile, packed.bits(tile)), packed.scales(tile)))
        elif dense is not None:
            c.add_(buffer.add_(torch.mul(tile.of(dense), of_tile(tile, beta1), out=scratch.buffer(1, tile))))
        encoder.encode(tile, c, scratch)

    for_tiles(span, out.format.shard_blocks, 2, work)
    encoder.finish()


def average(span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None) -> None:
    """`onebit.kernels.reference.average` in tiles."""
    flag = int(received.flags.max())
    _write_headers(out, flag)
    if flag:
        return

    packed, encoder, mean = Packed(received), Encoder(span, residual, out, live), 1 / received.rows

    def work(tile: Tile, scratch: Scratch) -> None:
        total = scratch.signs(0, tile, packed.bits(tile, 0)).mul_(packed.scales(tile, 0))
        for i in range(1, received.rows):
            total.addcmul_(scratch.signs(1, tile, packed.bits(tile, i)), packed.scales(tile, i))
        c = encoder.left_out(tile, scratch)
        if received.rows & (received.rows - 1):
            c.add_(total.mul_(mean))
        else:  # a power of two: its multiple is exact, so that rounding once is rounding twice
            c.add_(total, alpha=mean)
        encoder.encode(tile, c, scratch)

    for_tiles(span, span.count, 2, work)
    encoder.finish()


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """`onebit.kernels.reference.decode` in tiles."""

    accepted = torch.ones(messages.rows, dtype=torch.float32, device="cpu").masked_fill_(messages.flags != 0, math.nan)
    packed = Packed(messages, accepted.repeat_interleave(messages.format.shard_blocks)[:, None])

    def work(tile: Tile, scratch: Scratch) -> None:
        signs, scales = scratch.signs(0, tile, packed.bits(tile)), packed.scales(tile)
        for s in tile.segments:
            x = segment_of(out, s)
            for rows, part in () if x is None else pieces(tile, s, x):
                sign = signs[rows, : part.shape[1]]
                if part.dtype == torch.float32:
                    torch.mul(sign, scales[rows], out=part)
                else:
                    part.copy_(sign.mul_(scales[rows]))

    for_tiles(span, messages.format.shard_blocks, 1, work)


def _write_headers(out: Messages, flag: int) -> None:
    out.header.copy_(torch.tensor(out.format.header, dtype=torch.int32))
    out.flags.fill_(flag)

"""Every pass for CPU tensors: in place, in tiles that stay in the cache, each operation spread over torch's threads.

A sweep over a tile in the cache costs a third of one over memory, so a pass is as fast as its sweeps are few: results
are built where they will lie, scales of a block are multiplied before they meet its elements, and checks look at one
number a block.

A sign times a scale is exact, so y + sigma * s rounds once with or without a fused multiply-add: `addcmul` gives the
bits that the kernels give. Comparing, packing and table look-up are numpy's, which is faster at them on one thread.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebit.kernels.cpu.adam import adam_update, adam_warmup
from onebit.kernels.cpu.codec import Encoder, Packed
from onebit.kernels.cpu.lamb import lamb_statistics, lamb_warmup
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
    sum_squares,
)
from onebit.kernels.data.hyper import LARGEST
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages

__all__ = [
    "adam_update", "adam_warmup", "average", "compress", "decode", "lamb_statistics", "lamb_warmup", "scan",
]  # fmt: skip


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
        c, room = encoder.left_out(tile, scratch), scratch.room(0, tile)
        for s in tile.segments:
            h = groups[s.group]
            y = scaled(grads, s, room, h.grad_scale, h.one_minus_beta1, gammas[s.parameter])
            if momentum is None:
                cut(c, s).add_(0 if y is None else y)
            elif y is None:
                cut(room, s).zero_()
            elif y.data_ptr() != cut(room, s).data_ptr():
                cut(room, s).copy_(y)
        if packed is not None:
            c.add_(room.addcmul_(scratch.signs(1, tile, packed.bits(tile)), packed.scales(tile)))
        elif dense is not None:
            c.add_(room.add_(torch.mul(tile.of(dense), of_tile(tile, beta1), out=scratch.room(1, tile))))
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


def scan(span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
    """`onebit.kernels.reference.scan` in tiles."""
    groups = groups_of(hyper)
    if squares is not None:
        squares.zero_()

    def work(tile: Tile, scratch: Scratch) -> None:
        for s in tile.segments:
            g = scaled(grads, s, scratch.room(0, tile), groups[s.group].grad_scale)
            if g is None:
                continue
            if squares is not None:
                sum_squares(tile, s, g, squares)
            elif not _finite(g):
                flags[0] = 1
        # No element is larger than a block's norm: where this one is far from the limit, no element is looked at.
        if squares is not None and not float(tile.of(squares).sum()) <= LARGEST:
            for s in tile.segments:
                g = scaled(grads, s, scratch.room(0, tile), groups[s.group].grad_scale)
                if g is not None and not _finite(g):
                    flags[0] = 1

    for_tiles(span, span.count, 1, work)


def _finite(g: Tensor) -> bool:
    return all(abs(float(x)) <= LARGEST for x in g.aminmax())


def _write_headers(out: Messages, flag: int) -> None:
    out.header.copy_(torch.tensor(out.format.header, dtype=torch.int32))
    out.flags.fill_(flag)

"""Every pass for CPU tensors: in place, in tiles that stay in the cache, each operation spread over torch's threads.

A sign times a scale is exact, so y + sigma * s rounds once with or without a fused multiply-add: `addcmul` gives the
bits that the kernels give. Comparing, packing and table look-up are numpy's, which is faster at them on one thread.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.cpu_tiles import (
    Parameter,
    Scratch,
    Tile,
    clear_dead,
    clear_tails,
    count_live,
    cut,
    for_tiles,
    gather,
    groups_of,
    of_owner,
    per_block,
    per_parameter,
    segment_of,
    sum_blocks,
)
from onebit.kernels.hyper import LARGEST, Hyper
from onebit.kernels.layout import Segment, Span
from onebit.kernels.pointers import Pointers
from onebit.kernels.state import LambState, Residual
from onebit.kernels.wire import Messages


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
    gammas = [1.0] * span.layout.parameters if gamma is None else gamma.tolist()

    def work(tile: Tile, scratch: Scratch) -> None:
        y = scratch.room(0, tile)
        gather(
            tile, grads, y, lambda s: (groups[s.group].grad_scale, groups[s.group].one_minus_beta1, gammas[s.parameter])
        )
        beta1 = per_block(tile, groups, "beta1")
        if isinstance(momentum, Messages):
            signs = scratch.signs(1, tile, tile.bits(momentum))
            y.addcmul_(signs, tile.scales(momentum) * beta1)
        elif momentum is not None:
            y.add_(torch.mul(tile.of(momentum), beta1, out=scratch.room(1, tile)))
        _encode(tile, y, residual, out, live, scratch)

    for_tiles(span, out.format.shard_blocks, 2, work)
    _finish_scales(residual, out)


def average(span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None) -> None:
    """`onebit.kernels.reference.average` in tiles."""
    flag = int(received.flags.max())
    _write_headers(out, flag)
    if flag:
        return

    def work(tile: Tile, scratch: Scratch) -> None:
        total = scratch.room(0, tile)
        for i in range(received.rows):
            sender = replace(tile, row=i)
            signs, scales = scratch.signs(1, tile, sender.bits(received)), sender.scales(received)
            if i == 0:
                torch.mul(signs, scales, out=total)
            else:
                total.addcmul_(signs, scales)
        _encode(tile, total.mul_(1 / received.rows), residual, out, live, scratch)

    for_tiles(span, span.count, 2, work)
    _finish_scales(residual, out)


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """`onebit.kernels.reference.decode` in tiles."""

    def work(tile: Tile, scratch: Scratch) -> None:
        values = scratch.signs(0, tile, tile.bits(messages)).mul_(tile.scales(messages)).view(-1)
        if int(messages.flags[tile.row]):
            values.fill_(math.nan)
        for s in tile.span.segments():
            x = segment_of(out, s)
            if x is not None:
                x.copy_(cut(values, s))

    for_tiles(span, messages.format.shard_blocks, 1, work)


def scan(span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
    """`onebit.kernels.reference.scan` in tiles."""
    groups = groups_of(hyper)

    def work(tile: Tile, scratch: Scratch) -> None:
        for s in tile.span.segments():
            g = segment_of(grads, s)
            if g is not None and not all(abs(float(x) * groups[s.group].grad_scale) <= LARGEST for x in g.aminmax()):
                flags[0] = 1
        if squares is not None:
            g = scratch.room(0, tile)
            gather(tile, grads, g, lambda s: (groups[s.group].grad_scale,))
            torch.sum(g.square_(), 1, out=squares[tile.first : tile.first + tile.count])

    for_tiles(span, span.count, 1, work)


def adam_warmup(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    sums: Tensor | None = None,
) -> None:
    """`onebit.kernels.reference.adam_warmup` in tiles."""
    if int(flags.max()):
        return
    groups = groups_of(hyper)

    def work(tile: Tile, scratch: Scratch) -> None:
        _moments(tile, grads, exp_avg, exp_avg_sq, groups, scratch)
        for s in tile.span.segments():
            x = Parameter(tile, s, params, master)
            u = _direction(tile, s, x.value, exp_avg, exp_avg_sq, groups[s.group], scratch)
            x.value.sub_(u, alpha=groups[s.group].lr)
            x.store()
        if sums is not None:
            sum_blocks(tile, exp_avg_sq, sums)

    for_tiles(span, span.count, 2, work)


def adam_update(
    span: Span,
    params: Pointers,
    d: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    coefficient: Tensor | None = None,
) -> None:
    """`onebit.kernels.reference.adam_update` in tiles."""
    groups = groups_of(hyper)
    factors = None if coefficient is None else coefficient.tolist()

    def work(tile: Tile, scratch: Scratch) -> None:
        m = scratch.signs(0, tile, tile.bits(replies)).mul_(tile.scales(replies)).view(-1)
        for s in tile.span.segments():
            h, x = groups[s.group], Parameter(tile, s, params, master)
            lr = h.lr if factors is None else h.lr * factors[s.parameter]
            step = cut(tile.of(d).view(-1), s)
            if h.weight_decay:
                still = torch.from_numpy(np.equal(step.numpy(), 0).nonzero()[0])
                kept = x.value[still]
                x.value.mul_(1 - lr * h.weight_decay)
                x.value[still] = kept
            x.value.addcmul_(cut(m, s), step, value=-lr)
            x.store()

    for_tiles(span, replies.format.shard_blocks, 1, work, replies)


def lamb_warmup(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    state: LambState,
    *,
    coeff_beta: float,
    min_coeff: float,
    max_coeff: float,
) -> None:
    """`onebit.kernels.reference.lamb_warmup` in tiles, twice: the norms are needed whole before x moves."""
    if int(flags.max()):
        return
    groups = groups_of(hyper)
    squares = state.partial.zero_()

    def norms(tile: Tile, scratch: Scratch) -> None:
        _moments(tile, grads, exp_avg, exp_avg_sq, groups, scratch)
        for s in tile.span.segments():
            x = Parameter(tile, s, params, master).value
            u = _direction(tile, s, x, exp_avg, exp_avg_sq, groups[s.group], scratch)
            block = tile.first + s.offset // span.layout.block_size
            for row, value in zip(squares, (x, u), strict=True):
                row[block] = torch.mul(value, value, out=cut(scratch.room(1, tile).view(-1), s)).sum()

    for_tiles(span, span.count, 2, norms)
    x_norm, u_norm = (per_parameter(span, row, torch.sum).sqrt() for row in squares)
    c = torch.where((x_norm > 0) & (u_norm > 0), (x_norm / u_norm).clamp(min_coeff, max_coeff), 1.0)
    state.coefficient.copy_(c)
    state.average.mul_(coeff_beta).add_(c * (1 - coeff_beta))
    factors = c.tolist()

    def apply(tile: Tile, scratch: Scratch) -> None:
        for s in tile.span.segments():
            x = Parameter(tile, s, params, master)
            u = _direction(tile, s, x.value, exp_avg, exp_avg_sq, groups[s.group], scratch)
            x.value.sub_(u, alpha=groups[s.group].lr * factors[s.parameter])
            x.store()

    for_tiles(span, span.count, 2, apply)


def lamb_statistics(
    span: Span,
    replies: Messages,
    previous: Tensor | Messages,
    d: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    state: LambState,
    *,
    factor_min: float,
    factor_max: float,
    factor_threshold: float,
    ratio: Literal["variance", "denominator"] = "variance",
    live: Tensor | None = None,
    gamma: Tensor | None = None,
) -> None:
    """`onebit.kernels.reference.lamb_statistics` in tiles."""
    if int(replies.flags.max()):
        return
    groups = groups_of(hyper)
    maxima = state.partial[0].zero_()

    def work(tile: Tile, scratch: Scratch) -> None:
        h = Hyper._make(per_block(tile, groups, name) for name in Hyper._fields)
        g = scratch.signs(0, tile, tile.bits(replies)).mul_(tile.scales(replies))
        if isinstance(previous, Messages):
            g.addcmul_(scratch.signs(1, tile, tile.bits(previous)), tile.scales(previous) * -h.beta1)
        else:
            g.sub_(torch.mul(tile.of(previous), h.beta1, out=scratch.room(1, tile)))
        g.div_(h.one_minus_beta1)
        if gamma is not None:
            g.div_(of_owner(tile, gamma))
        clear_tails(tile, g)
        v, frozen = tile.of(exp_avg_sq), scratch.room(1, tile)
        v.mul_(h.beta2).add_(g.mul_(g).mul_(h.one_minus_beta2))
        scaled = tile.of(d) if gamma is None else torch.mul(tile.of(d), of_owner(tile, gamma), out=frozen)
        torch.reciprocal(scaled, out=frozen)  # sqrt(v_T) + eps
        if ratio == "variance":
            frozen.sub_(h.eps).clamp_(min=0).square_().div_(v)
        else:
            frozen.div_(torch.sqrt(v, out=g).add_(h.eps))
        counted = np.greater(v.numpy(), 0)
        if not counted.all() or not np.greater(tile.of(d).numpy(), 0).all():
            frozen.masked_fill_((v <= 0) | (tile.of(d) <= 0), 0)
        clear_tails(tile, frozen)
        clear_dead(frozen, tile.live(live), scratch.room(0, tile))
        torch.amax(frozen, 1, out=maxima[tile.first : tile.first + tile.count])

    for_tiles(span, replies.format.shard_blocks, 2, work)
    r = per_parameter(span, maxima, torch.amax)
    r = torch.where(r > 0, r, 1.0)
    r = torch.clamp(r, (1 - factor_threshold) * state.ratio, (1 + factor_threshold) * state.ratio)
    state.ratio.copy_(r.clamp(factor_min, factor_max))
    state.coefficient.copy_(state.ratio * state.average)


def _encode(tile: Tile, y: Tensor, residual: Residual, out: Messages, mask: Tensor | None, scratch: Scratch) -> None:
    """c = y + e into bits, scale and residual. `y` is overwritten with c; room 1 is used."""
    e, live, room = tile.of(residual.value), tile.live(mask), scratch.room(1, tile)
    if residual.scale is None:
        c = y.add_(e)
    else:
        c = y.add_(e.sub(_signed(e, residual.scale[tile.row])))
    clear_tails(tile, c)
    clear_dead(c, live, room)
    bits = np.greater_equal(c.numpy(), np.float32(0))
    clear_tails(tile, bits)
    packed = np.packbits(bits.reshape(-1), bitorder="little")
    if live is not None:
        packed &= live.reshape(-1)
    tile.bits(out)[:] = packed
    magnitude = torch.abs(c, out=room) if out.format.norm == "l1" else torch.mul(c, c, out=room)
    total = magnitude.sum(1, keepdim=True)
    count = torch.from_numpy(tile.counts if live is None else count_live(live))[:, None]
    if residual.scale is not None:
        assert residual.partial is not None and residual.counted is not None
        blocks = slice(tile.first, tile.first + tile.count)
        residual.partial[blocks], residual.counted[blocks] = total.view(-1), count.view(-1)
        e.copy_(c)
        return
    scale = _mean_scale(total, count, out)
    tile.scales(out).copy_(scale)
    torch.addcmul(c, scratch.signs(1, tile, packed), scale, value=-1, out=e)
    clear_tails(tile, e)
    clear_dead(e, live, room)


def _finish_scales(residual: Residual, out: Messages) -> None:
    """With a tensor scale: each message's scale, from the sums and counts of its blocks."""
    if residual.scale is None:
        return
    assert residual.partial is not None and residual.counted is not None
    total, count = (blocks.view(out.rows, -1).sum(1) for blocks in (residual.partial, residual.counted))
    scale = _mean_scale(total, count, out)
    out.scales.copy_(scale[:, None])
    residual.scale.copy_(scale)


def _mean_scale(total: Tensor, count: Tensor, out: Messages) -> Tensor:
    scale = total / count.clamp(min=1)
    return scale.sqrt_() if out.format.norm == "l2" else scale


def _moments(
    tile: Tile, grads: Pointers, exp_avg: Tensor, exp_avg_sq: Tensor, groups: list[Hyper], scratch: Scratch
) -> None:
    """m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2. Room 0 is used."""
    g = scratch.room(0, tile)
    gather(tile, grads, g, lambda s: (groups[s.group].grad_scale,))
    for s in tile.span.segments():
        h, part = groups[s.group], cut(g.view(-1), s)
        cut(tile.of(exp_avg).view(-1), s).mul_(h.beta1).add_(part, alpha=h.one_minus_beta1)
        cut(tile.of(exp_avg_sq).view(-1), s).mul_(h.beta2).addcmul_(part, part, value=h.one_minus_beta2)


def _direction(
    tile: Tile, s: Segment, x: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, h: Hyper, scratch: Scratch
) -> Tensor:
    """mhat / (sqrt(vhat) + eps) + wd x, in room 0."""
    u = torch.sqrt(cut(tile.of(exp_avg_sq).view(-1), s), out=cut(scratch.room(0, tile).view(-1), s))
    u.mul_(h.bias2).add_(h.eps)
    torch.div(cut(tile.of(exp_avg).view(-1), s), u, out=u)
    u.mul_(h.bias1)
    return u.add_(x, alpha=h.weight_decay) if h.weight_decay else u


def _signed(like: Tensor, scale: Tensor) -> Tensor:
    return torch.where(like >= 0, scale, -scale)


def _write_headers(out: Messages, flag: int) -> None:
    out.header.copy_(torch.tensor(out.format.header, dtype=torch.int32))
    out.flags.fill_(flag)

"""Adam's passes for CPU tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebit.kernels.cpu.messages import Packed
from onebit.kernels.cpu.tiles import (
    Parameter,
    Scratch,
    Tile,
    cut,
    for_tiles,
    groups_of,
    of_owner,
    per_block,
    scaled,
    sum_blocks,
)
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import Segment, Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages

_NEVER = torch.tensor(math.inf, dtype=torch.float32, device="cpu")  # the step that needs no bias correction


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

    v = exp_avg_sq.view(span.count, -1)

    def work(tile: Tile, scratch: Scratch) -> None:
        for s in tile.segments:
            g, x = gradient(grads, s, groups, scratch.buffer(0, tile)), Parameter(tile, s, params, master)
            h = groups[s.group]
            adam_step(x.value, g, tile.cut(exp_avg, s), tile.cut(exp_avg_sq, s), h, h.lr, h.weight_decay)
            x.store()
        if sums is not None:
            sum_blocks(tile, v, sums)

    for_tiles(span, span.count, 1, work)


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
    rates = per_block(span, groups, "lr")
    packed = Packed(replies, -rates if coefficient is None else of_owner(span, coefficient) * -rates)
    factors = [1.0] * span.layout.parameters if coefficient is None else coefficient.tolist()
    d = d.view(span.count, -1)

    def work(tile: Tile, scratch: Scratch) -> None:
        step = scratch.signs(0, tile, packed.bits(tile)).mul_(packed.scales(tile)).mul_(tile.of(d))  # -lr c_p m d
        for s in tile.segments:
            h, x, part = groups[s.group], Parameter(tile, s, params, master), cut(step, s)
            keep = 1 - h.lr * factors[s.parameter] * h.weight_decay
            if keep == 1:
                x.value.add_(part)
            elif bool((frozen := cut(tile.of(d), s)).amin() > 0):
                torch.add(part, x.value, alpha=keep, out=x.value)
            else:  # a coordinate with d = 0 does not decay
                x.value.copy_(torch.where(frozen != 0, part.add_(x.value, alpha=keep), x.value))
            x.store()

    for_tiles(span, replies.format.shard_blocks, 1, work, replies)


def gradient(grads: Pointers, s: Segment, groups: list[Hyper], buffer: Tensor) -> Tensor:
    """g' of a segment, in `buffer` where it is not the tensor itself."""
    g = scaled(grads, s, buffer, groups[s.group].grad_scale)
    return cut(buffer, s).zero_() if g is None else g


def adam_step(x: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Hyper, lr: float, weight_decay: float = 0.0) -> None:
    """m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  x = x - lr (mhat / (sqrt(vhat) + eps) + wd x).

    By the kernel of torch.optim.AdamW(fused=True), in one sweep. It would work the bias corrections out of the number
    of a step; an infinite one leaves them to lr and eps:
    mhat / (sqrt(vhat) + eps) = (bias1 / bias2) m / (sqrt(v) + eps / bias2). It would multiply x by 1 - lr wd, whose
    rounding is the same at every step and adds up; here the decay is rounded with x.
    """
    if weight_decay:
        x.add_(x, alpha=-lr * weight_decay)
    torch._fused_adamw_(
        [x], [g], [m], [v], [], [_NEVER],
        lr=lr * h.bias1 / h.bias2, beta1=1 - h.one_minus_beta1, beta2=1 - h.one_minus_beta2, eps=h.eps / h.bias2,
        weight_decay=0.0, amsgrad=False, maximize=False,
    )  # fmt: skip

"""LAMB's passes for CPU tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onebit.kernels.cpu.adam import adam_step, gradient
from onebit.kernels.cpu.messages import Packed
from onebit.kernels.cpu.tiles import (
    Parameter,
    Scratch,
    Tile,
    clear_masked,
    clear_tails,
    cut,
    for_tiles,
    groups_of,
    of_owner,
    of_tile,
    per_block,
    per_parameter,
    sum_squares,
)
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages


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
        for s in tile.segments:
            x, h, u = Parameter(tile, s, params, master).value, groups[s.group], cut(scratch.buffer(0, tile), s).zero_()
            g = gradient(grads, s, groups, scratch.buffer(1, tile))
            adam_step(u, g, tile.cut(exp_avg, s), tile.cut(exp_avg_sq, s), h, lr=-1.0)
            if h.weight_decay:
                u.add_(x, alpha=h.weight_decay)
            for row, value in zip(squares, (x, u), strict=True):
                sum_squares(tile, s, value, row)

    for_tiles(span, span.count, 2, norms)
    x_norm, u_norm = (per_parameter(span, row, torch.sum).sqrt() for row in squares)
    c = torch.where((x_norm > 0) & (u_norm > 0), (x_norm / u_norm).clamp(min_coeff, max_coeff), 1.0)
    state.coefficient.copy_(c)
    state.average.mul_(coeff_beta).add_(c * (1 - coeff_beta))
    factors = c.tolist()

    def apply(tile: Tile, scratch: Scratch) -> None:
        for s in tile.segments:
            h, x = groups[s.group], Parameter(tile, s, params, master)
            lr = h.lr * factors[s.parameter]
            root = torch.sqrt(tile.cut(exp_avg_sq, s), out=cut(scratch.buffer(0, tile), s)).add_(h.eps / h.bias2)
            if h.weight_decay:
                x.value.add_(x.value, alpha=-lr * h.weight_decay)
            x.value.addcdiv_(tile.cut(exp_avg, s), root, value=-lr * h.bias1 / h.bias2)
            x.store()

    for_tiles(span, span.count, 1, apply)


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
    gammas = 1.0 if gamma is None else of_owner(span, gamma)
    moment, eps = _SecondMoment(span, replies, previous, groups, gammas), per_block(span, groups, "eps")
    d, v_rows = d.view(span.count, -1), exp_avg_sq.view(span.count, -1)

    def work(tile: Tile, scratch: Scratch) -> None:
        v, own, frozen = tile.of(v_rows), of_tile(tile, eps), scratch.buffer(0, tile)
        moment.update(tile, v, scratch)
        scaled_d = tile.of(d) if gamma is None else torch.mul(tile.of(d), of_tile(tile, gammas), out=frozen)
        torch.reciprocal(scaled_d, out=frozen)
        if ratio == "variance":  # 1 / d is sqrt(v_T) + eps
            frozen.sub_(own).clamp_(min=0).square_().div_(v)
        else:
            frozen.div_(torch.sqrt(v, out=scratch.buffer(1, tile)).add_(own))
        largest = _largest(tile, frozen, live, scratch)
        if not bool(largest.isfinite().all()):  # v = 0 or d = 0 somewhere: these do not count
            frozen.masked_fill_((v <= 0) | (tile.of(d) <= 0), 0)
            largest = _largest(tile, frozen, live, scratch)
        tile.of(maxima).copy_(largest)

    for_tiles(span, replies.format.shard_blocks, 2, work)
    r = per_parameter(span, maxima, torch.amax)
    r = torch.where(r > 0, r, 1.0)
    r = torch.clamp(r, (1 - factor_threshold) * state.ratio, (1 + factor_threshold) * state.ratio)
    state.ratio.copy_(r.clamp(factor_min, factor_max))
    state.coefficient.copy_(state.ratio * state.average)


class _SecondMoment:
    """v = beta2 v + (1 - beta2) ghat^2 with ghat = (m - beta1 m_prev) / (1 - beta1) / gamma.

    Where m_prev is packed too, ghat^2 has two values in a block: one where the sign stayed, one where it changed.
    """

    def __init__(
        self, span: Span, replies: Messages, previous: Tensor | Messages, groups: list[Hyper], gamma: float | Tensor
    ) -> None:
        beta1, rest, self._beta2, rest2 = (
            per_block(span, groups, name) for name in ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2")
        )
        self._now, self._before = Packed(replies), None
        if isinstance(previous, Messages):
            self._before = Packed(previous)
            m, p = replies.scale_of_blocks()[:, None], previous.scale_of_blocks()[:, None] * beta1
            stayed, changed = (((m + sign * p) / rest / gamma).square_() * rest2 for sign in (-1, 1))
            self._stayed, self._change = stayed, changed - stayed
        else:
            self._dense, self._beta1 = previous.view(span.count, -1), beta1
            self._factor = (
                torch.ones(span.count, 1, dtype=torch.float32, device="cpu") / rest / gamma
            ).square_() * rest2

    def update(self, tile: Tile, v: Tensor, scratch: Scratch) -> None:
        """v of a tile, in place. Overwrites scratch buffers 0 and 1."""
        beta2, bits = of_tile(tile, self._beta2), self._now.bits(tile)
        if self._before is not None:
            _decay(v, beta2, tile.of(self._stayed))
            v.addcmul_(scratch.floats(0, tile, bits ^ self._before.bits(tile)), tile.of(self._change))
        else:
            g = scratch.signs(0, tile, bits).mul_(self._now.scales(tile))
            g.sub_(torch.mul(tile.of(self._dense), of_tile(tile, self._beta1), out=scratch.buffer(1, tile)))
            _decay(v, beta2, g.square_().mul_(tile.of(self._factor)))
        clear_tails(tile, v)


def _decay(v: Tensor, beta2: float | Tensor, more: Tensor) -> None:
    """v = beta2 v + more"""
    if isinstance(beta2, Tensor):
        v.mul_(beta2).add_(more)
    else:
        torch.add(more, v, alpha=beta2, out=v)


def _largest(tile: Tile, value: Tensor, live: Tensor | None, scratch: Scratch) -> Tensor:
    """The maximum of each block over its valid and live elements. Overwrites scratch buffer 1."""
    clear_tails(tile, value)
    clear_masked(value, tile.live(live), scratch.buffer(1, tile))
    return torch.amax(value, 1)

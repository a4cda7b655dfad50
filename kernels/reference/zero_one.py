"""zero_one_full and zero_one_update in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from onebit.kernels.data.bits import packed
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from onebit.kernels.reference.adam import update_parameters
from onebit.kernels.reference.blocks import element_mask, gather, hyper_columns, parameter_column, signed
from onebit.kernels.reference.codec import message_values, unflagged_blocks


def zero_one_full(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg_sq: Tensor,
    replies: Messages,
    residual: Residual | None,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    live: Tensor,
    sums: Tensor,
    counts: Tensor,
) -> None:
    """m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2;  x = x - lr (mhat / (u + eps) + wd x);
    e = e + beta1 m;  live = v != 0;  sums[b], counts[b]: the sum of v over block b, and how many are not 0.

    A coordinate that was not live has no m and no e, and one with u = 0 does not move.
    """
    if bool(flags.any()):
        return
    h, mask = hyper_columns(span, hyper), element_mask(span, exp_avg_sq.device)
    least, at_zero = parameter_column(span, least_root), parameter_column(span, root_at_zero)
    v, g = exp_avg_sq.view(span.count, -1), gather(span, grads) * h.grad_scale
    was_live = (v != 0) | (at_zero != 0)
    m = torch.where(was_live, message_values(replies), 0)
    m = h.beta1 * m + h.one_minus_beta1 * g
    v.copy_(torch.where(mask, h.beta2 * v + h.one_minus_beta2 * (g * g), v))
    if residual is not None:
        e = torch.where(was_live, _left_out(span, residual), 0)
        residual.value.copy_(torch.where(mask, e + h.beta1 * m, 0).view(-1))
    _move(span, params, master, m, v, h, least, at_zero, torch.ones_like(mask))
    bits = (v != 0) & mask
    live.copy_(packed(bits).view(live.shape))
    sums.copy_(torch.where(mask, v, 0).sum(1))
    counts.copy_(bits.sum(1))


def zero_one_update(
    span: Span,
    params: Pointers,
    exp_avg_sq: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
) -> None:
    """x = x - lr (mhat / (u + eps) + wd x) with m = decode(replies).

    A coordinate with u = 0 never moves. Blocks of a flagged reply stay as they are.
    """
    h, v = hyper_columns(span, hyper), exp_avg_sq.view(span.count, -1)
    least, at_zero = parameter_column(span, least_root), parameter_column(span, root_at_zero)
    _move(span, params, master, message_values(replies), v, h, least, at_zero, unflagged_blocks(replies))


def _move(
    span: Span, params: Pointers, master: Tensor | None, m: Tensor, v: Tensor, h: Hyper, least: Tensor, at_zero: Tensor,
    moves: Tensor,
) -> None:  # fmt: skip
    """u = max(sqrt(vhat), least), or at_zero where v is 0"""
    u = torch.where(v != 0, torch.maximum(v.sqrt() * h.bias2, least), at_zero)
    direction = m * h.bias1 / (u + h.eps)
    moves = moves & (u != 0)
    update_parameters(
        span, params, master, lambda x: torch.where(moves, x - h.lr * (direction + h.weight_decay * x), x)
    )


def _left_out(span: Span, residual: Residual) -> Tensor:
    """e, which with a tensor scale is computed from the c of the last step: fp32 [blocks, block_size]."""
    e = residual.value.view(span.count, -1)
    if residual.scale is None:
        return e
    return e - signed(e >= 0, residual.scale.repeat_interleave(span.count // len(residual.scale))[:, None])

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
from onebit.kernels.reference.blocks import element_mask, flat, gather, hyper_columns, parameter_column, put, rows
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
    v, g = rows(span, exp_avg_sq), gather(span, grads) * h.grad_scale
    was_live = (v != 0) | (parameter_column(span, root_at_zero) != 0)
    m = torch.where(was_live, message_values(span, replies), 0)
    m = h.beta1 * m + h.one_minus_beta1 * g
    v = h.beta2 * v + h.one_minus_beta2 * (g * g)
    put(span, exp_avg_sq, v, mask)
    if residual is not None:
        e = torch.where(was_live, rows(span, residual.left_out()), 0)
        residual.value.copy_(flat(span, torch.where(mask, e + h.beta1 * m, 0)))
    u = used_root(span, v, h, least_root, root_at_zero)
    update_parameters(span, params, master, lambda x: moved(x, m, u, h))
    bits = (v != 0) & mask
    live.copy_(packed(flat(span, bits)))
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
    h, v = hyper_columns(span, hyper), rows(span, exp_avg_sq)
    u = used_root(span, v, h, least_root, root_at_zero)
    m, unflagged = message_values(span, replies), unflagged_blocks(span, replies)
    update_parameters(span, params, master, lambda x: torch.where(unflagged, moved(x, m, u, h), x))


def used_root(span: Span, v: Tensor, h: Hyper, least_root: Tensor, root_at_zero: Tensor) -> Tensor:
    """u = max(sqrt(vhat), least_root_p), or root_at_zero_p where v is 0: fp32 [blocks, block_size]."""
    least, at_zero = parameter_column(span, least_root), parameter_column(span, root_at_zero)
    return torch.where(v != 0, torch.maximum(v.sqrt() * h.bias2, least), at_zero)


def moved(x: Tensor, m: Tensor, u: Tensor, h: Hyper) -> Tensor:
    """x - lr (mhat / (u + eps) + wd x); x where u = 0"""
    return torch.where(u != 0, x - h.lr * (m * h.bias1 / (u + h.eps) + h.weight_decay * x), x)

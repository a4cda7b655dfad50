"""adam_warmup and adam_update in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages
from onebit.kernels.reference.blocks import element_mask, gather, hyper_columns, parameter_column, put, rows, scatter
from onebit.kernels.reference.codec import message_values, unflagged_blocks


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
    """m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2;
    x = x - lr (mhat / (sqrt(vhat) + eps) + wd x);  sums[b] = sum of v over block b.
    """
    if bool(flags.any()):
        return
    m, v = update_moments(span, grads, exp_avg, exp_avg_sq, hyper)
    if sums is not None:
        sums.copy_(v.masked_fill(~element_mask(span, v.device), 0).sum(1))
    h = hyper_columns(span, hyper)
    update_parameters(span, params, master, lambda x: x - h.lr * direction(h, m, v, x))


def adam_update(
    span: Span,
    params: Pointers,
    d: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    coefficient: Tensor | None = None,
) -> None:
    """x = x - lr c_p (m d + wd x) with m = decode(replies); c_p = 1 without `coefficient`.

    A coordinate with d = 0 never moves. Blocks of a flagged reply stay as they are.
    """
    h, m, d = hyper_columns(span, hyper), message_values(span, replies), rows(span, d)
    lr = h.lr if coefficient is None else h.lr * parameter_column(span, coefficient)
    moves = unflagged_blocks(span, replies) & (d != 0)
    update_parameters(span, params, master, lambda x: torch.where(moves, x - lr * (m * d + h.weight_decay * x), x))


def update_moments(
    span: Span, grads: Pointers, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Tensor
) -> tuple[Tensor, Tensor]:
    """m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2, in place; both as [blocks, block_size]."""
    h, mask = hyper_columns(span, hyper), element_mask(span, exp_avg.device)
    g = gather(span, grads) * h.grad_scale
    m = h.beta1 * rows(span, exp_avg) + h.one_minus_beta1 * g
    v = h.beta2 * rows(span, exp_avg_sq) + h.one_minus_beta2 * (g * g)
    put(span, exp_avg, m, mask)
    put(span, exp_avg_sq, v, mask)
    return m, v


def direction(h: Hyper, m: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """mhat / (sqrt(vhat) + eps) + wd x"""
    return m * h.bias1 / (v.sqrt() * h.bias2 + h.eps) + h.weight_decay * x


def update_parameters(span: Span, params: Pointers, master: Tensor | None, step: Callable[[Tensor], Tensor]) -> None:
    """x = step(x), on the master copy where there is one; the parameter is then that copy, rounded."""
    if master is None:
        return scatter(span, params, step)
    x = step(rows(span, master))
    put(span, master, x, element_mask(span, master.device))
    return scatter(span, params, lambda _: x)

"""zero_one_local and zero_one_sync in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from onebit.kernels.reference.adam import update_parameters
from onebit.kernels.reference.blocks import element_mask, gather, hyper_columns, parameter_column, put, rows
from onebit.kernels.reference.codec import message_values, unflagged_blocks
from onebit.kernels.reference.zero_one import moved, used_root


def zero_one_local(
    span: Span,
    params: Pointers,
    grads: Pointers,
    exp_avg_sq: Tensor,
    exp_avg: Tensor,
    residual: Residual | None,
    master: Tensor | None,
    hyper: Tensor,
    flags: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
) -> None:
    """m = beta1 m + (1 - beta1) g';  x = x - lr (mhat / (u + eps) + wd x);  e = e + lr mhat.

    Nothing of a coordinate with u = 0 changes, but for what a tensor scale left out, which is 0 there.
    """
    if bool(flags.any()):
        return
    h, v, m = hyper_columns(span, hyper), rows(span, exp_avg_sq), rows(span, exp_avg)
    u, mask = used_root(span, v, h, least_root, root_at_zero), element_mask(span, v.device)
    g = gather(span, grads) * h.grad_scale
    m = torch.where(u != 0, h.beta1 * m + h.one_minus_beta1 * g, m)
    put(span, exp_avg, m, mask)
    if residual is not None:
        e = rows(span, residual.left_out())
        held = e if residual.scale is None else torch.zeros_like(e)
        put(span, residual.value, torch.where(u != 0, e + h.lr * h.bias1 * m, held), mask)
    update_parameters(span, params, master, lambda x: moved(x, m, u, h))


def zero_one_sync(
    span: Span,
    params: Pointers,
    exp_avg_sq: Tensor,
    exp_avg: Tensor,
    anchor: Tensor,
    replies: Messages,
    master: Tensor | None,
    hyper: Tensor,
    least_root: Tensor,
    root_at_zero: Tensor,
    decay: Tensor,
    factor: Tensor,
) -> None:
    """x = decay_p anchor - U / (u + eps) with U = decode(replies);  anchor = x as it was stored;  m = factor_p U.

    Where u = 0: x = anchor and m = 0. Blocks of a flagged reply stay as they are.
    """
    h, v = hyper_columns(span, hyper), rows(span, exp_avg_sq)
    u, total = used_root(span, v, h, least_root, root_at_zero), message_values(span, replies)
    start, unflagged = rows(span, anchor), unflagged_blocks(span, replies)
    end = torch.where(u != 0, parameter_column(span, decay) * start - total / (u + h.eps), start)
    update_parameters(span, params, master, lambda x: torch.where(unflagged, end, x))
    written = element_mask(span, v.device) & unflagged
    put(span, anchor, gather(span, params) if master is None else end, written)
    put(span, exp_avg, torch.where(u != 0, parameter_column(span, factor) * total, 0), written)

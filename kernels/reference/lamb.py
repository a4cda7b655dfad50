"""lamb_warmup and lamb_statistics in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages
from onebit.kernels.reference.adam import direction, update_moments, update_parameters
from onebit.kernels.reference.blocks import (
    element_mask,
    gather,
    hyper_columns,
    owner_of_blocks,
    parameter_column,
    put,
    rows,
)
from onebit.kernels.reference.codec import message_values, momentum_values


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
    between: Callable[[], None] | None = None,
) -> None:
    """u = mhat / (sqrt(vhat) + eps) + wd x;  c = clip(||x|| / ||u||, min_coeff, max_coeff), 1 where a norm is 0;
    x = x - lr c u;  c_avg = b3 c_avg + (1 - b3) c.
    """
    if bool(flags.any()):
        if between is not None:
            between()
        return
    m, v = update_moments(span, grads, exp_avg, exp_avg_sq, hyper)
    h, owner = hyper_columns(span, hyper), owner_of_blocks(span, v.device)
    mask = element_mask(span, v.device)
    x = gather(span, params) if master is None else rows(span, master)
    u = direction(h, m, v, x)
    square = torch.zeros(2, span.layout.parameters, dtype=torch.float32, device=v.device)
    for row, partial, value in zip(square, state.partial, (x, u), strict=True):
        of_blocks = torch.where(mask, value * value, 0).sum(1)
        partial.copy_(of_blocks)
        row.index_add_(0, owner, of_blocks)
    x_norm, u_norm = square.sqrt()
    c = torch.where((x_norm > 0) & (u_norm > 0), (x_norm / u_norm).clamp(min_coeff, max_coeff), 1.0)
    state.coefficient.copy_(c)
    state.average.mul_(coeff_beta).add_(c * (1 - coeff_beta))
    if between is not None:
        between()
        c = state.coefficient
    update_parameters(span, params, master, lambda x: x - h.lr * c[owner][:, None] * direction(h, m, v, x))


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
    """ghat = (m - beta1 m_prev) / (1 - beta1);  v = beta2 v + (1 - beta2) ghat^2;
    r = max over a parameter of v_T / v, clipped to within factor_threshold of the last r, then to
    [factor_min, factor_max];  c = r c_avg.

    With `gamma`: ghat = ((m - beta1 m_prev) / (1 - beta1)) / gamma_p, and v_T comes back from 1 / (d gamma_p) - eps.
    """
    if bool(replies.flags.any()):
        return
    h, owner, mask = hyper_columns(span, hyper), owner_of_blocks(span, d.device), element_mask(span, d.device)
    g = (message_values(span, replies) - h.beta1 * momentum_values(span, previous)) / h.one_minus_beta1
    if gamma is not None:
        g = g / parameter_column(span, gamma)
    v = h.beta2 * rows(span, exp_avg_sq) + h.one_minus_beta2 * (g * g)
    put(span, exp_avg_sq, v, mask)
    d = rows(span, d)
    frozen = 1 / (d if gamma is None else d * parameter_column(span, gamma))  # sqrt(v_T) + eps
    if ratio == "variance":
        per_element = (frozen - h.eps).clamp(min=0).square() / v
    else:
        per_element = frozen / (v.sqrt() + h.eps)
    counted = element_mask(span, d.device, live) & (v > 0) & (d > 0)
    largest = torch.where(counted, per_element, 0).amax(1)
    state.partial[0].copy_(largest)
    r = torch.zeros_like(state.ratio).scatter_reduce_(0, owner, largest, "amax")
    r = torch.where(r > 0, r, 1.0)
    r = torch.clamp(r, (1 - factor_threshold) * state.ratio, (1 + factor_threshold) * state.ratio)
    state.ratio.copy_(r.clamp(factor_min, factor_max))
    state.coefficient.copy_(state.ratio * state.average)

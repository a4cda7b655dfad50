"""Every pass in a few lines of plain PyTorch: the oracle of the other two backends, on any device.

Elementwise steps are in the order and rounding of the fused kernels, so that signs agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from onebit.kernels.data.hyper import LARGEST, Hyper
from onebit.kernels.data.lamb_state import LambState
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
    """c = beta1 m + (1 - beta1) g' + e;  out = compress(c);  e = c - decode(out).

    Blocks [k S, (k+1) S) of the span go into message k of `out`. With `flags` set only the headers are written.

    `live` uint8 [elements of the span / 8], packed as bits are in a message: a coordinate without its bit is dead and
    counts as padding does. There c and e are 0, the bit is 0, and no scale sums or counts it.

    `gamma` fp32 [parameters]: messages hold gamma_p m, and so does `momentum`, dense or packed:
    c = beta1 m + gamma_p ((1 - beta1) g') + e.
    """
    out.header.copy_(torch.tensor(out.format.header, dtype=torch.int32))
    out.flags.copy_(flags.expand(out.rows))
    if bool(flags.any()):
        return
    h = _hyper(span, hyper)
    y = h.one_minus_beta1 * (_gather(span, grads) * h.grad_scale)
    if gamma is not None:
        y = _of_owner(span, gamma) * y
    if momentum is not None:
        y = h.beta1 * _momentum(span, momentum) + y
    _encode(span, y, residual, out, live)


def average(span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None) -> None:
    """C = mean_i decode(received_i) + E;  out = compress(C);  E = C - decode(out).

    `span` is this rank's shard. If any sender flagged its message, only the header of `out` is written. `live` is the
    shard's, as in `compress`.
    """
    out.header.copy_(torch.tensor(out.format.header, dtype=torch.int32))
    out.flags.copy_(received.flags.max().expand(out.rows))
    if bool(out.flags.any()):
        return
    total = torch.zeros(span.count, span.layout.block_size, dtype=torch.float32, device=received.buffer.device)
    for i in range(received.rows):
        total = total + _decode(received.slice(i, 1))
    _encode(span, total * (1 / received.rows), residual, out, live)


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """out = scale * bit; NaN where the message is flagged, which is what an uncompressed mean would give."""
    _scatter(span, out, lambda _: torch.where(_accepted(messages), _decode(messages), torch.nan))


def scan(span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
    """flags[0] = 1 if any |g'| is NaN, inf or beyond LARGEST;  squares[b] = sum of g'^2 over block b."""
    g = _gather(span, grads) * _hyper(span, hyper).grad_scale
    flags.masked_fill_(~(g.abs() <= LARGEST).all(), 1)
    if squares is not None:
        squares.copy_((g * g).sum(1))


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
    m, v = _moments(span, grads, exp_avg, exp_avg_sq, hyper)
    if sums is not None:
        sums.copy_(v.masked_fill(~_mask(span, v.device), 0).sum(1))
    h = _hyper(span, hyper)
    _update(span, params, master, lambda x: x - h.lr * _direction(h, m, v, x))


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
    h, m, d = _hyper(span, hyper), _decode(replies), d.view(span.count, -1)
    lr = h.lr if coefficient is None else h.lr * _of_owner(span, coefficient)
    moves = _accepted(replies) & (d != 0)
    _update(span, params, master, lambda x: torch.where(moves, x - lr * (m * d + h.weight_decay * x), x))


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
    """u = mhat / (sqrt(vhat) + eps) + wd x;  c = clip(||x|| / ||u||, min_coeff, max_coeff), 1 where a norm is 0;
    x = x - lr c u;  c_avg = b3 c_avg + (1 - b3) c.
    """
    if bool(flags.any()):
        return
    m, v = _moments(span, grads, exp_avg, exp_avg_sq, hyper)
    h, owner = _hyper(span, hyper), _owner(span, v.device)
    mask = _mask(span, v.device)
    x = _gather(span, params) if master is None else master.view(span.count, -1)
    u = _direction(h, m, v, x)
    square = torch.zeros(2, span.layout.parameters, dtype=torch.float32, device=v.device)
    for row, value in zip(square, (x, u), strict=True):
        row.index_add_(0, owner, torch.where(mask, value * value, 0).sum(1))
    x_norm, u_norm = square.sqrt()
    c = torch.where((x_norm > 0) & (u_norm > 0), (x_norm / u_norm).clamp(min_coeff, max_coeff), 1.0)
    state.coefficient.copy_(c)
    state.average.mul_(coeff_beta).add_(c * (1 - coeff_beta))
    _update(span, params, master, lambda x: x - h.lr * c[owner][:, None] * _direction(h, m, v, x))


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

    v_T comes back from d = 1 / (sqrt(v_T) + eps), so v has to be bias-corrected at the freeze as v_T is. The span is
    the whole layout. Either all replies are flagged or none is, since every server hears of every worker's flag.

    `live` as in `compress`: the maximum passes dead coordinates over; what v is there means nothing.

    `gamma` fp32 [parameters]: m and m_prev, dense or packed, hold gamma_p times the momentum, and d makes up for it:
    ghat = ((m - beta1 m_prev) / (1 - beta1)) / gamma_p;  d = 1 / ((sqrt(v_T) + eps) gamma_p), so that m d needs no
    gamma;  v_T comes back from 1 / (d gamma_p) - eps.
    """
    if bool(replies.flags.any()):
        return
    h, owner, mask = _hyper(span, hyper), _owner(span, d.device), _mask(span, d.device)
    g = (_decode(replies) - h.beta1 * _momentum(span, previous)) / h.one_minus_beta1
    if gamma is not None:
        g = g / _of_owner(span, gamma)
    v = exp_avg_sq.view(span.count, -1)
    v.copy_(torch.where(mask, h.beta2 * v + h.one_minus_beta2 * (g * g), v))
    d = d.view(span.count, -1)
    frozen = 1 / (d if gamma is None else d * _of_owner(span, gamma))  # sqrt(v_T) + eps
    if ratio == "variance":
        per_element = (frozen - h.eps).clamp(min=0).square() / v
    else:
        per_element = frozen / (v.sqrt() + h.eps)
    counted = _mask(span, d.device, live) & (v > 0) & (d > 0)
    largest = torch.where(counted, per_element, 0).amax(1)
    r = torch.zeros_like(state.ratio).scatter_reduce_(0, owner, largest, "amax")
    r = torch.where(r > 0, r, 1.0)
    r = torch.clamp(r, (1 - factor_threshold) * state.ratio, (1 + factor_threshold) * state.ratio)
    state.ratio.copy_(r.clamp(factor_min, factor_max))
    state.coefficient.copy_(state.ratio * state.average)


def _encode(span: Span, y: Tensor, residual: Residual, out: Messages, live: Tensor | None) -> None:
    mask = _mask(span, y.device, live)
    e = residual.value.view(span.count, -1)
    if residual.scale is not None:
        e = e - _signed(e >= 0, _per_block(residual.scale, span)[:, None])
    c = torch.where(mask, y + e, 0)
    magnitude = (c.abs() if out.format.norm == "l1" else c * c).sum(1)
    count = mask.sum(1)
    if residual.scale is not None:
        magnitude, count = (t.view(out.rows, -1).sum(1) for t in (magnitude, count))
    scale = magnitude / count.clamp(min=1)
    if out.format.norm == "l2":
        scale = scale.sqrt()
    out.scales.copy_(scale.view(out.scales.shape))
    bits = (c >= 0) & mask
    weights = 2 ** torch.arange(8, dtype=torch.int32, device=y.device)
    packed = (bits.unflatten(1, (-1, 8)) * weights).sum(2).to(torch.uint8)
    out.bits.copy_(packed.view(out.bits.shape))
    if residual.scale is None:
        residual.value.copy_(torch.where(mask, c - _signed(bits, scale[:, None]), 0).view(-1))
    else:
        residual.value.copy_(c.view(-1))
        residual.scale.copy_(scale)


def _decode(messages: Messages) -> Tensor:
    """fp32 [blocks, block_size]"""
    return _signed(_unpack(messages.bits, messages.format.block_size), messages.scale_of_blocks()[:, None])


def _unpack(packed: Tensor, block_size: int) -> Tensor:
    """bool [blocks, block_size]"""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).view(-1, block_size) != 0


def _momentum(span: Span, momentum: Tensor | Messages) -> Tensor:
    return _decode(momentum) if isinstance(momentum, Messages) else momentum.view(span.count, -1)


def _moments(span: Span, grads: Pointers, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
    h, mask = _hyper(span, hyper), _mask(span, exp_avg.device)
    g = _gather(span, grads) * h.grad_scale
    m, v = exp_avg.view(span.count, -1), exp_avg_sq.view(span.count, -1)
    m.copy_(torch.where(mask, h.beta1 * m + h.one_minus_beta1 * g, m))
    v.copy_(torch.where(mask, h.beta2 * v + h.one_minus_beta2 * (g * g), v))
    return m, v


def _direction(h: Hyper, m: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return m * h.bias1 / (v.sqrt() * h.bias2 + h.eps) + h.weight_decay * x


def _update(span: Span, params: Pointers, master: Tensor | None, step: Callable[[Tensor], Tensor]) -> None:
    if master is None:
        return _scatter(span, params, step)
    x, mask = master.view(span.count, -1), _mask(span, master.device)
    x.copy_(torch.where(mask, step(x), x))
    return _scatter(span, params, lambda _: x)


def _accepted(messages: Messages) -> Tensor:
    """bool [blocks, 1]: which blocks came in messages without a flag."""
    good = messages.flags == 0
    return good.repeat_interleave(messages.format.shard_blocks)[:, None]


def _signed(positive: Tensor, scale: Tensor) -> Tensor:
    return torch.where(positive, scale, -scale)


def _per_block(values: Tensor, span: Span) -> Tensor:
    return values.repeat_interleave(span.count // len(values))


def _owner(span: Span, device: torch.device) -> Tensor:
    return torch.from_numpy(span.layout.owner(span.first, span.count)).to(device)


def _of_owner(span: Span, values: Tensor) -> Tensor:
    """[blocks, 1]: one value a parameter, given to its blocks."""
    return values[_owner(span, values.device)][:, None]


def _mask(span: Span, device: torch.device, live: Tensor | None = None) -> Tensor:
    """bool [blocks, block_size]: which elements are valid, and live."""
    counts = torch.from_numpy(span.counts()).to(device)
    mask = torch.arange(span.layout.block_size, device=device) < counts[:, None]
    return mask if live is None else mask & _unpack(live, span.layout.block_size)


def _hyper(span: Span, hyper: Tensor) -> Hyper:
    """Each hyper-parameter as a column [blocks, 1] instead of a float."""
    group = torch.from_numpy(span.layout.group[span.layout.owner(span.first, span.count)])
    return Hyper._make(hyper[group.to(hyper.device)].unsqueeze(-1).unbind(1))


def _gather(span: Span, pointers: Pointers) -> Tensor:
    """fp32 [blocks, block_size], zero where there is nothing."""
    flat = torch.zeros(span.elements, dtype=torch.float32, device=pointers.device)
    for s in span.segments():
        tensor = pointers.tensors[s.parameter]
        if tensor is not None:
            flat[s.offset : s.offset + s.stop - s.start] = tensor.view(-1)[s.start : s.stop]
    return flat.view(span.count, -1)


def _scatter(span: Span, pointers: Pointers, step: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors' elements x by step(x)."""
    flat = step(_gather(span, pointers)).reshape(-1)
    for s in span.segments():
        tensor = pointers.tensors[s.parameter]
        if tensor is not None:
            tensor.view(-1)[s.start : s.stop] = flat[s.offset : s.offset + s.stop - s.start]

"""compress, average, restore and decode in plain PyTorch.

Elementwise steps are in the order and rounding of the fused kernels, so that signs agree to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebit.kernels.data.bits import packed, unpacked
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import ABOVE, Messages
from onebit.kernels.reference.blocks import (
    element_mask,
    gather,
    hyper_columns,
    parameter_column,
    scatter,
    signed,
)


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

    With `gamma`: c = beta1 m + gamma_p ((1 - beta1) g') + e.
    """
    _keep(residual)
    out.header.copy_(torch.tensor(out.format.header, dtype=torch.int32))
    out.flags.copy_(flags.expand(out.rows))
    if bool(flags.any()):
        return
    h = hyper_columns(span, hyper)
    y = h.one_minus_beta1 * (gather(span, grads) * h.grad_scale)
    if gamma is not None:
        y = parameter_column(span, gamma) * y
    if momentum is not None:
        y = h.beta1 * momentum_values(span, momentum) + y
    _encode(span, y, residual, out, live)


def average(span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None) -> None:
    """C = mean_i decode(received_i) + E;  out = compress(C), in 1 bit or 2;  E = C - decode(out)."""
    _keep(residual)
    out.header.copy_(torch.tensor(out.format.header, dtype=torch.int32))
    out.flags.copy_((received.flags != 0).any().expand(out.rows))
    if bool(out.flags.any()):
        return
    total = torch.zeros(span.count, span.layout.block_size, dtype=torch.float32, device=received.buffer.device)
    for i in range(received.rows):
        total = total + message_values(received.slice(i, 1))
    encode = _encode if out.format.bits == 1 else _encode_two_bits
    encode(span, total * (1 / received.rows), residual, out, live)


def restore(now: Tensor, kept: Tensor, flags: Tensor) -> None:
    """now = kept where flags is set."""
    if int(flags):
        now.copy_(kept)


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """x = scale sigma; NaN where the message is flagged, which is what an uncompressed mean would give."""
    scatter(span, out, lambda _: torch.where(unflagged_blocks(messages), message_values(messages), torch.nan))


def _keep(residual: Residual) -> None:
    if residual.before is not None:
        residual.before.copy_(residual.value)


def message_values(messages: Messages) -> Tensor:
    """fp32 [blocks, block_size]: what the messages' bits and scales stand for, the mean over a block's copies."""
    size, scales = messages.format.block_size, messages.scale_of_blocks()
    if messages.format.bits == 2:
        positive, large = (unpacked(part).view(-1, size) for part in messages.bits.chunk(2, -1))
        values = signed(positive, torch.where(large, scales[:, 1:], scales[:, :1]))
    else:
        values = signed(unpacked(messages.bits).view(-1, size), scales[:, None])
    if messages.copies == 1:
        return values
    total = torch.zeros(len(values) // messages.copies, size, dtype=torch.float32, device=values.device)
    for copy in values.view(-1, messages.copies, messages.format.shard_blocks, size).unbind(1):
        total = total + copy.reshape(-1, size)
    return total * (1 / messages.copies)


def momentum_values(span: Span, momentum: Tensor | Messages) -> Tensor:
    """fp32 [blocks, block_size]: momentum, which is kept as the messages that brought it or as a dense tensor."""
    return message_values(momentum) if isinstance(momentum, Messages) else momentum.view(span.count, -1)


def unflagged_blocks(messages: Messages) -> Tensor:
    """bool [blocks, 1]: which blocks came in messages without a flag."""
    good = (messages.flags.view(-1, messages.copies) == 0).all(1)
    return good.repeat_interleave(messages.format.shard_blocks)[:, None]


def _encode(span: Span, y: Tensor, residual: Residual, out: Messages, live: Tensor | None) -> None:
    """c = y + e into bits and scales of `out`; what they leave out becomes the residual."""
    mask = element_mask(span, y.device, live)
    e = residual.value.view(span.count, -1)
    if residual.scale is not None:
        scale_of_blocks = residual.scale.repeat_interleave(span.count // len(residual.scale))
        e = e - signed(e >= 0, scale_of_blocks[:, None])
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
    out.bits.copy_(packed(bits).view(out.bits.shape))
    if residual.scale is None:
        residual.value.copy_(torch.where(mask, c - signed(bits, scale[:, None]), 0).view(-1))
    else:
        residual.value.copy_(c.view(-1))
        residual.scale.copy_(scale)


def _encode_two_bits(span: Span, y: Tensor, residual: Residual, out: Messages, live: Tensor | None) -> None:
    """c = y + e into a sign and one of two sizes, the means of the block's small and large elements."""
    mask = element_mask(span, y.device, live)
    c = torch.where(mask, y + residual.value.view(span.count, -1), 0)
    size = c.abs()
    large = size > ABOVE * _mean(size, mask)
    small_size, large_size = _mean(size, mask & ~large), _mean(size, large)
    positive = (c >= 0) & mask
    out.scales.copy_(torch.cat([small_size, large_size], 1).view(out.scales.shape))
    out.bits.copy_(torch.cat([packed(positive), packed(large)], 1).view(out.bits.shape))
    left = c - signed(positive, torch.where(large, large_size, small_size))
    residual.value.copy_(torch.where(mask, left, 0).view(-1))


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """[blocks, 1]: of those that the mask has; 0 where it has none."""
    return (torch.where(mask, values, 0).sum(1) / mask.sum(1).clamp(min=1))[:, None]

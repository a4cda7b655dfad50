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
from onebit.kernels.data.wire import ABOVE, MOST, Messages
from onebit.kernels.reference.blocks import (
    element_mask,
    flat,
    gather,
    hyper_columns,
    parameter_column,
    room,
    rows,
    scatter,
    signed,
)
from onebit.kernels.reference.rotation import rotated, rotated_back


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
    encode = _encode if out.format.bits == 1 else _encode_two_bits
    encode(span, _mean_of_rows(span, received), residual, out, live)


def restore(now: Tensor, kept: Tensor, flags: Tensor) -> None:
    """now = kept where flags is set."""
    if int(flags):
        now.copy_(kept)


def decode(span: Span, messages: Messages, out: Pointers) -> None:
    """x = scale sigma; NaN where the message is flagged, which is what an uncompressed mean would give."""
    values = torch.where(unflagged_blocks(span, messages), message_values(span, messages), torch.nan)
    scatter(span, out, lambda _: values)


def _keep(residual: Residual) -> None:
    if residual.before is not None:
        residual.before.copy_(residual.value)


def message_values(span: Span, messages: Messages) -> Tensor:
    """fp32 [blocks, block_size]: what the messages' bits and scales stand for, the mean over a block's copies."""
    inside = room(span, messages.buffer.device)
    total = torch.zeros(inside.shape, dtype=torch.float32, device=inside.device)
    for bits, scales in zip(messages.bits_of(span), messages.scales_of(span), strict=True):
        planes = _planes(inside, bits, messages.format.bits)
        if messages.format.bits == 2:
            values = signed(planes[:, 0], torch.where(planes[:, 1], scales[:, 1:], scales[:, :1]))
        else:
            values = signed(planes[:, 0], scales[:, None])
        total = values if messages.copies == 1 else total + values
    mean = total if messages.copies == 1 else total * (1 / messages.copies)
    return rotated_back(mean, inside.sum(1)) if messages.format.rotated else mean


def _mean_of_rows(span: Span, received: Messages) -> Tensor:
    """fp32 [blocks, block_size], of messages that all hold this shard."""
    return message_values(span, Messages(received.buffer, received.format, received.rows))


def momentum_values(span: Span, momentum: Tensor | Messages) -> Tensor:
    """fp32 [blocks, block_size]: momentum, which is kept as the messages that brought it or as a dense tensor."""
    return message_values(span, momentum) if isinstance(momentum, Messages) else rows(span, momentum)


def unflagged_blocks(span: Span, messages: Messages) -> Tensor:
    """bool [blocks, 1]: which blocks came in messages without a flag."""
    good = (messages.flags.view(-1, messages.copies) == 0).all(1)
    return of_blocks(span, good)[:, None]


def of_blocks(span: Span, values: Tensor) -> Tensor:
    """[blocks]: from one value a shard, the value of each block's."""
    return values.repeat_interleave(torch.tensor([shard.count for shard in span.shards()], device=values.device))


def _planes(inside: Tensor, bits: Tensor, per_element: int) -> Tensor:
    """bool [blocks, per_element, block_size], from the bits of one block after the other."""
    places = inside[:, None, :].expand(-1, per_element, -1)
    found = torch.zeros(places.shape, dtype=torch.bool, device=bits.device)
    found[places] = unpacked(bits)
    return found


def _put_bits(span: Span, out: Messages, planes: Tensor) -> None:
    places = room(span, planes.device)[:, None, :].expand(planes.shape)
    bits, start = packed(planes[places]), 0
    for row, shard in enumerate(span.shards()):
        own = out.bits(row, shard)
        own.copy_(bits[start : start + len(own)])
        start += len(own)


def _put_scales(span: Span, out: Messages, scales: Tensor) -> None:
    """scales: [blocks, ..], or one a message."""
    start = 0
    for row, shard in enumerate(span.shards()):
        own = out.scales(row, shard)
        own.copy_(scales.reshape(-1)[start : start + len(own)])
        start += len(own)


def _encode(span: Span, y: Tensor, residual: Residual, out: Messages, live: Tensor | None) -> None:
    """c = y + e into bits and scales of `out`; what they leave out becomes the residual."""
    mask = element_mask(span, y.device, live)
    e = rows(span, residual.value)
    if residual.scale is not None:
        e = e - signed(e >= 0, of_blocks(span, residual.scale)[:, None])
    c = torch.where(mask, y + e, 0)
    if out.format.rotated:
        _encode_rotated(span, c, mask, residual, out)
        return
    magnitude = (c * c if out.format.norm == "l2" else c.abs()).sum(1)
    count = mask.sum(1)
    if residual.scale is not None:
        counts = [shard.count for shard in span.shards()]
        magnitude, count = (torch.stack([part.sum() for part in t.split(counts)]) for t in (magnitude, count))
    scale = magnitude / count.clamp(min=1)
    if out.format.norm == "l2":
        scale = scale.sqrt()
    elif out.format.norm == "unbiased":
        scale = _unbiased(c, count)
    bits = (c >= 0) & mask
    _put_scales(span, out, scale)
    _put_bits(span, out, bits[:, None])
    if residual.scale is None:
        residual.value.copy_(flat(span, torch.where(mask, c - signed(bits, scale[:, None]), 0)))
    else:
        residual.value.copy_(flat(span, c))
        residual.scale.copy_(scale)


def _unbiased(c: Tensor, count: Tensor) -> Tensor:
    """[blocks]: ||c||_2^2 / ||c||_1 of each row, at most MOST times the root mean square of `count` elements."""
    sizes, squares = c.abs().sum(1), (c * c).sum(1)
    scale = torch.where(sizes > 0, squares / sizes, 0)
    return torch.minimum(scale, MOST * (squares / count.clamp(min=1)).sqrt())


def _encode_rotated(span: Span, c: Tensor, mask: Tensor, residual: Residual, out: Messages) -> None:
    """c, 0 where the mask has nothing."""
    inside = room(span, c.device)
    lengths = inside.sum(1)
    z = torch.where(inside, rotated(c, lengths), 0)
    scale = _unbiased(z, lengths) / (lengths & -lengths)
    bits = z >= 0
    _put_scales(span, out, scale)
    _put_bits(span, out, bits[:, None])
    left = c - rotated_back(signed(bits, scale[:, None]), lengths)
    residual.value.copy_(flat(span, torch.where(mask, left, 0)))


def _encode_two_bits(span: Span, y: Tensor, residual: Residual, out: Messages, live: Tensor | None) -> None:
    """c = y + e into a sign and one of two sizes, the means of the block's small and large elements."""
    mask = element_mask(span, y.device, live)
    c = torch.where(mask, y + rows(span, residual.value), 0)
    size = c.abs()
    large = size > ABOVE * _mean(size, mask)
    small_size, large_size = _mean(size, mask & ~large), _mean(size, large)
    positive = (c >= 0) & mask
    _put_scales(span, out, torch.cat([small_size, large_size], 1))
    _put_bits(span, out, torch.stack([positive, large], 1))
    left = c - signed(positive, torch.where(large, large_size, small_size))
    residual.value.copy_(flat(span, torch.where(mask, left, 0)))


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """[blocks, 1]: of those that the mask has; 0 where it has none."""
    return (torch.where(mask, values, 0).sum(1) / mask.sum(1).clamp(min=1))[:, None]

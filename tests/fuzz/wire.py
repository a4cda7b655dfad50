"""Messages of random bytes: what reads them writes nowhere else, agrees with its oracle, refuses foreign headers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit.kernels import cpu
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import Layout, Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, MessageError, Messages
from tests.fuzz.mutate import Source, pick
from tests.wire import contents

_GUARD = 64
_MARK = 0x7FC0BEEF  # a NaN that no pass makes


class Guarded:
    """fp32 tensors with marked elements on both sides."""

    def __init__(self, source: Source, numels: list[int]) -> None:
        self.whole = [torch.full((n + 2 * _GUARD,), _MARK, dtype=torch.int32) for n in numels]
        self.tensors = [w.view(torch.float32)[_GUARD : len(w) - _GUARD] for w in self.whole]
        for tensor in self.tensors:
            tensor.copy_(torch.from_numpy(source.standard_normal(tensor.numel(), dtype=np.float32)))

    def check(self) -> None:
        for w in self.whole:
            if not bool((w[:_GUARD] == _MARK).all() & (w[len(w) - _GUARD :] == _MARK).all()):
                raise AssertionError("written beyond a tensor's ends")

    def copy(self) -> Guarded:
        other = object.__new__(Guarded)
        other.whole = [w.clone() for w in self.whole]
        other.tensors = [w.view(torch.float32)[_GUARD : len(w) - _GUARD] for w in other.whole]
        return other


class Wire:
    def case(self, source: Source) -> str:
        numels = [int(n) for n in source.integers(0, 150, size=int(source.integers(1, 4)))]
        ranks, chunks = int(source.integers(1, 4)), int(source.integers(1, 3))
        layout = Layout(numels, block_size=pick(source, (32, 64, 96)), ranks=ranks, chunks=chunks)
        scale = pick(source, ("block", "tensor"))
        norms = ("l1", "l2", "unbiased", "rotated") if scale == "block" else ("l1", "l2")
        form = Format(layout, scale, pick(source, norms))
        chunk = int(source.integers(chunks))
        span, shard = layout.chunk(chunk), layout.shard(chunk, int(source.integers(ranks)))
        work, copies = pick(source, (_decode, _update, _average)), 1
        if work is not _average:  # of replies, which are 1 bit, or 2, or every rank's own
            kind = pick(source, (1, 2, "direct"))
            form, copies = form.with_bits(2 if kind == 2 else 1), int(source.integers(1, 5)) if kind == "direct" else 1
        shards = [shard] * ranks if work is _average else span.shards()
        messages, header = _messages(source, form, shards, copies)
        outcome = _check_header(messages, header)
        work(source, layout, shard if work is _average else span, messages)
        return f"{work.__name__[1:]}, {outcome}"


def _messages(source: Source, form: Format, shards: list[Span], copies: int) -> tuple[Messages, bool]:
    """Of random bytes, with guards; and whether their headers are as they should be."""
    rows = len(shards) * copies
    whole = torch.from_numpy(np.frombuffer(source.bytes(rows * form.nbytes + 2 * _GUARD), np.uint8).copy())
    messages = Messages(whole[_GUARD : _GUARD + rows * form.nbytes].view(rows, form.nbytes), form, copies)
    kind = source.random()
    if kind < 0.8:
        messages.header.copy_(torch.tensor(form.header, dtype=torch.int32))
        messages.flags.copy_(torch.from_numpy(source.integers(0, 2, size=rows) * (source.random() < 0.2)))
    if kind < 0.6:
        for row in range(rows):
            scales = messages.scales(row, shards[row // copies])
            scales.copy_(torch.from_numpy(source.random(len(scales), dtype=np.float32)))
    if 0.6 <= kind < 0.75:
        bit = int(source.integers(128))
        if bit != 32:  # the flag itself
            messages.buffer[int(source.integers(rows)), bit // 8] ^= 1 << bit % 8
    words = messages.header.tolist()
    good = all((m, 0, f, b) == form.header and flag in (0, 1) for m, flag, f, b in words)
    return messages, good


def _check_header(messages: Messages, good: bool) -> str:
    try:
        messages.check("a phase")
    except MessageError:
        if good:
            raise
        return "refused"
    if not good:
        raise AssertionError(f"a header that is none was let through: {messages.header.tolist()}")
    return "accepted"


def _decode(source: Source, layout: Layout, span: Any, messages: Messages) -> None:
    out = Guarded(source, [int(n) for n in layout.numel])
    before, expected = messages.buffer.clone(), _values(span, messages)
    cpu.decode(span, messages, Pointers.to(layout, out.tensors))
    if _moderate(messages, span.shards()):
        for s in span.segments():
            part = slice(s.offset, s.offset + s.stop - s.start)
            _compare(out.tensors[s.parameter][s.start : s.stop], expected[part], expected)
    _unharmed(messages, before, out)


def _update(source: Source, layout: Layout, span: Any, messages: Messages) -> None:
    params = Guarded(source, [int(n) for n in layout.numel])
    d = Guarded(source, [span.elements])
    start, before = params.copy(), messages.buffer.clone()
    m, decay = _values(span, messages), pick(source, (0.0, 0.5))
    hyper = hyper_table([Hyper(lr=0.1, weight_decay=decay)])
    cpu.adam_update(span, Pointers.to(layout, params.tensors), d.tensors[0], messages, master=None, hyper=hyper)
    if _moderate(messages, span.shards()):
        for s in span.segments():
            part, x = slice(s.offset, s.offset + s.stop - s.start), start.tensors[s.parameter].numpy()[s.start : s.stop]
            moved = x - 0.1 * (m[part] * d.tensors[0].numpy()[part] + decay * x)
            _compare(params.tensors[s.parameter][s.start : s.stop], np.where(np.isnan(m[part]), x, moved), m)
    _unharmed(messages, before, params, start, d)


def _average(source: Source, layout: Layout, shard: Any, messages: Messages) -> None:
    kept = Guarded(source, [shard.elements])
    valid = torch.zeros(shard.elements, dtype=torch.bool)
    for s in shard.segments():
        valid[s.offset : s.offset + s.stop - s.start] = True
    kept.tensors[0].masked_fill_(~valid, 0)  # as it is past a valid count
    before, form = messages.buffer.clone(), messages.format.with_bits(pick(source, (1, 2)))
    residual, out = Residual.zeros(shard, form, value=kept.tensors[0]), form.empty(1)
    c = _values(shard, Messages(messages.buffer, messages.format, messages.rows)) + residual.left_out().numpy()
    out.buffer.zero_()
    cpu.average(shard, messages, residual, out)
    if _moderate(messages, [shard] * messages.rows) and not bool(out.flags.any()):
        left = residual.left_out().numpy()  # nothing is lost
        sent = contents(out, 0, shard.lengths().tolist()).values
        _compare(torch.from_numpy((sent + left)[valid.numpy()]), c[valid.numpy()], c)
    _unharmed(messages, before, kept)


def _values(span: Span, messages: Messages) -> np.ndarray:
    """What messages of a span's shards stand for, by numpy: the mean over copies, NaN where one has a flag."""
    copies, found = messages.copies, []
    for k, shard in enumerate(span.shards()):
        rows = range(k * copies, (k + 1) * copies)
        mean = np.mean([contents(messages, row, shard.lengths().tolist()).values for row in rows], axis=0)
        found.append(np.full_like(mean, np.nan) if any(int(messages.flags[row]) for row in rows) else mean)
    return np.concatenate(found)


def _moderate(messages: Messages, shards: list[Span]) -> bool:
    """Whether nothing overflows, squares included."""
    scales = [messages.scales(row, shards[row // messages.copies]) for row in range(messages.rows)]
    return all(bool((each.abs() < 1e15).all()) for each in scales)


def _compare(found: Tensor, expected: np.ndarray, of: np.ndarray) -> None:
    """To rounding, of what is as large as the largest of `of`: a rotation mixes a block's elements."""
    largest = np.nanmax(np.abs(of), initial=1.0)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-4, atol=1e-5 * largest)


def _unharmed(messages: Messages, before: Tensor, *guarded: Guarded) -> None:
    if not torch.equal(messages.buffer, before):
        raise AssertionError("a reader changed the messages")
    for each in guarded:
        each.check()

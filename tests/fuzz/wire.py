"""Messages of random bytes: what reads them writes nowhere else, agrees with the oracle, refuses foreign headers."""

from __future__ import annotations

import numpy as np
import torch

from onebit.kernels import cpu
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import Layout, Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, MessageError, Messages
from onebit.kernels.passes import AdamUpdate, Average, Decode, Parameters
from tests import oracle
from tests.fuzz.mutate import Source, pick
from tests.wire import values_of

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


class Wire:
    """What a pass reads and writes in one case."""

    def case(self, source: Source) -> str:
        numels = [int(n) for n in source.integers(0, 150, size=int(source.integers(1, 4)))]
        ranks, chunks = int(source.integers(1, 4)), int(source.integers(1, 3))
        self.layout = Layout(numels, block_size=pick(source, (32, 64, 96)), ranks=ranks, chunks=chunks)
        self.plan = oracle.Layout(tuple(numels), self.layout.block_size, ranks, chunks)
        scale = pick(source, ("block", "tensor"))
        norms = ("l1", "l2", "unbiased") if scale == "block" else ("l1", "l2")
        form, senders = Format(self.layout, scale, pick(source, norms)), 1
        self.chunk, self.rank = int(source.integers(chunks)), int(source.integers(ranks))
        work = pick(source, (self._decode, self._update, self._average))
        shards = [self.layout.shard(self.chunk, self.rank)] * ranks
        if work != self._average:  # of replies, which are the mean's, or every rank's own
            senders = int(source.integers(1, 5)) if pick(source, (1, "direct")) == "direct" else 1
            shards = self.layout.chunk(self.chunk).shards()
        self.messages, good = _messages(source, form, shards, senders)
        outcome, before = _check_header(self.messages, good), self.messages.buffer.clone()
        scales = torch.cat([self.messages.scales(row, shards[row // senders]) for row in range(self.messages.rows)])
        # What is no message reaches no pass; with larger scales the order of operations decides what is left of a sum.
        self.good, self.moderate = good, good and bool((scales.abs() < 2).all())
        work(source)
        if not torch.equal(self.messages.buffer, before):
            raise AssertionError("a reader changed the messages")
        return f"{work.__name__[1:]}, {outcome}"

    def _decode(self, source: Source) -> None:
        out = Guarded(source, self.layout.numel.tolist())
        before = self._flat(out)
        cpu.run(Decode(self.layout.chunk(self.chunk), self.messages, Pointers.to(self.layout, out.tensors)))
        exact = self.messages.senders == 1
        if self.moderate or (self.good and exact):
            values = np.where(self._flagged(), np.nan, self._values())
            self._compare(self._flat(out), before, values, exact)
        out.check()

    def _update(self, source: Source) -> None:
        params, span = Guarded(source, self.layout.numel.tolist()), self.layout.chunk(self.chunk)
        d, before = Guarded(source, [span.elements]), self._flat(params)
        decay = pick(source, (0.0, 0.5))
        pointers, hyper = Pointers.to(self.layout, params.tensors), hyper_table([Hyper(lr=0.1, weight_decay=decay)])
        cpu.run(AdamUpdate(span, Parameters(pointers, None), d.tensors[0], self.messages, hyper))
        if self.moderate:
            x, hypers = before[self.plan.part(self.chunk, 0, 1)], [oracle.Hyper(0.1, weight_decay=decay)]
            (new,) = oracle.onebit_adam_update([x], [self._values()], [d.tensors[0].double().numpy()], hypers)
            self._compare(self._flat(params), before, np.where(self._flagged(), x, new), exact=False)
        params.check()
        d.check()

    def _average(self, source: Source) -> None:
        shard, part = self.layout.shard(self.chunk, self.rank), self.plan.shard(self.chunk, self.rank)
        kept, valid = Guarded(source, [shard.elements]), self.plan.valid[part]
        kept.tensors[0].masked_fill_(~torch.from_numpy(valid), 0)  # as it is past a valid count
        form = self.messages.format
        out, c = form.empty(1), kept.tensors[0].double().numpy().copy()
        out.buffer.zero_()
        cpu.run(Average(shard, self.messages, Residual.zeros(shard, form, value=kept.tensors[0]), out))
        if self.moderate and not self.messages.flags.any():
            one_rank = Messages(self.messages.buffer, self.messages.format, senders=self.messages.rows)
            c += values_of(one_rank, self.plan, self.chunk * self.plan.ranks + self.rank)
            lengths = self.plan.lengths_in(part)
            expected = oracle.compress(c, valid, lengths=lengths, scale=form.scale, norm=form.norm).scales
            np.testing.assert_allclose(out.scales(0, shard).numpy(), expected, rtol=1e-4, atol=1e-5)
        kept.check()

    def _values(self) -> np.ndarray:
        """The values of the chunk's elements."""
        return values_of(self.messages, self.plan, self.chunk * self.plan.ranks)

    def _flagged(self) -> np.ndarray:
        """A mask of the chunk's elements of which any sender's message carries a flag."""
        sizes = [shard.elements for shard in self.layout.chunk(self.chunk).shards()]
        return np.repeat(self.messages.flags.view(-1, self.messages.senders).any(1).numpy(), sizes)

    def _flat(self, tensors: Guarded) -> np.ndarray:
        return self.plan.flatten([tensor.numpy() for tensor in tensors.tensors])

    def _compare(self, found: np.ndarray, before: np.ndarray, values: np.ndarray, exact: bool) -> None:
        """Elements of the chunk are `values`, all others what they were."""
        expected, part = before.copy(), self.plan.part(self.chunk, 0, 1)
        expected[part] = np.where(self.plan.valid[part], values, before[part])
        if exact:
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def _messages(source: Source, form: Format, shards: list[Span], senders: int) -> tuple[Messages, bool]:
    """Make messages of random bytes, with guards. Returns them, and whether their headers are as they should be."""
    rows = len(shards) * senders
    whole = torch.from_numpy(np.frombuffer(source.bytes(rows * form.nbytes + 2 * _GUARD), np.uint8).copy())
    messages = Messages(whole[_GUARD : _GUARD + rows * form.nbytes].view(rows, form.nbytes), form, senders)
    kind = source.random()
    if kind < 0.8:
        messages.header.copy_(torch.tensor(form.header, dtype=torch.int32))
        messages.flags.copy_(torch.from_numpy(source.integers(0, 2, size=rows) * (source.random() < 0.2)))
    if kind < 0.6:
        for row in range(rows):
            scales = messages.scales(row, shards[row // senders])
            scales.copy_(torch.from_numpy(source.random(len(scales), dtype=np.float32)))
    if 0.6 <= kind < 0.75:
        bit = int(source.integers(128))
        if bit != 32:  # the flag itself
            messages.buffer[int(source.integers(rows)), bit // 8] ^= 1 << bit % 8
    good = all((m, 0, f, b) == form.header and flag in (0, 1) for m, flag, f, b in messages.header.tolist())
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

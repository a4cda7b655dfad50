"""The bytes of a message, bit for bit."""

import struct
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebit.kernels import cpu
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import MAGIC, NONFINITE, NORMS, Format, MessageError
from onebit.kernels.passes import Decode
from tests import oracle

FORMS = st.builds(
    lambda numels, size, ranks, of: Format(Layout(numels, block_size=size, ranks=ranks), *of),
    st.lists(st.integers(0, 300), min_size=1, max_size=9),
    st.sampled_from([32, 64, 96, 2048]),
    st.integers(1, 4),
    st.sampled_from([*(("block", norm) for norm in NORMS), ("tensor", "l1"), ("tensor", "l2")]),
)


def aligned(nbytes: int) -> int:
    return (nbytes + 15) // 16 * 16


def sent(form: Format, bits: np.ndarray, scales: np.ndarray, flags: int) -> bytes:
    """A message by hand: struct and numpy only."""
    most = max(shard.count for shard in form.layout.all().shards())
    header = struct.pack("<4I", 0x01424231, flags, form.fingerprint, most)
    parts = header + scales.astype("<f4").tobytes()
    parts += bytes(16 + aligned(4 * len(scales)) - len(parts)) + np.packbits(bits, bitorder="little").tobytes()
    return parts + bytes(aligned(len(parts)) - len(parts))


@given(FORMS, st.integers(0, 2**32 - 1))
def test_a_message_written_by_hand_reads_back_and_decodes(form, seed):
    rng, layout = np.random.default_rng(seed), form.layout
    plan = oracle.Layout(tuple(layout.numel.tolist()), layout.block_size, layout.ranks)
    rows, wanted, all_bits, all_scales = [], [], [], []
    for i, part in enumerate(plan.shards()):
        lengths = plan.lengths_in(part)
        bits = rng.integers(0, 2, sum(lengths)).astype(bool)
        count = len(lengths) if form.scale == "block" else 1
        scales = rng.uniform(0, 2, count).astype(np.float32)
        rows.append(sent(form, bits, scales, flags=i % 2))
        wanted.append(np.where(bits, 1, -1) * np.repeat(np.resize(scales, len(lengths)), lengths))
        all_bits.append(bits)
        all_scales += np.resize(scales, len(lengths)).tolist()
    messages, longest = form.empty(len(rows)), max(map(len, rows))
    assert tuple(messages.buffer.shape) == (len(rows), longest) == (len(rows), form.nbytes)
    whole = b"".join(row.ljust(longest, bytes(1)) for row in rows)
    messages.buffer.copy_(torch.from_numpy(np.frombuffer(whole, np.uint8).reshape(len(rows), -1).copy()))
    assert messages.header[0].tolist() == list(form.header)
    assert messages.flags.tolist() == [i % 2 for i in range(len(rows))]
    assert messages.scales_of(layout.all())[0].tolist() == all_scales
    bits = np.unpackbits(messages.bits_of(layout.all())[0].numpy(), bitorder="little") == 1
    assert np.array_equal(bits, np.concatenate(all_bits))
    out = [torch.zeros(n) for n in plan.numels]
    messages.flags.zero_()
    cpu.run(Decode(layout.all(), messages, Pointers.to(layout, out)))
    for found, expected in zip(out, plan.unflatten(np.concatenate(wanted)), strict=True):
        assert found.tolist() == expected.tolist()


@given(FORMS, st.sampled_from([1, 3]), st.integers(0, 2**32 - 1))
def test_what_was_put_is_read(form, senders, seed):
    span, source = form.layout.all(), np.random.default_rng(seed)
    of_bits = source.integers(0, 256, (senders, span.elements // 8), dtype=np.uint8)
    of_scales = source.uniform(0, 2, (senders, span.count)).astype(np.float32)
    if form.scale == "tensor":
        of_scales[:] = 0.5
    messages = form.empty(senders * len(span.shards()), senders=senders)
    messages.put(span, torch.from_numpy(of_bits), torch.from_numpy(of_scales))
    assert np.array_equal(messages.bits_of(span).numpy(), of_bits)
    assert np.array_equal(messages.scales_of(span).numpy(), of_scales)
    part = messages.slice(messages.rows - 1, 1)
    assert part.rows == 1 and part.buffer.data_ptr() == messages.buffer[-1].data_ptr()


CUTS = [
    {"numels": (40, 100)}, {"numels": (100, 41)}, {"numels": (100, 40, 0)}, {"block_size": 64}, {"ranks": 1},
    {"chunks": 2}, {"block_size": 64, "block_sizes": (32, 64)},
]  # fmt: skip


def test_the_header_has_the_words_that_the_format_says_and_fingerprints_of_different_formats_differ():
    base = Format(Layout([9000]))
    assert base.header == (MAGIC, 0, base.fingerprint, 5)
    assert MAGIC.to_bytes(4, "little") == b"1BB\x01" and NONFINITE == 1
    layouts = [Layout(**{"numels": (100, 40), "block_size": 32, "ranks": 2, **cut}) for cut in ({}, *CUTS)]
    assert len({layout.fingerprint for layout in layouts}) == 8
    made, (first, *_) = [Format(layout) for layout in layouts], layouts
    made += [Format(first, "tensor"), Format(first, norm="l2"), Format(first, bits=4), Format(first, bits=8)]
    assert len({form.fingerprint for form in made}) == 12
    assert [made[-2].header[0].to_bytes(4, "little"), made[-1].header[0].to_bytes(4, "little")] == [
        b"4BB\x01",
        b"8BB\x01",
    ]
    large = Layout([2**20, 2**16], ranks=4)
    for bits, most in ((1, 1.02), (4, 4.13), (8, 8.13)):
        assert 4 * 8 * Format(large, bits=bits).nbytes < most * large.elements
    assert all(0 <= form.fingerprint < 2**31 for form in made)
    assert Format(Layout([9000])).fingerprint == base.fingerprint


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=200), st.integers(1, 8))
def test_a_model_of_any_shape_costs_little_more_than_a_bit_an_element(numels, ranks):
    """1.1 bits, 64 for each tensor, 40 bytes a message, and no shard is longer than its part by more than a block."""
    form = Format(Layout(numels, ranks=ranks))
    bits = 1.1 * sum(numels) + 64 * max(ranks, len(numels))
    assert form.nbytes <= bits / 8 / ranks + 40 + (0 if ranks == 1 else 260)


def test_means_that_are_compressed_once_more_have_no_unbiased_scales():
    for norm, of_means in (("l1", "l1"), ("l2", "l2"), ("unbiased", "l2")):
        form = Format(Layout([100, 7], block_size=32), norm=norm)
        assert form.of_means() == Format(form.layout, norm=of_means) and form.of_means().nbytes == form.nbytes


def test_a_header_with_a_bit_flipped_is_no_message_of_this_exchange():
    """The one bit that may differ is the flag that says that a sender met inf or NaN."""
    messages = Format(Layout([300], block_size=64, ranks=2)).empty(2)
    messages.header.copy_(torch.tensor(messages.format.header, dtype=torch.int32))
    messages.check("a phase")
    for bit in range(128):
        messages.buffer[1, bit // 8] ^= 1 << bit % 8
        wrong = pytest.raises(MessageError, match="a phase: what came from rank 1 is no message of this exchange")
        with wrong if bit != 32 else nullcontext():
            messages.check("a phase")
        assert bit != 32 or messages.flags.tolist() == [0, NONFINITE]
        messages.buffer[1, bit // 8] ^= 1 << bit % 8

"""The bytes of a message, bit for bit."""

import dataclasses
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebit.kernels import reference
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import MAGIC, NONFINITE, Format, MessageError, Messages
from tests import oracle

FORMS = st.builds(
    Format,
    st.sampled_from([32, 64, 96, 2048]),
    st.integers(1, 9),
    st.sampled_from(["block", "tensor"]),
    st.sampled_from(["l1", "l2"]),
)


def aligned(nbytes: int) -> int:
    return (nbytes + 15) // 16 * 16


@given(FORMS)
def test_a_message_is_header_then_scales_then_bits_each_on_16_bytes(form):
    scales = form.shard_blocks if form.scale == "block" else 1
    assert form.scales == scales
    assert form.scales_offset == 16
    assert form.bits_offset == 16 + aligned(4 * scales)
    assert form.nbytes == form.bits_offset + aligned(form.shard_blocks * form.block_size // 8)


@given(FORMS)
def test_views_have_their_types_shapes_and_places(form):
    messages = form.empty(3)
    assert messages.buffer.dtype == torch.uint8 and tuple(messages.buffer.shape) == (3, form.nbytes)
    views = {
        "header": (messages.header, torch.int32, (3, 4), 0),
        "scales": (messages.scales, torch.float32, (3, form.scales), form.scales_offset),
        "bits": (
            messages.bits,
            torch.uint8,
            (3, form.shard_blocks, form.block_size // 8),
            form.bits_offset,
        ),
        "flags": (messages.flags, torch.int32, (3,), 4),
    }
    for view, dtype, shape, offset in views.values():
        assert (view.dtype, tuple(view.shape)) == (dtype, shape)
        assert view.data_ptr() == messages.buffer.data_ptr() + offset
        assert view[1].data_ptr() == view.data_ptr() + form.nbytes


def sent(form: Format, bits: np.ndarray, scales: np.ndarray, flags: int) -> bytes:
    """A message by hand: struct and numpy only."""
    header = struct.pack("<4I", 0x02424231, flags, form.fingerprint, form.shard_blocks)
    parts = header + scales.astype("<f4").tobytes()
    parts += bytes(form.bits_offset - len(parts)) + np.packbits(bits, bitorder="little").tobytes()
    return parts + bytes(form.nbytes - len(parts))


@given(FORMS, st.integers(0, 2**32 - 1))
def test_a_message_written_by_hand_reads_back_and_decodes(form, seed):
    rng = np.random.default_rng(seed)
    shape = (2, form.shard_blocks * form.block_size)
    bits = rng.integers(0, 2, shape).astype(bool)
    scales = rng.uniform(0, 2, (2, form.scales)).astype(np.float32)
    messages = form.empty(2)
    rows = [sent(form, bits[i], scales[i], flags=i) for i in range(2)]
    messages.buffer.copy_(torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(2, -1).copy()))
    assert messages.header[0].tolist() == list(form.header)
    assert messages.flags.tolist() == [0, 1]
    assert np.array_equal(messages.scales.numpy(), scales)
    unpacked = np.unpackbits(messages.bits.numpy(), axis=-1, bitorder="little")
    assert np.array_equal(unpacked.reshape(shape) == 1, bits)
    per_block = scales if form.scale == "block" else np.repeat(scales, form.shard_blocks, axis=1)
    assert messages.scale_of_blocks().tolist() == per_block.ravel().tolist()
    wanted = np.where(bits, 1, -1) * np.repeat(per_block, form.block_size, axis=1)
    layout = Layout([wanted.size], block_size=form.block_size, ranks=2)
    out = torch.zeros(wanted.size)
    messages.flags.zero_()
    reference.decode(layout.all(), messages, Pointers.to(layout, [out]))
    assert out.tolist() == wanted.ravel().tolist()


@given(st.lists(st.booleans(), min_size=256, max_size=256))
def test_bits_lie_as_numpy_packs_them_little_end_first(signs):
    values = torch.where(torch.tensor(signs), 1.0, -1.0)
    layout = Layout([256], block_size=64)
    form = Format.of(layout)
    assert oracle.packed(np.array(signs)).tolist() == compressed(layout, form, values).bits.flatten().tolist()


def compressed(layout: Layout, form: Format, values: torch.Tensor) -> Messages:
    out, residual = form.empty(layout.ranks), Residual.zeros(layout.all(), form)
    flags = torch.zeros(1, dtype=torch.int32)
    grads = Pointers.to(layout, [values], "gradient")
    reference.compress(layout.all(), grads, None, residual, hyper_table([Hyper()]), flags, out)
    return out


def test_the_first_element_is_the_lowest_bit_of_the_first_byte():
    layout = Layout([32], block_size=32)
    values = torch.full((32,), -1.0)
    values[[0, 9]] = 1.0
    out = compressed(layout, Format.of(layout), values)
    assert out.bits.flatten().tolist() == [0b00000001, 0b00000010, 0, 0]


def test_the_header_has_the_words_that_the_format_says():
    form = Format(2048, 5, "block", "l1", layout_fingerprint=77)
    assert form.header == (MAGIC, 0, form.fingerprint, 5)
    assert MAGIC.to_bytes(4, "little") == b"1BB\x02"
    assert 0 <= form.fingerprint < 2**31
    assert NONFINITE == 1


def test_fingerprints_of_different_formats_differ():
    base = Format(2048, 5)
    changes = [
        {"block_size": 1024},
        {"shard_blocks": 6},
        {"scale": "tensor"},
        {"norm": "l2"},
        {"layout_fingerprint": 1},
    ]
    made = [base, *(dataclasses.replace(base, **change) for change in changes)]
    assert len({form.fingerprint for form in made}) == len(made)
    assert Format(2048, 5).fingerprint == base.fingerprint


def test_a_format_of_a_layout_has_its_shards():
    layout = Layout([5000, 3], block_size=96, ranks=3, chunks=2)
    form = Format.of(layout, "tensor", "l2")
    assert (form.block_size, form.shard_blocks) == (96, layout.shard_blocks)
    assert (form.scale, form.norm) == ("tensor", "l2")
    assert form.layout_fingerprint == layout.fingerprint


def test_slices_of_messages_share_their_bytes():
    messages = Format(32, 2).empty(4)
    part = messages.slice(1, 2)
    assert part.rows == 2
    part.buffer.fill_(7)
    assert (messages.buffer[1:3] == 7).all()
    assert part.scales.data_ptr() == messages.scales[1].data_ptr()


@given(st.integers(1, 600), st.sampled_from(["block", "tensor"]))
def test_a_message_costs_a_bit_an_element_a_64th_for_scales_and_at_most_28_bytes(shard_blocks, scale):
    """28: the header's 16, and 12 that align the scales."""
    form = Format(2048, shard_blocks, scale)
    elements = 2048 * shard_blocks
    per_element = 1 + (1 / 64 if scale == "block" else 0)
    assert form.nbytes - elements * per_element / 8 <= 28 + (4 if scale == "tensor" else 0)
    assert form.nbytes >= elements * per_element / 8 + 16


@pytest.mark.parametrize(
    "change, words",
    [({"scale": "row"}, ["scale", "block", "tensor", "row"]), ({"norm": "l3"}, ["norm", "l1", "l2", "l3"])],
)
def test_a_wrong_format_says_what_and_what_to_do(change, words):
    with pytest.raises(ValueError) as raised:
        Format(2048, 1, **change)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("bit", range(128))
def test_a_header_with_a_bit_flipped_is_no_message_of_this_exchange(bit):
    """But for the flag that says that a sender met inf or NaN."""
    messages = Format(64, 3, "block", "l1", 7).empty(2)
    messages.header.copy_(torch.tensor(messages.format.header, dtype=torch.int32))
    messages.check("a phase")
    messages.buffer[1, bit // 8] ^= 1 << bit % 8
    if bit == 32:
        messages.check("a phase")
        assert messages.flags.tolist() == [0, NONFINITE]
    else:
        with pytest.raises(MessageError, match="a phase: what came from rank 1 is no message of this exchange"):
            messages.check("a phase")

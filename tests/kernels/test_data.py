"""What passes read: layouts against the oracle's, addresses, packed bits, and what is refused of what users pass."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from onebit.kernels.data import bits as bits_module
from onebit.kernels.data import pieces
from onebit.kernels.data.bits import packed, unpacked
from onebit.kernels.data.checks import is_finite, is_one_of, is_whole
from onebit.kernels.data.layout import BLOCK_SIZE, Block, Layout, Span, block_size_of
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.upload import Upload
from onebit.kernels.data.wire import Format
from tests import oracle

HUGE = 2**31 + 7


def pair(
    numels: list[int], block_size: int, ranks: int, chunks: int, shorter: bool = False
) -> tuple[Layout, oracle.Layout]:
    """A layout and the oracle's of the same parameters. shorter: every other one has blocks of 32."""
    sizes = tuple(32 if shorter and i % 2 else block_size for i in range(len(numels)))
    ours = Layout(numels, block_size=block_size, block_sizes=sizes, ranks=ranks, chunks=chunks)
    return ours, oracle.Layout(tuple(numels), block_size, ranks, chunks, sizes)


SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=12)
LAYOUTS = st.builds(pair, SIZES, st.sampled_from([32, 64, 96]), st.integers(1, 4), st.integers(1, 3), st.booleans())


@example(pair([1000, 2049, 0, 4096], BLOCK_SIZE, 3, 4))
@example(pair([3] * 300, BLOCK_SIZE, 3, 4))
@example(pair([1000, 2049, 0, 4096], BLOCK_SIZE, 3, 4, shorter=True))
@given(LAYOUTS)
def test_any_layout_its_spans_and_its_tables_agree_with_the_oracle(layouts):
    layout, plan = layouts
    assert layout.elements == plan.size
    assert layout.lengths().tolist() == plan.lengths
    assert layout.offset.tolist() == layout.starts[layout.first].tolist() == plan.starts
    owner = np.repeat(layout.owner(), layout.lengths())
    place = np.arange(layout.elements) - np.repeat(layout.starts[:-1], layout.lengths())
    valid = place < np.repeat(layout.counts(), layout.lengths())
    assert np.where(valid, owner, -1).tolist() == plan.owner.tolist()
    assert layout.shards.tolist() == [0, *(stop for _, stop in plan.blocks_of_shards)]

    chunks = [layout.chunk(j) for j in range(layout.chunks)]
    shards = [layout.shard(j, k) for j in range(layout.chunks) for k in range(layout.ranks)]
    for spans in (chunks, shards, [layout.all()]):
        assert spans[0].first == 0
        assert all(a.first + a.count == b.first for a, b in itertools.pairwise(spans))
        assert spans[-1].first + spans[-1].count == layout.blocks
    assert [slice(s.start, s.start + s.elements) for s in shards] == plan.shards()
    assert max(shard.count for shard in shards) == layout.shard_blocks
    assert min(shard.count for shard in shards) > 0
    assert [s for chunk in chunks for s in chunk.shards()] == shards
    assert [shard.first_shard for shard in shards] == list(range(len(shards)))
    counts = np.array([block.sum() for block in plan.of_blocks(plan.valid)])
    for span in chunks:
        assert span.counts().tolist() == counts[span.first : span.first + span.count].tolist()
        assert span.blocks(span.count - 1, 1).counts().tolist() == [counts[span.first + span.count - 1]]

    table = layout.table(torch.device("cpu"))
    assert table.blocks.dtype == torch.int32 and table.parameters.dtype == torch.int64
    rows = [Block(*row) for row in table.blocks.tolist()]
    assert [row.owner for row in rows] == table.owner.tolist() == layout.owner().tolist()
    assert [32 * row.words for row in rows] == layout.lengths().tolist()
    assert [32 * row.start for row in rows] == layout.starts[:-1].tolist()
    for s, shard in enumerate(layout.all().shards()):
        of_shard = rows[shard.first : shard.first + shard.count]
        places = [(row.shard, row.block_in_shard, row.of_shard, row.word) for row in of_shard]
        starts = [row.start - of_shard[0].start for row in of_shard]
        assert places == [(s, i, shard.count, start) for i, start in enumerate(starts)]
    assert table.parameters.tolist() == np.stack((layout.offset, layout.numel, layout.group), axis=1).tolist()
    assert layout.table(torch.device("cpu")) is table


@given(LAYOUTS, st.data())
def test_segments_hold_each_valid_element_of_a_span_once_and_no_other(layouts, data):
    layout, plan = layouts
    first = data.draw(st.integers(0, layout.blocks - 1))
    span = Span(layout, first, data.draw(st.integers(1, layout.blocks - first)))
    part = slice(span.start, span.start + span.elements)
    assert span.start == sum(plan.lengths[:first])
    covered = np.zeros(span.elements, int)
    for s in span.segments():
        covered[s.offset : s.offset + s.stop - s.start] += 1
        assert plan.owner[part][s.offset] == s.parameter
        assert plan.starts[s.parameter] + s.start == part.start + s.offset
    assert covered.tolist() == plan.valid[part].astype(int).tolist()


def test_a_span_of_a_flat_buffer_is_a_view_of_its_elements_and_segments_know_their_groups():
    layout = Layout([100, 70], block_size=64, ranks=2, chunks=2)  # blocks of 64, 64, 64 and 32
    flat, bits = torch.arange(layout.elements), torch.arange(layout.elements // 8)
    part = layout.shard(1, 1).of(flat)
    assert part.tolist() == list(range(192, 224))
    part.zero_()
    assert not flat[192:].any() and flat[1:192].all()
    assert layout.shard(1, 1).of_bits(bits).tolist() == [24, 25, 26, 27]
    layout = Layout([40, 0, 3], groups=[2, 0, 1], block_size=32)
    assert [(s.parameter, s.group) for s in layout.all().segments()] == [(0, 2), (2, 1)]


@pytest.mark.parametrize(("shape", "most", "length"), [
    ((50257, 768), 2048, 768),
    ((30522, 1024), 1024, 1024),
    ((100_000, 4096), 2048, 2048),
    ((100_000, 2560), 2048, 1280),  # halves
    ((100_000, 5120), 2048, 1280),  # quarters: a third is no whole words
    ((10_000, 64), 2048, 128),  # two rows
    ((10_000, 40), 2048, 160),
    ((10_000, 64), 96, 64),
    ((10_000, 64), 32, 32),
    ((50257, 770), 2048, 2048),  # rows are no whole words
    ((3072, 768), 2048, 2048),
    ((17 * 128, 128), 2048, 128),
    ((16 * 128, 128), 2048, 2048),
    ((1000,), 2048, 2048),
    ((1000, 4, 4), 2048, 2048),
    ((1000, 0), 2048, 2048),
    ((0, 1000), 2048, 2048),
])  # fmt: skip
def test_a_block_of_a_table_is_a_row_or_an_equal_part_of_one(shape, most, length):
    assert block_size_of(shape, most) == length


def test_offsets_are_right_past_two_to_the_31():
    layout = Layout([HUGE, 5, HUGE], ranks=3)
    blocks = -(-HUGE // BLOCK_SIZE)
    last = 2 * blocks
    assert layout.elements > 2**32
    assert layout.first.tolist() == [0, blocks, blocks + 1]
    assert layout.owner(blocks - 1, 3).tolist() == [0, 1, 2] and layout.owner(last, 1).tolist() == [2]
    assert layout.counts(blocks - 1, 3).tolist() == [7, 5, BLOCK_SIZE] and layout.counts(last, 1).tolist() == [7]
    assert layout.counts(last + 1).tolist() == [0] * (layout.blocks - last - 1)
    (segment,) = Span(layout, last, 1).segments()
    assert (segment.parameter, segment.start, segment.stop, segment.offset) == (2, HUGE - 7, HUGE, 0)
    parameters = layout.table(torch.device("cpu")).parameters
    assert parameters[2].tolist() == [32 * -(-HUGE // 32) + 32, HUGE, 0]
    (segment,) = Layout([HUGE]).all().segments()
    assert (segment.start, segment.stop) == (0, HUGE)


LAYOUT = Layout([6, 4, 3], block_size=32)


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor | None]:
    return [torch.zeros(2, 3, dtype=dtype), torch.zeros(4, dtype=dtype), torch.zeros(3, dtype=dtype)]


def replaced(index: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
    return [tensor if i == index else of for i, of in enumerate(tensors())]


class CountingTensor(torch.Tensor):
    """Counts how often it is written."""

    writes = 0

    def copy_(self, *args, **kwargs):
        self.writes += 1
        return super().copy_(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_addresses_are_those_of_the_tensors_written_only_when_one_changed_and_left_by_a_refused_list(dtype):
    made = tensors(dtype)
    pointers, at = Pointers.to(LAYOUT, made), [t.data_ptr() for t in made]
    assert pointers.dtype == dtype and pointers.addresses.dtype == torch.int64
    assert pointers.addresses.tolist() == at
    with pytest.raises(ValueError):
        pointers.bind_tensors([*made[:2], torch.zeros(9, dtype=dtype)])
    assert [t.data_ptr() for t in pointers.tensors] == pointers.addresses.tolist() == at
    pointers.addresses = pointers.addresses.as_subclass(CountingTensor)
    pointers.bind_tensors(made)
    pointers.bind_tensors([t.view_as(t) for t in made])
    assert pointers.addresses.writes == 0
    pointers.bind_tensors([None, *made[1:]])
    assert pointers.addresses.tolist() == [0, *at[1:]] and pointers.tensors[0] is None
    pointers.bind_tensors(made)
    assert pointers.addresses.tolist() == at and pointers.addresses.writes == 2


def test_views_gradients_that_are_not_contiguous_and_empty_tensors():
    """A view points to its own first element; what is not contiguous is copied in logical order."""
    bucket = torch.zeros(20)
    pointers = Pointers.to(LAYOUT, [bucket[1:7].view(2, 3), bucket[7:11], bucket[11:14].requires_grad_()], "parameter")
    assert [a - bucket.data_ptr() for a in pointers.addresses.tolist()] == [4, 28, 44]
    gradient = torch.arange(6.0).view(3, 2).t()
    pointers = Pointers.to(LAYOUT, replaced(0, gradient), "gradient")
    copy = pointers.tensors[0]
    assert copy.is_contiguous() and copy.flatten().tolist() == [0, 2, 4, 1, 3, 5]
    assert pointers.addresses[0] == copy.data_ptr() != gradient.data_ptr()
    assert Pointers.to(Layout([0, 2], block_size=32), [torch.zeros(0), torch.zeros(2)]).tensors[0].numel() == 0


@pytest.mark.parametrize("make, arguments, error, words", [
    (Layout, {"numels": []}, ValueError, ["no parameters", "pass at least one"]),
    (Layout, {"numels": [3, -1]}, ValueError, ["-1", "numel must be 0 or more"]),
    (Layout, {"numels": [3], "block_size": 0}, ValueError, ["block_size", "multiple of 32", "2048"]),
    (Layout, {"numels": [3], "block_size": 48}, ValueError, ["48", "multiple of 32"]),
    (Layout, {"numels": [3], "block_size": -32}, ValueError, ["-32", "multiple of 32"]),
    (Layout, {"numels": [3], "block_size": 64.0}, ValueError, ["64.0", "multiple of 32"]),
    (Layout, {"numels": [3], "ranks": 0}, ValueError, ["ranks=0", "at least 1"]),
    (Layout, {"numels": [3], "chunks": 0}, ValueError, ["chunks=0", "at least 1"]),
    (Layout, {"numels": [3, 4], "groups": [0]}, ValueError, ["1 group", "2 parameters", "one for each"]),
    (Format, {"scale": "row"}, ValueError, ["scale", "block", "tensor", "row"]),
    (Format, {"norm": "l3"}, ValueError, ["norm", "l1", "l2", "l3"]),
    (Format, {"norm": "unbiased", "scale": "tensor"}, ValueError, ["unbiased", "tensor", 'scale="block"']),
    (Pointers.to, {"tensors": tensors(torch.float64), "what": "tensor"}, TypeError,
     ["torch.float64", "not supported", "torch.bfloat16", ".to(torch.float32)"]),
    (Pointers.to, {"tensors": tensors(torch.int32)}, TypeError, ["gradients of dtype torch.int32", "use one of"]),
    (Pointers.to, {"tensors": replaced(1, torch.zeros(4, dtype=torch.bfloat16))}, TypeError,
     ["gradient 1", "torch.bfloat16", "torch.float32", "Cast it"]),
    (Pointers.to, {"tensors": replaced(2, torch.zeros(3, device="meta")), "what": "parameter"}, ValueError,
     ["parameter 2", "meta", "cpu", "move it with .to('cpu')"]),
    (Pointers.to, {"tensors": replaced(0, torch.zeros(3, 2).t()), "what": "parameter"}, ValueError,
     ["parameter 0", "not contiguous", "(2, 3)", "(1, 2)", "in place", "parameter.contiguous()"]),
    (Pointers.to, {"tensors": replaced(1, torch.zeros(4).to_mkldnn())}, ValueError,
     ["gradient 1", "layout torch._mkldnn", "to_dense()"]),
    (Pointers.to, {"tensors": replaced(1, torch.zeros(4).to_sparse())}, ValueError,
     ["gradient 1", "sparse", "every element", "sparse=False", "to_dense()"]),
    (Pointers.to, {"tensors": replaced(1, torch.zeros(5))}, ValueError,
     ["gradient 1", "5 elements", "holds 4", "build a new one"]),
    (Pointers.to, {"tensors": tensors()[:2]}, ValueError,
     ["got 2 gradients", "3 parameters", "None where there is none"]),
    (Pointers.to, {"tensors": [*tensors(), None]}, ValueError, ["got 4 gradients", "3 parameters"]),
    (Pointers.to, {"tensors": [None, None, None]}, ValueError, ["no gradient", "got 3, none of them"]),
    (Pointers.to, {"tensors": []}, ValueError, ["no gradient"]),
])  # fmt: skip
def test_what_is_wrong_says_what_and_what_to_do(make, arguments, error, words):
    usual = {Layout: {}, Format: {"layout": Layout([1])}}.get(make, {"layout": LAYOUT, "what": "gradient"})
    with pytest.raises(error) as raised:
        make(**{**usual, **arguments})
    assert type(raised.value) is error
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_bits_are_packed_as_numpy_packs_them_in_small_pieces_and_come_back(dtype, monkeypatch):
    """What lies beside a large mask meanwhile is small."""
    sizes, whole = [], bits_module.packed_at_once
    monkeypatch.setattr(pieces, "PIECE", 64)
    monkeypatch.setattr(bits_module, "packed_at_once", lambda piece: (sizes.append(piece.shape[-1]), whole(piece))[1])
    for shape in [(0,), (1,), (7,), (8,), (4097,), (3, 64), (2, 3, 13), (0, 8), (2, 0), (2, 200)]:
        bits = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
        found = packed(bits.to(dtype))
        assert found.dtype == torch.uint8
        assert np.array_equal(found.numpy(), np.packbits(bits.numpy(), axis=-1, bitorder="little"))
        assert torch.equal(unpacked(found)[..., : shape[-1]], bits)
        assert not unpacked(found)[..., shape[-1] :].any()
    assert sizes[-4:] == [64, 64, 64, 8]


OTHERS = [None, "1", "", b"1", [], [1], (1,), {}, 1j, object, np.zeros(3), torch.ones(()), torch.ones(3)]
TRUTHS = [True, False, np.True_]
NOT_WHOLE = [0.0, 1.0, math.nan, math.inf, Fraction(1), np.float32(1)]
FINITE = [0, -1, 0.5, -0.0, 1e308, -1e308, 10**300, Fraction(1, 3), np.float32(0.1), np.int8(3)]
INFINITE = [math.inf, -math.inf, math.nan, 10**400, np.float32(np.inf), np.float64(np.nan)]


def test_whole_numbers_finite_ones_and_names_are_told_from_what_only_looks_like_one():
    for value in (0, 1, -1, 2**63, 10**400, np.int64(3), np.uint8(255), np.int32(-7)):
        assert is_whole(value) and is_whole(value, least=value) and is_whole(value, most=value), value
        assert not is_whole(value, least=int(value) + 1) and not is_whole(value, most=int(value) - 1), value
    assert [value for value in (*NOT_WHOLE, *TRUTHS, *OTHERS) if is_whole(value)] == []
    assert all(is_finite(value) for value in FINITE)
    assert [value for value in (*INFINITE, *TRUTHS, *OTHERS) if is_finite(value)] == []
    largest = torch.finfo(torch.float32).max
    assert is_finite(largest, largest) and is_finite(-largest, largest)
    assert [value for value in (1e39, -1e39, 10**400) if is_finite(value, largest)] == []
    names = ("block", "tensor")
    assert all(is_one_of(value, names) for value in names)
    assert [value for value in ("blok", "", "bl", names, *OTHERS, *TRUTHS) if is_one_of(value, names)] == []


def test_numbers_whose_copy_did_not_end_are_copied_the_next_time():
    upload, out = Upload(), torch.zeros(2)
    with torch.inference_mode():
        refuses = torch.zeros(2)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        upload.write([1.0, 2.0], refuses)
    assert upload.write([1.0, 2.0], out) and out.tolist() == [1, 2]
    assert not upload.write([1.0, 2.0], out)

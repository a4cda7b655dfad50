"""Blocks, shards, chunks and segments, against the oracle's layout and by properties."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebit.kernels.data.layout import BLOCK_SIZE, Block, Layout, Span
from tests import oracle

HUGE = 2**31 + 7


def layouts() -> st.SearchStrategy[tuple[Layout, oracle.Layout]]:
    """A layout and the oracle's of the same parameters."""
    return st.builds(
        lambda numels, block_size, ranks, chunks: (
            Layout(numels, block_size=block_size, ranks=ranks, chunks=chunks),
            oracle.Layout(tuple(numels), block_size, ranks, chunks),
        ),
        st.lists(st.integers(0, 400), min_size=1, max_size=12),
        st.sampled_from([32, 64, 96]),
        st.integers(1, 4),
        st.integers(1, 3),
    )


@pytest.mark.parametrize("numels, ranks, chunks", [
    ((0,), 1, 1), ((1,), 3, 4), ((2048,), 2, 1), ((2049,), 2, 1), ((1000, 2049, 0, 4096), 3, 4), ((0, 0, 5, 0), 2, 1),
    ((3,) * 300, 3, 4),
])  # fmt: skip
def test_every_element_has_the_place_that_the_oracle_gives_it(numels, ranks, chunks):
    layout = Layout(numels, ranks=ranks, chunks=chunks)
    check_same_places(layout, oracle.Layout(numels, BLOCK_SIZE, ranks, chunks))


def check_same_places(layout: Layout, plan: oracle.Layout) -> None:
    assert layout.elements == plan.size
    assert layout.lengths().tolist() == plan.lengths
    assert layout.offset.tolist() == layout.starts[layout.first].tolist() == plan.starts
    owner = np.repeat(layout.owner(), layout.lengths())
    place = np.arange(layout.elements) - np.repeat(layout.starts[:-1], layout.lengths())
    valid = place < np.repeat(layout.counts(), layout.lengths())
    assert np.where(valid, owner, -1).tolist() == plan.owner.tolist()
    assert layout.shards.tolist() == [0, *(stop for _, stop in plan.blocks_of_shards)]


@given(layouts())
def test_any_layout_its_spans_and_its_tables_agree_with_the_oracle(pair):
    layout, plan = pair
    check_same_places(layout, plan)
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
        places = [(row.shard, row.place, row.of_shard, row.word) for row in of_shard]
        starts = [row.start - of_shard[0].start for row in of_shard]
        assert places == [(s, i, shard.count, start) for i, start in enumerate(starts)]
    assert table.parameters.tolist() == np.stack((layout.offset, layout.numel, layout.group), axis=1).tolist()
    assert layout.table(torch.device("cpu")) is table


@given(layouts(), st.data())
def test_segments_hold_each_valid_element_of_a_span_once_and_no_other(pair, data):
    layout, plan = pair
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


def test_a_span_of_a_flat_buffer_is_a_view_of_its_elements():
    layout = Layout([100, 70], block_size=64, ranks=2, chunks=2)  # blocks of 64, 64, 64 and 32
    flat = torch.arange(layout.elements)
    part = layout.shard(1, 1).of(flat)
    assert part.tolist() == list(range(192, 224))
    part.zero_()
    assert not flat[192:].any() and flat[1:192].all()
    bits = torch.arange(layout.elements // 8)
    assert layout.shard(1, 1).of_bits(bits).tolist() == [24, 25, 26, 27]


def test_groups_go_with_their_parameters():
    layout = Layout([40, 0, 3], groups=[2, 0, 1], block_size=32)
    assert [(s.parameter, s.group) for s in layout.all().segments()] == [(0, 2), (2, 1)]


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


def test_fingerprints_of_different_cuts_differ():
    base = {"numels": (100, 40), "block_size": 32, "ranks": 2, "chunks": 1}
    other = [
        {"numels": (40, 100)}, {"numels": (100, 41)}, {"numels": (100, 40, 0)}, {"block_size": 64}, {"ranks": 1},
        {"chunks": 2},
    ]  # fmt: skip
    made = [Layout(**base), *(Layout(**{**base, **change}) for change in other)]
    assert len({layout.fingerprint for layout in made}) == len(made)
    assert Layout(**base).fingerprint == made[0].fingerprint


@pytest.mark.parametrize("arguments, words", [
    ({"numels": []}, ["no parameters", "pass at least one"]),
    ({"numels": [3, -1]}, ["-1", "numel must be 0 or more"]),
    ({"numels": [3], "block_size": 0}, ["block_size", "multiple of 32", "2048"]),
    ({"numels": [3], "block_size": 48}, ["48", "multiple of 32"]),
    ({"numels": [3], "block_size": -32}, ["-32", "multiple of 32"]),
    ({"numels": [3], "block_size": 64.0}, ["64.0", "multiple of 32"]),
    ({"numels": [3], "ranks": 0}, ["ranks=0", "at least 1"]),
    ({"numels": [3], "chunks": 0}, ["chunks=0", "at least 1"]),
    ({"numels": [3, 4], "groups": [0]}, ["1 group", "2 parameters", "one for each"]),
])  # fmt: skip
def test_a_wrong_layout_says_what_and_what_to_do(arguments, words):
    with pytest.raises(ValueError) as raised:
        Layout(**arguments)
    assert all(word in str(raised.value) for word in words), raised.value

"""What an all-reduce sends: how many bytes, in which order, what is kept of it, and what arrives and is no message."""

import pytest
import torch

from onebit import CompressedAllReduce
from onebit.collectives.transport.protocol import Done, LocalTransport
from onebit.kernels.data.wire import MessageError
from tests.collectives import work
from tests.collectives.steps import Case
from tests.ranks import run_ranks


@pytest.mark.parametrize(("size", "scale", "reply"), [
    (1, "block", 1), (2, "tensor", 1), (3, "block", 1), (8, "block", 1), (3, "tensor", 1),
    (2, "block", "direct"), (3, "tensor", "direct"),
])  # fmt: skip
def test_wire_bytes_are_what_the_transport_was_given(size, scale, reply):
    """16 bytes of header, 4 a scale, 1 bit an element, rounded to 16; for each rank, chunk and phase."""
    case = Case((20_000, 2049), 2048, chunks=2, scale=scale, reply=reply)
    plan = case.plan(size)
    lengths = [plan.lengths_in(shard) for shard in plan.shards()]

    sizes = [(len(own) if scale == "block" else 1, sum(own)) for own in lengths]
    message = max(16 + -(-4 * scales // 16) * 16 + -(-elements // 128) * 16 for scales, elements in sizes)
    expected = (size - 1) * case.chunks * message * (1 if reply == "direct" else 2)
    for _, sent, counted, nbytes in run_ranks(size, work.watched, case, 3):
        assert (nbytes, sent, counted) == (message, expected, 3 * expected)


@pytest.mark.parametrize("size", [1, 3])
def test_the_pipeline_in_one_order_on_all_ranks(size):
    """Chunk j + 1 is under way before anyone waits for chunk j, and replies are expected before they can come."""
    phases = ("gather phase (all-to-all", "scatter phase (all-gather", "exchange (all-gather")
    g, s, d = ([f"the {name} of chunk {j})" for j in range(3)] for name in phases)
    in_two_phases = [
        f"start {g[0]}", f"expect {s[0]}", f"start {g[1]}", f"expect {s[1]}",
        f"wait {g[0]}", f"start {s[0]}", f"start {g[2]}", f"expect {s[2]}",
        f"wait {g[1]}", f"start {s[1]}", f"wait {s[0]}",
        f"wait {g[2]}", f"start {s[2]}", f"wait {s[1]}",
        f"wait {s[2]}",
    ]  # fmt: skip
    direct = [f"start {d[0]}", f"start {d[1]}", f"wait {d[0]}", f"start {d[2]}", f"wait {d[1]}", f"wait {d[2]}"]
    asking = "agreeing on finite values (all-reduce of one number)"
    asked = [f"start {asking}", f"wait {asking}"] if size > 1 else []
    for reply, expected in ((1, in_two_phases), ("direct", direct)):
        for events, *_ in run_ranks(size, work.watched, Case((1000,), chunks=3, reply=reply), 2):
            assert events == [*asked, *expected]
    for events, *_ in run_ranks(3, work.watched, Case((1000,)), 2):  # one small message carries its flag
        assert events == [f"start {g[0]}", f"expect {s[0]}", f"wait {g[0]}", f"start {s[0]}", f"wait {s[0]}"]


class Flipping(LocalTransport):
    """Flips a bit of the header of the messages it carries."""

    def __init__(self, collective: str, bit: int) -> None:
        self.collective, self.bit = collective, bit

    def all_to_all(self, out, sent, phase, name="all_to_all"):
        out.copy_(sent)
        if name == self.collective and "comparing" not in phase:
            out[0, self.bit // 8] ^= 1 << self.bit % 8
        return Done()

    def all_gather(self, out, sent, phase):
        return self.all_to_all(out, sent, phase, "all_gather")


@pytest.mark.parametrize("bit", [0, 31, 33, 64, 100])
def test_a_bit_flipped_in_a_header_on_the_way_is_found_by_the_rank_that_reads_it(bit):
    for collective, phase in (("all_to_all", "gather"), ("all_gather", "scatter")):
        average = CompressedAllReduce(100, block_size=32, chunks=2, process_group=Flipping(collective, bit))
        with pytest.raises(MessageError, match=f"the {phase} phase: what came from rank 0"):
            average(torch.randn(100))

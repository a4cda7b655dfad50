"""What an all-reduce sends: how many bytes, in which order, and what is kept of it."""

import numpy as np
import pytest

from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.ranks import run_ranks


@pytest.mark.parametrize(("size", "scale"), [(1, "block"), (2, "tensor"), (3, "block"), (3, "tensor"), (8, "block")])
def test_wire_bytes_are_what_the_transport_was_given(size, scale):
    """16 bytes of header, 4 a scale, 1 bit an element, rounded to 16; to every other rank, twice a chunk."""
    case = Case((20_000, 2049), 2048, chunks=2, scale=scale)
    plan = case.plan(size)
    lengths = [plan.lengths_in(shard) for shard in plan.shards()]
    scales = [len(own) if scale == "block" else 1 for own in lengths]
    message = max(16 + -(-4 * n // 16) * 16 + -(-sum(own) // 128) * 16 for n, own in zip(scales, lengths, strict=True))
    expected = 2 * (size - 1) * case.chunks * message
    for _, sent, counted, nbytes in run_ranks(size, work.watched, case, 3):
        assert (nbytes, sent, counted) == (message, expected, 3 * expected)


@pytest.mark.parametrize("size", [2, 8])
def test_a_28th_of_the_bytes_of_a_ring_all_reduce_in_fp32(size):
    for _, sent, _, _ in run_ranks(size, work.watched, Case((500_000,), 2048, chunks=4), 1):
        assert 0 < sent <= 2 * (size - 1) / size * 4 * 500_000 / 28


@pytest.mark.parametrize("size", [1, 3])
def test_the_pipeline_in_one_order_on_all_ranks(size):
    """Chunk j + 1 is under way before anyone waits for chunk j; collectives start in the same order everywhere, and
    replies are expected before they can come."""
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
    for reply, expected in ((1, in_two_phases), ("direct", direct)):
        for events, *_ in run_ranks(size, work.watched, Case((1000,), chunks=3, reply=reply), 2):
            assert events == ["all_max agreeing on finite values (all-reduce of one number)", *expected]


def test_one_small_message_carries_its_flag():
    """No round is spent on asking."""
    for events, *_ in run_ranks(3, work.watched, Case((1000,)), 2):
        assert not any(event.startswith("all_max") for event in events)
        assert len(events) == 5  # two collectives, started and waited for, of which one is expected


def test_the_replies_are_kept_as_received():
    """What an optimizer reads after an exchange: every rank's shard of every chunk, in the order of the space."""
    for decoded, result in run_ranks(3, work.replies_of, Case((2000,), chunks=3)):
        assert decoded == result


@pytest.mark.parametrize(("chunks", "scale"), [(1, "tensor"), (2, "block"), (3, "tensor")])
def test_the_server_residuals_of_all_ranks_in_the_order_of_the_space(chunks, scale):
    case = Case((300, 63), chunks=chunks, scale=scale, steps=3)
    answers = run_ranks(3, work.gathered_server, case)
    expected, valid = steps.server_residual(case, 3, [state for _, state in answers]), case.plan(3).valid
    assert np.any(expected)
    for gathered, _ in answers:  # with a tensor scale padding keeps what it is given
        np.testing.assert_allclose(np.frombuffer(gathered, np.float32)[valid], expected[valid], atol=1e-6)

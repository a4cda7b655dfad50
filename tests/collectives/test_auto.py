"""chunks="auto" before its first use: nothing that one rank does alone waits for the others."""

from dataclasses import replace

import pytest
import torch

from onebit.collectives import CompressedAllReduce
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.ranks import group, run_ranks

CASE = Case((12_288,), 32, chunks="auto", steps=2)


def looked_at_alone(rank, size, who):
    """Rank `who` reads every property and saves; the others do nothing, until all of them call it."""
    transport = work.Watched(work.transport_for(group()))
    all_reduce = CASE.all_reduce(transport)
    before = None
    if rank == who:
        before = all_reduce.exchange, all_reduce.chunks, all_reduce.wire_bytes, all_reduce.state_dict()
    seen = list(transport.events)
    tensors = CASE.inputs(rank, 0)
    all_reduce(tensors)
    return before, seen, all_reduce.chunks, [t.numpy().tobytes() for t in tensors]


def test_properties_and_states_are_no_collectives():
    answers = run_ranks(3, looked_at_alone, 1)
    (exchange, chunks, nbytes, state), seen, *_ = answers[1]
    assert (exchange, chunks, nbytes) == (None, None, 0)
    assert seen == []
    nothing_chosen = {"chunks": 0, "format": 0, "wire_bytes": 0}
    whose = {"rank": 1, "reply": "1", "slice": 0, "slices": 1, "sender": 1}
    assert {**state, "format": 0} == nothing_chosen | whose
    assert answers[0][2] >= 1
    assert all(answer[2:] == answers[0][2:] for answer in answers)


def prepared(rank, size):
    transport = work.Watched(work.transport_for(group()))
    all_reduce = CASE.all_reduce(transport)
    exchange = all_reduce.prepare()
    assert all_reduce.exchange is exchange is all_reduce.prepare()
    measured = len(transport.events)
    all_reduce(CASE.inputs(rank, 0))
    assert all_reduce.exchange is exchange
    return measured, [event for event in transport.events[measured:] if "number of chunks" in event]


def test_what_is_prepared_is_what_the_first_call_uses():
    for measured, again in run_ranks(3, prepared):
        assert measured > 0 and again == []


def resumed_unused(rank, size, chunks):
    """The state of one that was never called, loaded into one that was, beside one that starts anew."""
    unused = CASE.all_reduce(group()).state_dict()
    used, fresh = (replace(CASE, chunks=chunks).all_reduce(group()) for _ in range(2))
    steps.record(CASE, rank, group(), all_reduce=used)
    used.load_state_dict(unused)
    assert used.wire_bytes == 0
    one, other = (steps.record(CASE, rank, group(), all_reduce=each) for each in (used, fresh))
    return one.result_bytes == other.result_bytes and steps.same_state(one.states[-1], other.states[-1])


@pytest.mark.parametrize("chunks", [2, "auto"])
def test_an_unused_state_starts_anew(chunks):
    assert run_ranks(2, resumed_unused, chunks) == [True, True]


def test_an_unused_state_is_loaded_before_the_first_use():
    all_reduce = CompressedAllReduce(1000)
    all_reduce.load_state_dict(CompressedAllReduce(1000).state_dict())
    assert all_reduce.exchange is None
    all_reduce(torch.ones(1000))
    assert all_reduce.chunks == 1


@pytest.mark.parametrize(
    "other, message",
    [
        ({"format": 1}, "other sizes"),
        ({"rank": 1}, "saved by rank 1"),
        ({"residual": torch.zeros(2048)}, "holds no residual: it was damaged"),
        ({"wire_bytes": 5}, "holds no wire_bytes: it was damaged"),
    ],
    ids=str,
)
def test_an_unused_state_that_does_not_fit_changes_nothing(other, message):
    all_reduce = CompressedAllReduce(1000, chunks=1)
    all_reduce(torch.randn(1000))
    before = steps.state_of(all_reduce)
    with pytest.raises(ValueError, match=message):
        all_reduce.load_state_dict(CompressedAllReduce(1000).state_dict() | other)
    assert steps.same_state(before, steps.state_of(all_reduce))


def test_an_unused_state_of_other_tensors_is_refused():
    with pytest.raises(ValueError, match="other sizes"):
        CompressedAllReduce(1000, chunks=1).load_state_dict(CompressedAllReduce(999).state_dict())

"""A state of an all-reduce: the same on all ranks, it goes on bit for bit, and loads on any number of ranks; one that
does not fit is refused, and changes nothing.
"""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from onebit.collectives import CompressedAllReduce
from onebit.collectives.direct import Direct
from onebit.collectives.topology import Topology
from onebit.collectives.transport.protocol import LocalTransport
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.wire import Format
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.onebit.runs import on_ranks, same, snapshot
from tests.ranks import run_ranks

NUMELS = (300, 63)
BLOCKS = [Case(NUMELS, chunks=2), Case(NUMELS, norm="unbiased"), Case(NUMELS, reply="direct")]
OF_TENSORS = [Case(NUMELS, scale="tensor", norm="l2"), Case(NUMELS, scale="tensor", reply="direct", chunks=2)]
TWO_LEVELS = [Case(NUMELS, chunks=2, reply=reply, nodes=2) for reply in (1, "direct")]
TWO_LEVELS += [Case(NUMELS, scale="tensor", nodes=2)]
STOP = 3


@pytest.mark.parametrize("size, cases, auto", [
    (1, BLOCKS[:1], False), (3, BLOCKS + OF_TENSORS, False), (3, BLOCKS, True), (4, TWO_LEVELS, False),
])  # fmt: skip
@on_ranks()
def test_a_loaded_state_goes_on_bit_for_bit(rank, size, cases, auto):
    """auto: into an all-reduce that has not chosen a number of chunks. That asks no other rank."""
    states = []
    for case in cases:
        ranks = work.ranks_of(case, size)
        saved = case.all_reduce(ranks)
        steps.record(replace(case, steps=STOP), rank, ranks, all_reduce=saved)
        saved.synchronize()
        states.append(saved.state_dict())
        assert saved.synchronized and all(each.any() for each in states[-1]["residual"])
        file = io.BytesIO()
        torch.save(states[-1], file)
        file.seek(0)
        ranks = work.Noting(ranks) if auto else ranks
        loaded = (replace(case, chunks="auto") if auto else case).all_reduce(ranks)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        assert not auto or (ranks.events, loaded.exchange) == ([], None)
        assert same(loaded.state_dict(), states[-1])
        whole, rest = (steps.record(case, rank, ranks, STOP, all_reduce=each) for each in (saved, loaded))
        assert whole.result_bytes == rest.result_bytes and len(rest.results) == case.steps - STOP
        assert auto or saved.wire_bytes == loaded.wire_bytes
    return states


def run_on(rank, size, case, state, first, last):
    """Steps `first` to `last`: the sums of results and of means, and the state after them."""
    ranks = work.ranks_of(case, size)
    average = case.all_reduce(ranks)
    if state is not None:
        average.load_state_dict(state)
    results, means = ([np.zeros(numel) for numel in case.numels] for _ in range(2))
    for step in range(first, last):
        tensors = case.inputs(rank, step)
        average(tensors)
        everyone = zip(*[steps.values(case.inputs(other, step)) for other in range(size)], strict=True)
        results = [a + b for a, b in zip(results, steps.values(tensors), strict=True)]
        means = [a + np.mean(b, axis=0) for a, b in zip(means, everyone, strict=True)]
    average.synchronize()
    return results, means, average.state_dict()


OTHERS = [
    (1, Case(NUMELS, block_size=64)),
    (2, Case(NUMELS, scale="tensor", reply="direct")),
    (3, Case(NUMELS, chunks=3, scale="tensor")),
    (4, Case(NUMELS, chunks=2, nodes=2)),
    (4, Case(NUMELS, scale="tensor", nodes=2, reply="direct")),
]


@pytest.mark.parametrize(("size", "case"), OTHERS)
def test_the_sum_of_results_differs_from_that_of_means_by_the_last_residuals_over_a_save_on_other_ranks(size, case):
    before = run_ranks(3, run_on, Case(NUMELS, chunks=2), None, 0, 6)
    after = run_ranks(size, run_on, case, before[0][2], 6, 10)
    back = run_ranks(3, run_on, Case(NUMELS, chunks=2), after[-1][2], 10, 12)
    assert all(same(own[2], found[0][2]) for found in (before, after, back) for own in found)
    for i in range(len(NUMELS)):
        results, means = (sum(found[0][what][i] for found in (before, after, back)) for what in (0, 1))
        left_out = back[0][2]["residual"][i].double().numpy()
        np.testing.assert_allclose(results + left_out, means, atol=2e-5 * np.abs(means).max())
        assert np.abs(left_out).max() > 1e-2 * np.abs(means).max()


@pytest.mark.parametrize("size, case", [(2, BLOCKS[0]), (4, TWO_LEVELS[0])])
@on_ranks()
def test_a_state_has_zeros_and_a_warning_where_ranks_differ(rank, size, case):
    """There is no warning after a load. A state does not change with later calls."""
    average = case.all_reduce(work.ranks_of(case, size))
    average.synchronize()  # there is nothing yet
    assert not any(each.any() for each in average.state_dict()["residual"])
    average(case.inputs(rank, 0))
    average.synchronize()
    state = average.state_dict()
    kept = snapshot(state)
    average(case.inputs(rank, 1))
    with work.logged() as said:
        assert not average.synchronized
        found = average.state_dict()
        assert not any(each.any() for each in found["residual"])
        assert [tuple(each.shape) for each in found["residual"]] == [(numel,) for numel in case.numels]
    assert len(said) == 1 and "Call synchronize() on every rank before state_dict()" in said[0]
    assert same(state, kept) and found["wire_bytes"] == 2 * state["wire_bytes"]
    with work.logged() as said:
        average.load_state_dict(state)
        assert same(average.state_dict(), state)
    assert not said


def test_one_process_alone_synchronizes_by_itself():
    """It goes on from just that. A process that was never called has zeros."""
    one, other = (CompressedAllReduce(list(NUMELS), block_size=96, reply=1) for _ in range(2))
    assert not any(each.any() for each in one.state_dict()["residual"])
    with work.logged() as said:
        for average in (one, other):
            average(Case(NUMELS).inputs(0, 0))
        state = one.state_dict()
        other.synchronize()
    assert not said and all(each.any() for each in state["residual"]) and same(state, other.state_dict())


@pytest.mark.parametrize("chunks", [2, "auto"])
@pytest.mark.parametrize("scale", ["block", "tensor"])
@on_ranks(2)
def test_the_state_of_one_never_called_starts_anew(rank, scale, chunks):
    """Such a one has nothing to synchronize, and asks no other rank."""
    case = Case(NUMELS, chunks=2, scale=scale)
    ranks = work.Noting(work.ranks_of(case, 2))
    used, fresh, never = (each.all_reduce(ranks) for each in (case, case, replace(case, chunks=chunks)))
    never.synchronize()
    state = never.state_dict()
    assert ranks.events == []
    steps.record(case, rank, ranks, all_reduce=used)
    used.load_state_dict(state)
    assert used.wire_bytes == 0
    one, other = (steps.record(case, rank, ranks, all_reduce=each) for each in (used, fresh))
    assert one.result_bytes == other.result_bytes


RIGHT = [torch.ones(300), torch.ones(63)]
SPARSE = torch.ones(63).to_sparse()
WRONG = {
    "no dict": (None, TypeError, "NoneType"),
    "no residual": ({"wire_bytes": 0}, ValueError, r"not a state of CompressedAllReduce: it has \['wire_bytes'\]"),
    "no bytes": ({"residual": RIGHT}, ValueError, r"it has \['residual'\]"),
    "something more": ({"residual": RIGHT, "wire_bytes": 0, "rank": 0}, ValueError, "'rank'"),
    "one tensor": ({"residual": RIGHT[0], "wire_bytes": 0}, TypeError, "is a list of tensors, not a Tensor"),
    "too few": ({"residual": RIGHT[:1], "wire_bytes": 0}, ValueError, "residuals of 1 tensors, this all-reduce has 2"),
    "a list": ({"residual": [RIGHT[0], [0.0] * 63], "wire_bytes": 0}, TypeError, "tensor 1 is a tensor of .* not list"),
    "bytes as text": ({"residual": RIGHT, "wire_bytes": "5"}, ValueError, "not '5': it was damaged"),
    "fewer bytes than 0": ({"residual": RIGHT, "wire_bytes": -1}, ValueError, "not -1: it was damaged"),
    **{
        name: ({"residual": [RIGHT[0], value], "wire_bytes": 0}, error, message)
        for name, value, error, message in (
            ("other sizes", torch.ones(64), ValueError, r"tensor 1 has shape \[64\] in the state, here it is \[63\]"),
            ("a table", torch.ones(63, 1), ValueError, r"shape \[63, 1\]"),
            ("whole numbers", torch.ones(63).long(), TypeError, "floating-point numbers, not torch.int64"),
            ("nan", torch.ones(63) * torch.nan, ValueError, "not finite"),
            ("beyond fp32", torch.ones(63).double() * 1e300, ValueError, "not finite"),
            ("meta", torch.ones(63, device="meta"), ValueError, "device meta"),
            ("sparse", SPARSE, ValueError, "sparse"),
        )
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_state_is_refused_and_changes_nothing(name):
    """The run goes on as if nobody had tried."""
    state, error, message = WRONG[name]
    all_reduce, twin = (CompressedAllReduce(list(NUMELS), chunks=2) for _ in range(2))
    for step in range(2):
        for each in (all_reduce, twin):
            each(Case(NUMELS).inputs(0, step))
    before = steps.state_of(all_reduce)
    with pytest.raises(error, match=message):
        all_reduce.load_state_dict(state)
    assert same(before, steps.state_of(all_reduce))
    results = [Case(NUMELS).inputs(0, 3) for _ in range(2)]
    all_reduce(results[0])
    twin(results[1])
    assert all(map(torch.equal, *results))


def test_other_dtypes_are_loaded_too_and_nothing_is_shared_with_the_state():
    average = CompressedAllReduce(list(NUMELS))
    given = {"residual": [torch.full((300,), 0.5, dtype=torch.bfloat16), torch.full((63,), 0.25)], "wire_bytes": 7}
    average.load_state_dict(given)
    given["residual"][1].zero_()
    assert average.exchange is None and average.wire_bytes == 7
    assert [each.unique().tolist() for each in average.state_dict()["residual"]] == [[0.5], [0.25]]
    average([torch.zeros(300), result := torch.zeros(63)])
    assert result.unique().tolist() == [0.25] and average.chunks == 1


def test_an_exchange_wants_a_layout_for_its_group():
    with pytest.raises(ValueError, match="cut for 2 ranks, the group has 1"):
        TwoPhases(Topology.of(LocalTransport()), Layout([100], ranks=2), torch.device("cpu"))


@pytest.mark.parametrize("exchange_class", [TwoPhases, Direct])
def test_messages_stand_for_zeros_before_the_first(exchange_class, monkeypatch):
    """A momentum is read from them."""
    empty = Format.empty

    def filled(*args):
        messages = empty(*args)
        messages.buffer.fill_(255)
        return messages

    monkeypatch.setattr(Format, "empty", filled)
    exchange = exchange_class(Topology.of(LocalTransport()), Layout([100]), torch.device("cpu"))
    assert not any(each.buffer.any() for each in (exchange.sent, exchange.replies, exchange.chunks[0].own_reply))


def test_an_all_reduce_that_is_built_and_loaded_under_inference_mode():
    with torch.inference_mode():
        average = CompressedAllReduce(40, chunks=1)
        average.load_state_dict({"residual": [torch.ones(40)], "wire_bytes": 0})
    average(torch.linspace(-1, 1, 40))
    average.synchronize()
    assert average.state_dict()["residual"][0].any()

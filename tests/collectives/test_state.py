"""A state of an all-reduce: loaded, it goes on bit for bit; one that does not fit is refused, and changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from onebit.collectives import CompressedAllReduce
from onebit.collectives.transport import transport_for
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.ranks import group, run_ranks

RESUMED = [Case((300, 63), chunks=2), Case((300, 63), scale="tensor", norm="l2"), Case((300, 63), reply="direct")]


@pytest.mark.parametrize("auto", [False, True])
def test_a_loaded_state_goes_on_bit_for_bit(auto):
    for runs in run_ranks(3, work.resumed, RESUMED, 3, auto):
        for whole, rest in runs:
            assert b"".join(a.tobytes() for arrays in whole.results[3:] for a in arrays) == rest.result_bytes
            assert all(map(steps.same_state, whole.states[3:], rest.states))
            assert any(np.any(value) for value in rest.states[0].values())


DROP = "left out"


@pytest.mark.parametrize(
    "case", [Case((300, 63), chunks=2, steps=2), Case((300, 63), scale="tensor", steps=2)], ids=["block", "tensor"]
)
def test_a_wrong_state_is_refused_and_changes_nothing(case):
    plan = case.plan(3)
    residual, server = torch.ones(plan.size), torch.ones(plan.size // 3)
    scales = {"residual_scale": torch.ones(3), "server_residual_scale": torch.ones(1)}
    wrong = {
        "no residual": ({"residual": DROP}, "lacks residual"),
        "no server residual": ({"server_residual": DROP}, "lacks server_residual"),
        "no chunks": ({"chunks": DROP}, "lacks chunks"),
        "no bytes": ({"wire_bytes": DROP}, "lacks wire_bytes"),
        "something more": ({"momentum": residual}, "momentum"),
        "other scale": (
            scales if case.scale == "block" else dict.fromkeys(scales, DROP),
            "another scale",
        ),
        "other chunks": ({"chunks": case.chunks + 1}, f"chunks={case.chunks + 1}"),
        "longer residual": ({"residual": torch.ones(plan.size + case.block_size)}, "residual"),
        "longer server residual": ({"server_residual": torch.cat([server, server])}, "server_residual"),
        "server residual as a table": ({"server_residual": server[None]}, "server_residual"),
    }
    for outcomes in run_ranks(3, work.refused, case, {k: entries for k, (entries, _) in wrong.items()}, DROP):
        for name, (_, needle) in wrong.items():
            error, unchanged = outcomes[name]
            assert needle in error, f"{name}: {error!r}"
            assert unchanged, name
        assert outcomes["goes on"] == ("", True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"residual": [0.0]}, "damaged"),
        ({"chunks": None}, "damaged"),
        ({"format": "seven", "wire_bytes": True}, r"are numbers, not \[0, 1, 'seven', True\]: it was damaged"),
        ({"wire_bytes": "many"}, "damaged"),
        ({"rank": 1}, "saved by rank 1, this is rank 0"),
        ({"residual": torch.ones(1024, dtype=torch.float16)}, r"residual is torch\.float16"),
        ({"residual": torch.ones(1024), "server_residual": torch.ones(5)}, "server_residual"),  # all of it or nothing
        (CompressedAllReduce(1000, chunks=1, scale="tensor").state_dict(), r"residual_scale.*another scale"),
    ],
    ids=["residual", "chunks", "two numbers", "bytes", "rank", "dtype", "server residual", "scale"],
)
def test_a_damaged_state_changes_nothing(damage, message):
    all_reduce = CompressedAllReduce(1000, chunks=1)
    before = steps.state_of(all_reduce)
    state = {k: v + 1 if isinstance(v, torch.Tensor) else v for k, v in all_reduce.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        all_reduce.load_state_dict(state | damage)
    assert steps.same_state(before, steps.state_of(all_reduce))


@pytest.mark.parametrize(
    "other", [{"numel": [999]}, {"numel": [500, 500]}, {"numel": [1000], "block_size": 64}], ids=str
)
def test_a_state_of_other_tensors_is_refused(other):
    """Though it is as long with its padding."""
    saved = CompressedAllReduce(**{"block_size": 32, "chunks": 1, **other})
    with pytest.raises(ValueError):
        CompressedAllReduce([1000], block_size=32, chunks=1).load_state_dict(saved.state_dict())


def loaded_alone(rank, size):
    """Rank 1 loads a state into an object that would measure: no other rank takes part."""
    case = Case((700,), 32, chunks=5, steps=2)
    saved = case.all_reduce(group())
    steps.record(case, rank, group(), all_reduce=saved)
    if rank == 1:
        transport = work.Watched(transport_for(group()))
        loaded = replace(case, chunks="auto").all_reduce(transport)
        loaded.load_state_dict(saved.state_dict())
        return loaded.chunks, transport.events, steps.same_state(steps.state_of(saved), steps.state_of(loaded))


def test_a_state_brings_its_number_of_chunks():
    """No measurement, and no collective. Of other chunks than those in use too."""
    assert run_ranks(3, loaded_alone) == [None, (5, [], True), None]
    saved, other = (CompressedAllReduce(500, block_size=32, chunks=chunks) for chunks in (3, "auto"))
    assert other.prepare().layout.chunks == 1
    other.load_state_dict(saved.state_dict())
    assert other.chunks == 3

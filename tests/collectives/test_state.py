"""A state of an all-reduce: loaded, it goes on bit for bit; one that does not fit is refused, and changes nothing."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from onebit.collectives import CompressedAllReduce
from onebit.collectives.topology import Topology
from onebit.collectives.transport.protocol import LocalTransport
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels.data.layout import Layout
from tests.collectives import steps, work
from tests.collectives.steps import Case, Recorded
from tests.onebit.runs import on_ranks, same

ONE_LEVEL = [Case((300, 63), chunks=2), Case((300, 63), scale="tensor", norm="l2"), Case((300, 63), reply="direct")]
TWO_LEVELS = [Case((300, 63), chunks=2, reply=reply, nodes=2) for reply in (1, "direct")]


@pytest.mark.parametrize("size, cases, auto", [(3, ONE_LEVEL, False), (3, ONE_LEVEL, True), (4, TWO_LEVELS, False)])
@on_ranks()
def test_a_loaded_state_goes_on_bit_for_bit(rank, size, cases, auto):
    """auto: into an all-reduce that has not chosen a number of chunks. That asks no other rank."""
    stop = 3
    for case in cases:
        ranks = work.ranks_of(case, size)
        whole = steps.record(case, rank, ranks)
        saved = case.all_reduce(ranks)
        steps.record(replace(case, steps=stop), rank, ranks, all_reduce=saved)
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        file.seek(0)
        ranks = work.Noting(ranks) if auto else ranks
        loaded = (replace(case, chunks="auto") if auto else case).all_reduce(ranks)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        assert not auto or (ranks.events, loaded.chunks) == ([], case.chunks)
        rest = steps.record(case, rank, ranks, first=stop, all_reduce=loaded)
        assert Recorded(whole.states, whole.results[stop:]).result_bytes == rest.result_bytes
        assert all(map(same, whole.states[stop:], rest.states))
        assert any(np.any(value) for value in rest.states[0].values())


RIGHT = CompressedAllReduce([300, 700], chunks=2).state_dict()
UNUSED = CompressedAllReduce([300, 700]).state_dict()
RESIDUAL, SERVER = RIGHT["residual"], RIGHT["server_residual"]
OF_TENSORS = CompressedAllReduce([300, 700], chunks=2, scale="tensor").state_dict()
WRONG = {
    "no residual": ({"residual": None}, r"the state has \['server_residual'\]"),
    "no server residual": ({"server_residual": None}, r"the state has \['residual'\]"),
    "no chunks": ({"chunks": None}, "lacks chunks"),
    "something more": ({"momentum": RESIDUAL}, "momentum"),
    "another scale": (OF_TENSORS, "other options"),
    "other chunks": ({"chunks": 3}, "chunks=3"),
    "longer residual": ({"residual": torch.ones(len(RESIDUAL) + 64)}, "residual"),
    "server residual as a table": ({"server_residual": SERVER[None]}, "server_residual"),
    "half precision": ({"residual": RESIDUAL.half()}, r"residual is torch\.float16"),
    "a list": ({"residual": [0.0]}, "damaged"),
    "not finite": ({"residual": RESIDUAL * torch.nan}, "not finite"),
    "ranks": ({"rank": torch.tensor([0, 1])}, "saved with rank"),
    "a rank of another type": ({"rank": 0.0}, "saved with rank 0.0"),
    "numbers": ({"format": "seven", "wire_bytes": True}, r"are numbers, not \[2, 'seven', True\]: it was damaged"),
    "another rank": ({"rank": 1}, "saved with rank 1, here it is 0"),
    "other tensors": (CompressedAllReduce([301, 699], chunks=2).state_dict(), "other sizes"),
    "unused, another format": ({"format": 1}, "other sizes"),
    "unused, of other tensors": (CompressedAllReduce([301, 699]).state_dict(), "other sizes"),
    "unused, a residual": ({"residual": torch.zeros(2048)}, "holds no residual: it was damaged"),
    "unused, bytes": ({"wire_bytes": 5}, "holds no wire_bytes: it was damaged"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_state_is_refused_and_changes_nothing(name):
    """Though all else in it is right, and the run goes on as if nobody had tried. Unused: of one never called."""
    entries, message = WRONG[name]
    all_reduce, twin = (CompressedAllReduce([300, 700], chunks=2) for _ in range(2))
    for step in range(2):
        for each in (all_reduce, twin):
            each(Case((300, 700)).inputs(0, step))
    before, right = steps.state_of(all_reduce), UNUSED if "unused" in name else all_reduce.state_dict()
    state = {k: v.clone() + 1 if isinstance(v, torch.Tensor) else v for k, v in right.items()} | entries
    with pytest.raises(ValueError, match=message):
        all_reduce.load_state_dict({k: v for k, v in state.items() if v is not None})
    assert same(before, steps.state_of(all_reduce))
    results = [Case((300, 700)).inputs(0, 3) for _ in range(2)]
    all_reduce(results[0])
    twin(results[1])
    assert all(map(torch.equal, *results))


def test_a_state_of_other_chunks_than_those_in_use_is_loaded_too():
    saved, other = (CompressedAllReduce(500, block_size=32, chunks=chunks) for chunks in (3, "auto"))
    assert other.prepare().layout.chunks == 1
    other.load_state_dict(saved.state_dict())
    assert other.chunks == 3


def test_an_exchange_wants_a_layout_for_its_group_and_copies_all_of_a_state_or_nothing():
    alone = Topology.of(LocalTransport())
    with pytest.raises(ValueError, match="cut for 2 ranks, the group has 1"):
        TwoPhases(alone, Layout([100], ranks=2), torch.device("cpu"))
    exchange = TwoPhases(alone, Layout([1000], block_size=32), torch.device("cpu"))
    state = {name: torch.ones_like(value) for name, value in exchange.state_dict().items()}
    with pytest.raises(ValueError, match="server_residual"):
        exchange.load_state_dict(state | {"server_residual": torch.ones(5)})
    assert not any(value.any() for value in exchange.state_dict().values())


def test_an_all_reduce_that_is_built_under_inference_mode_and_what_is_no_state():
    with torch.inference_mode():
        average = CompressedAllReduce(40, chunks=1)
    average(torch.linspace(-1, 1, 40))
    with pytest.raises(TypeError, match="NoneType"):
        average.load_state_dict(None)

"""A state of an all-reduce: loaded, it goes on bit for bit; one that does not fit is refused, and changes nothing."""

import numpy as np
import pytest
import torch

from onebit.collectives import CompressedAllReduce
from onebit.collectives.transport.protocol import LocalTransport
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels.data.layout import Layout
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "case", [Case((300, 63), chunks=2), Case((300, 63), scale="tensor", norm="l2"), Case((300, 63), reply="direct")]
)
@pytest.mark.parametrize("auto", [False, True])
def test_a_loaded_state_goes_on_bit_for_bit(case, auto):
    for whole, rest in run_ranks(3, work.resumed, case, 3, auto):
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


@pytest.mark.parametrize("damage", [{"residual": [0.0]}, {"chunks": None}, {"format": "1"}], ids=str)
def test_a_damaged_state_changes_nothing(damage):
    all_reduce = CompressedAllReduce(100, chunks=1)
    before = steps.state_of(all_reduce)
    state = {k: v + 1 if isinstance(v, torch.Tensor) else v for k, v in all_reduce.state_dict().items()}
    with pytest.raises(ValueError, match="damaged"):
        all_reduce.load_state_dict(state | damage)
    assert steps.same_state(before, steps.state_of(all_reduce))


def test_the_numbers_of_a_damaged_state_are_shown():
    all_reduce = CompressedAllReduce(100, chunks=1)
    state = all_reduce.state_dict() | {"format": "seven", "wire_bytes": True}
    with pytest.raises(ValueError, match=r"are numbers, not \[0, 1, 'seven', True\]"):
        all_reduce.load_state_dict(state)


def test_a_state_of_another_rank_is_refused():
    all_reduce = CompressedAllReduce(100, chunks=1)
    with pytest.raises(ValueError, match="saved by rank 1, this is rank 0"):
        all_reduce.load_state_dict(all_reduce.state_dict() | {"rank": 1})


def test_a_state_in_another_dtype_is_refused():
    all_reduce = CompressedAllReduce(100, chunks=1)
    state = all_reduce.state_dict()
    with pytest.raises(ValueError, match=r"residual is torch\.float16"):
        all_reduce.load_state_dict(state | {"residual": state["residual"].half()})


def test_a_wrong_count_of_bytes_changes_nothing():
    all_reduce = CompressedAllReduce(100, chunks=1)
    before = steps.state_of(all_reduce)
    state = {k: v + 1 if isinstance(v, torch.Tensor) else v for k, v in all_reduce.state_dict().items()}
    with pytest.raises(ValueError):
        all_reduce.load_state_dict(state | {"wire_bytes": "many"})
    assert steps.same_state(before, steps.state_of(all_reduce))


@pytest.mark.parametrize(
    "other", [{"numel": [999]}, {"numel": [500, 500]}, {"numel": [1000], "block_size": 64}], ids=str
)
def test_a_state_of_other_tensors_is_refused(other):
    """Though it is as long with its padding."""
    saved = CompressedAllReduce(**{"block_size": 32, "chunks": 1, **other})
    with pytest.raises(ValueError):
        CompressedAllReduce([1000], block_size=32, chunks=1).load_state_dict(saved.state_dict())


def test_a_state_of_another_scale_is_distinguished_from_one_of_other_tensors():
    block, tensor = (CompressedAllReduce(1000, chunks=1, scale=scale) for scale in ("block", "tensor"))
    with pytest.raises(ValueError, match=r"residual_scale.*another scale"):
        block.load_state_dict(tensor.state_dict())


def test_an_exchange_copies_all_of_a_state_or_nothing():
    exchange = TwoPhases(Layout([1000], block_size=32), LocalTransport(), torch.device("cpu"))
    state = {name: torch.ones_like(value) for name, value in exchange.state_dict().items()}
    with pytest.raises(ValueError, match="server_residual"):
        exchange.load_state_dict(state | {"server_residual": torch.ones(5)})
    assert not any(value.any() for value in exchange.state_dict().values())
    exchange.load_state_dict(state)
    assert all(value.all() for value in exchange.state_dict().values())

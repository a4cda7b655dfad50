"""What `onebit.reform` refuses: every rank says why, and goes on as if nobody had asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import onebit
from onebit.collectives import CollectiveError
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import LocalTransport
from tests import internals
from tests.faults.striking import SCATTER
from tests.onebit.elastic.failing import Failing, Failure
from tests.onebit.elastic.test_halfway import state_of
from tests.onebit.runs import Case, assert_message, bits, nodes_of, on_ranks, refused, run, same, snapshot, take
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 3}, groups=({}, {"lr": 3e-3}))
Made = tuple[Any, list[nn.Parameter]]
ALONE = LocalTransport()


def trained(case: Case, rank: int, steps: int, of: Any) -> Made:
    params, optimizer = case.made(of)
    run(case, rank, optimizer, params, 1, steps)
    return optimizer, params


def ranks_at_other_steps(rank: int) -> Made:
    optimizer, params = trained(CASE, rank, 5, group(2))
    if rank == 1:
        optimizer.load_state_dict(snapshot(optimizer.state_dict()))
        internals.stages(optimizer).counts[0] += 2
    return optimizer, params


def joins(**changes: Any) -> Callable[[int], Made]:
    """Two ranks train; others join with another case."""
    return lambda rank: trained(CASE, rank, 5, group(2)) if rank < 2 else trained(CASE.but(**changes), rank, 0, ALONE)


def another_compress(rank: int) -> Made:
    """Make it in stage 1: in stage 2 the state would tell."""
    case, ranks = CASE.but(options={"freeze_step": 30}), group(2) if rank < 2 else ALONE
    return trained(case.but(groups=({}, {"lr": 3e-3, "compress": rank < 2})), rank, 5 * (rank < 2), ranks)


def another_memory_order(rank: int) -> Made:
    if rank < 2:
        return trained(CASE, rank, 5, group(2))
    params = CASE.parameters()
    params[0].data = params[0].data.t().contiguous().t()
    return CASE.build(params, ALONE), params


def nothing_is_kept(rank: int, **options: Any) -> Made:
    own = {"freeze_step": 3, "chunks": 2, **options}
    case, transport = CASE.but(options=own), Failing(group(2), Failure(6, f"{SCATTER} 1"))
    params, optimizer = case.made(transport)
    with pytest.raises(CollectiveError):
        for transport.step in range(1, 7):
            take(case, rank, optimizer, params, transport.step)
    return optimizer, params


def on_nodes(rank: int) -> Made:
    return trained(CASE.but(each=2), rank, 4, transport_for(group(4)))


ANOTHER, MASK = joins(shapes=((3,), (4,))), torch.arange(63).view(7, 9) > 8
REFUSED: dict[str, tuple[Callable[[int], Made], int, int, tuple[str, ...]]] = {  # made, ranks, ranks a node, words
    "other steps": (ranks_at_other_steps, 2, 1, ("rank 0 has taken or skipped 5 steps, and rank 1 7",)),
    "another model": (ANOTHER, 3, 1, ("rank 2 has checksum of shapes",)),
    "another model, on a node": (ANOTHER, 4, 2, ("ranks do not agree", "has checksum of shapes")),
    "other groups": (joins(groups=({},)), 3, 1, ("rank 2 has param groups of so many parameters '[4]'",)),
    "another compress": (another_compress, 3, 1, ("rank 2 has compress '[True, False]'",)),
    "another mask": (joins(groups=({"mask": [MASK, None]}, {})), 3, 1, ("rank 2 has masks",)),
    "another memory order": (another_memory_order, 3, 1, ("rank 2 has memory order",)),
    "a node of ranks before": (on_nodes, 4, 1, ("node", "give a Topology")),
    "nothing is kept": (nothing_is_kept, 2, 1, ("rank 0 has kept nothing", "elastic=True")),
    "a rank alone twice": (lambda rank: trained(CASE, 0, 5, ALONE), 2, 1, ("do not belong to one run",)),
}


@pytest.mark.parametrize(("name", "size"), [(name, row[1]) for name, row in REFUSED.items()], ids=REFUSED)
@on_ranks()
def test_a_reform_that_does_not_fit_changes_nothing(rank: int, size: int, name: str) -> None:
    warnings.simplefilter("ignore", UserWarning)
    made, _, each, words = REFUSED[name]
    optimizer, params = made(rank)
    before = state_of(optimizer, params)
    with refused(ValueError, *words):
        onebit.reform(optimizer, group(size) if each == 1 else nodes_of(group(size), each))
    assert same(state_of(optimizer, params), before)


class NotCopied:
    """JSON can't hold this, and nothing can copy this."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("a lock can't be copied")


@contextmanager
def another_value(optimizer: Any, params: Any) -> Iterator[None]:
    optimizer.param_groups[0]["name"] = NotCopied()
    yield
    del optimizer.param_groups[0]["name"]


@contextmanager
def another_state(optimizer: Any, params: Any) -> Iterator[None]:
    own = optimizer.state[params[0]]
    optimizer.state[params[0]] = {**own, "residual": own["residual"].clone()}
    yield
    optimizer.state[params[0]] = own


@contextmanager
def a_damaged_residual(optimizer: Any, params: Any) -> Iterator[None]:
    residual = optimizer.state[params[0]]["residual"]
    before = residual.clone()
    residual.fill_(float("nan"))
    yield
    residual.copy_(before)


@contextmanager
def another_shape(optimizer: Any, params: Any) -> Iterator[None]:
    params[0].data = params[0].data.view(-1)
    yield
    params[0].data = params[0].data.view(CASE.shapes[0])


WRONG_ON_ONE = {  # what is wrong on rank 1, ranks and ranks a node of the new group, the error, and its words
    "optimizer.state was changed": (another_state, 2, 1, ValueError, "rank 1: the state of parameter"),
    "at_last_sync": (lambda own, _: own.at_last_sync(), 3, 1, ValueError, "rank 1: reform within at_last_sync"),
    "another shape": (another_shape, 3, 1, ValueError, "rank 1 has checksum of shapes"),
    "JSON can't hold": (another_value, 3, 1, ValueError, "rank 1: 'name' of param group 0 is a NotCopied"),
    "no copy": (another_value, 2, 1, RuntimeError, "rank 1: a lock can't be copied"),
    "a damaged residual": (a_damaged_residual, 3, 1, ValueError, "rank 1: the residual of parameter"),
    "a damaged residual, on a node": (a_damaged_residual, 4, 2, ValueError, "rank 1: the residual of parameter"),
}


@pytest.mark.parametrize(("name", "size"), [(name, row[1]) for name, row in WRONG_ON_ONE.items()], ids=WRONG_ON_ONE)
@on_ranks()
def test_what_one_rank_alone_has_is_an_error_on_all_and_changes_nothing(rank: int, size: int, name: str) -> bytes:
    """Two ranks train; others join. Then the same reform does what it does without the error."""
    wrong, _, each, kind, words = WRONG_ON_ONE[name]
    ends = []
    for fails in (True, False):
        optimizer, params = trained(CASE, rank, 5 * (rank < 2), group(2 if rank < 2 else size))
        ranks = group(size) if each == 1 else nodes_of(group(size), each)
        if fails:
            with wrong(optimizer, params) if rank == 1 else nullcontext(), refused(kind, words):
                onebit.reform(optimizer, ranks)
        onebit.reform(optimizer, ranks)
        run(CASE, rank, optimizer, params, 6, 7)
        ends.append(bits([*params, *tensors_of(optimizer)]))
    assert ends[0] == ends[1]
    return bits(params)


def tensors_of(optimizer: Any) -> Iterator[torch.Tensor]:
    yield from (value for own in optimizer.state_dict()["state"].values() for value in own.values())
    yield from internals.left_out(optimizer)


@pytest.mark.parametrize("wrong", [another_state, another_value])
def test_a_rank_that_could_not_leave_has_what_it_owes(wrong: Any) -> None:
    """Rank 1 finds what is wrong before the others hand over, or when rank 2 has handed over."""
    found = run_ranks(3, leave_twice, wrong)
    assert found[0] == found[1]


def leave_twice(rank: int, size: int, wrong: Any) -> bytes:
    ends = []
    for fails in (True, False):
        optimizer, params = trained(CASE, rank, 5, group(3))
        ranks = group(2) if rank < 2 else None
        if fails:
            error = pytest.raises((ValueError, RuntimeError))
            with wrong(optimizer, params) if rank == 1 else nullcontext(), error as caught:
                onebit.reform(optimizer, ranks, leaving=[2])
            told = "no rank has left" if rank == 2 and wrong is another_value else "rank 1: "
            assert_message(caught, told)
        onebit.reform(optimizer, ranks, leaving=[2])
        if rank < 2:
            run(CASE, rank, optimizer, params, 6, 7)
        ends.append(bits([*params, *tensors_of(optimizer)]))
    assert ends[0] == ends[1]
    return bits(params)


@on_ranks(2)
def test_no_rank_leaves_in_good_order_after_a_step_that_did_not_end(rank: int) -> None:
    """It would hand over residuals of half a step."""
    optimizer, params = nothing_is_kept(rank, elastic=True)
    before = bits(params)
    with refused(ValueError, "leaving= after a step that did not end", "without leaving="):
        onebit.reform(optimizer, ALONE if rank == 0 else None, leaving=[1])
    assert bits(params) == before


def test_ranks_leave_before_the_first_step() -> None:
    """It is as if they had not been there."""
    found = run_ranks(3, leave_at_once)[:2]
    assert found[0] == found[1]


def leave_at_once(rank: int, size: int) -> bytes:
    ends = []
    for there in (3, 2):
        if rank < there:
            optimizer, params = trained(CASE, rank, 0, group(there))
            if there == 3:
                onebit.reform(optimizer, group(2) if rank < 2 else None, leaving=[2])
            if rank < 2:
                run(CASE, rank, optimizer, params, 1, 5)
            ends.append(bits(params))
    assert rank == 2 or ends[0] == ends[1]
    return ends[0]


def test_an_error_while_parameters_of_the_last_sync_are_put_in_puts_the_others_back() -> None:
    local = {"var_update_scaler": 3, "var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4}
    optimizer, params = trained(Case("ZeroOneAdam", options=local), 0, 9, ALONE)
    x, clone, copied = bits(params), torch.Tensor.clone, []

    def fails_at_last(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        if len(copied) == len(params):
            raise torch.OutOfMemoryError
        return clone(tensor)

    with mock.patch.object(torch.Tensor, "clone", fails_at_last), pytest.raises(torch.OutOfMemoryError):
        optimizer.at_last_sync().__enter__()
    assert bits(params) == x
    with optimizer.at_last_sync():
        assert bits(params) != x
    assert bits(params) == x


def test_nobody_leaves_whom_the_group_does_not_have() -> None:
    optimizer, _ = trained(CASE, 0, 4, ALONE)
    for leaving in ([1], [0]):
        with pytest.raises(ValueError, match="one stays at least"):
            onebit.reform(optimizer, ALONE, leaving=leaving)

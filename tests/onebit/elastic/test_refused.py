"""What `onebit.reform` refuses: every rank says why, and goes on as if nobody had asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onebit
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import LocalTransport
from tests.onebit.runs import Case, assert_message, bits, snapshot, take, unchanged
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 3}, groups=({}, {"lr": 3e-3}))
Made = tuple[Any, list[nn.Parameter]]


def trained(case: Case, rank: int, steps: int, of: Any) -> Made:
    params = case.parameters()
    optimizer = case.build(params, of)
    for step in range(1, steps + 1):
        take(case, rank, optimizer, params, step)
    return optimizer, params


def ranks_at_other_steps(rank: int) -> Made:
    optimizer, params = trained(CASE, rank, 5, group(2))
    if rank == 1:
        optimizer.load_state_dict(snapshot(optimizer.state_dict()))
        optimizer.current.stages.counts[0] += 2
    return optimizer, params


def another_model(rank: int) -> Made:
    return trained(
        CASE if rank < 2 else CASE.but(shapes=((3,), (4,))), rank, 5 * (rank < 2), group(2 if rank < 2 else 3)
    )


def other_groups(rank: int) -> Made:
    return trained(CASE if rank < 2 else CASE.but(groups=({},)), rank, 5 * (rank < 2), group(2 if rank < 2 else 3))


def a_node_of_the_ranks_before(rank: int) -> Made:
    ranks = transport_for(group(4))
    return trained(CASE.but(each=2), rank, 4, ranks)


def two_of_the_same_place(rank: int) -> Made:
    return trained(CASE, 0, 5, LocalTransport())


REFUSED: dict[str, tuple[Callable[[int], Made], int, tuple[str, ...]]] = {
    "other steps": (ranks_at_other_steps, 2, ("rank 0 has taken or skipped 5 steps, and rank 1 7",)),
    "another model": (another_model, 3, ("join",)),
    "other groups": (other_groups, 3, ("join",)),
    "a node of ranks before": (a_node_of_the_ranks_before, 4, ("node", "give a Topology")),
    "a rank alone twice": (two_of_the_same_place, 2, ("do not belong to one run",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_reform_that_does_not_fit_changes_nothing(name: str) -> None:
    run_ranks(REFUSED[name][1], refuse, name)


def refuse(rank: int, size: int, name: str) -> None:
    warnings.simplefilter("ignore", UserWarning)
    made, _, words = REFUSED[name]
    optimizer, params = made(rank)
    before, x = snapshot(optimizer.state_dict()), bits(params)
    with pytest.raises(ValueError) as caught:
        onebit.reform(optimizer, group(size))
    assert_message(caught, *words)
    assert bits(params) == x and unchanged(snapshot(optimizer.state_dict()), before)


def test_what_is_no_optimizer_of_onebit_is_refused() -> None:
    with pytest.raises(TypeError, match="reform needs an optimizer of onebit"):
        onebit.reform(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0), None)


def test_nobody_leaves_whom_the_group_does_not_have() -> None:
    optimizer, _ = trained(CASE, 0, 4, LocalTransport())
    for leaving in ([1], [0]):
        with pytest.raises(ValueError, match="one stays at least"):
            onebit.reform(optimizer, LocalTransport(), leaving=leaving)

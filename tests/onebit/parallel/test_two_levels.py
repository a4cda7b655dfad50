"""Two levels in whole steps: DDP, scaled gradients, bad gradients, diagnostics, and nodes that are found."""

from __future__ import annotations

import math
import os
from unittest.mock import patch

import pytest
import torch

from tests import internals
from tests.checkpoints import Run
from tests.collectives.work import logged
from tests.onebit.optim.contract import give, started
from tests.onebit.runs import Case, bits, kinds, on_ranks
from tests.ranks import group

CASE = Case(shapes=((7, 9), (33,), (2,), (130,), (400,)), steps=6, options={"freeze_step": 2, "chunks": 2}, each=2)


@on_ranks(4)
def test_gradients_may_be_scaled_on_every_rank_by_another_number(rank: int, size: int) -> list[bytes]:
    """They are scaled by a power of 2, as GradScaler does it; and not."""
    ends = []
    for scale in (1.0, 2.0 ** (8 + rank)):
        params, optimizer = started(CASE, 0, rank, size)
        for step in range(1, 7):
            give(CASE, params, step, rank)
            for p in params:
                p.grad *= scale
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
            optimizer.step()
        ends.append(bits(params))
    assert ends[0] == ends[1]
    return ends


@pytest.mark.parametrize(("hosts", "slices"), [([0, 0, 1, 1], 2), ([0, 0, 0, 0], 1)])
@on_ranks(4)
def test_hosts_are_nodes(rank: int, hosts: list[int], slices: int) -> bytes:
    """Found in the first step, or before a load."""
    case = CASE.but(options={"freeze_step": 2, "node_group": "auto"}, each=1)
    with patch.dict(os.environ, {"GROUP_RANK": str(hosts[rank])}), logged() as said:
        run = Run(case, 4, rank, group())
        topology, state = internals.topology(run.optimizer), run.all()[1]
        run.optimizer = case.build(run.params, group())
        run.optimizer.load_state_dict(state)
        assert internals.topology(run.optimizer).residual_index == topology.residual_index
        run.on(5, 6)
    assert (topology.slices, topology.residual_index) == (slices, rank)
    assert rank > 0 or any("2 nodes of 2 ranks" in line for line in said) == (slices == 2)
    return bits(run.params)


@kinds
@on_ranks(4)
def test_diagnostics_are_of_this_ranks_slice(rank: int, kind: str) -> float:
    """The norm that is reported of this rank's residual is, for every parameter, that of what it has of it."""
    optimizer = Run(CASE.but(kind=kind), 5, rank, group()).optimizer
    found, [state] = list(optimizer.diagnostics().values()), internals.states(optimizer)
    norms = [math.hypot(*(float(e.norm()) for _, e in state.parts_of("residual", i))) for i in range(len(found))]
    assert [own["residual_norm"] for own in found] == pytest.approx(norms, rel=1e-5)
    assert max(norms) > 0 and (0.0 in norms or rank > 0)
    return found[0]["momentum_scale"]

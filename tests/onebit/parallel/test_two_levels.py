"""Two levels in whole steps: DDP, scaled gradients, bad gradients, diagnostics, and nodes that are found."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.optim import gradients
from tests.checkpoints import Run
from tests.collectives.work import logged
from tests.onebit.optim.contract import give, started
from tests.onebit.runs import Case, bits, build, kinds, nodes_of, on_ranks
from tests.ranks import group

CASE = Case(shapes=((7, 9), (33,), (2,), (130,), (400,)), steps=6, options={"freeze_step": 2, "chunks": 2}, each=2)


@on_ranks(4)
def test_gradients_may_be_scaled_on_every_rank_by_another_number(rank: int, size: int) -> list[bytes]:
    """By a power of 2, as GradScaler does it; and not."""
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


def trained(rank: int, kind: str, ddp: bool, **options: Any) -> tuple[Tensor, list[str]]:
    """Two backward passes a step, 8 steps, with DDP or without, on the data of the rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))
    wrapped = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.003) if ddp else net
    options = {"freeze_step": 3, "block_size": 32, "chunks": 2, "process_group": nodes_of(group(), 2), **options}
    optimizer, source = build(kind, net.parameters(), **options), torch.Generator().manual_seed(rank)
    if ddp:
        onebit.attach(wrapped, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            optimizer.zero_grad()
            for last in (False, True):
                x = torch.randn(8, 20, generator=source)
                with nullcontext() if last else wrapped.no_sync() if ddp else optimizer.no_sync():
                    wrapped(x).square().mean().backward()
            optimizer.step()
    end = torch.cat([p.detach().view(-1) for p in net.parameters()])
    return end, [str(w.message) for w in caught if "onebit" in str(w.message)]


@kinds
@on_ranks(4)
def test_ddp_and_overlap_with_accumulated_gradients(rank: int, kind: str) -> list[Tensor]:
    """The same bits with overlap and without; with DDP, which averages over the node once, the same but for the order
    of its sums. With mean sizes, of all scales the smallest: a sign that rounding turns moves least."""
    ends: list[Tensor] = []
    for options in ({}, {"gradient_dtype": torch.bfloat16}) if kind == "OneBitAdam" else ({},):
        for ddp, overlap in ((False, False), (False, True), (True, False), (True, True)):
            with patch.object(gradients, "average_slices", wraps=gradients.average_slices) as average:
                end, warned = trained(rank, kind, ddp, overlap=overlap, norm="l1", **options)
            assert not warned and (overlap or bool(average.call_count) == (not ddp))
            ends.append(end)
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[2], ends[3])
    assert (ends[0] - ends[2]).abs().max() < 1e-6
    if narrow := ends[4:]:
        assert torch.equal(narrow[0], narrow[1])
        for one, other in ((0, 2), (2, 3)):  # rounding to 16 bits turns a sign or two
            assert (narrow[one] - narrow[other]).abs().max() < 5e-3
        assert (ends[0] - narrow[0]).abs().max() > 1e-4
    return ends


@pytest.mark.parametrize(("hosts", "slices"), [([0, 0, 1, 1], 2), ([0, 0, 0, 0], 1)])
@on_ranks(4)
def test_hosts_are_nodes(rank: int, hosts: list[int], slices: int) -> bytes:
    """Found in the first step, or before a load."""
    case = CASE.but(options={"freeze_step": 2, "node_group": "auto"}, each=1)
    with patch.dict(os.environ, {"GROUP_RANK": str(hosts[rank])}), logged() as said:
        run = Run(case, 4, rank, group())
        topology, run.optimizer, state = run.optimizer.setup.topology, case.build(run.params, group()), run.all()[1]
        run.optimizer.load_state_dict(state)
        assert run.optimizer.setup.topology.place == topology.place
        run.on(5, 6)
    assert (topology.slices, topology.place) == (slices, rank)
    assert rank > 0 or any("2 nodes of 2 ranks" in line for line in said) == (slices == 2)
    return bits(run.params)


@kinds
@on_ranks(4)
def test_diagnostics_are_of_this_ranks_slice(rank: int, kind: str) -> float:
    """Of every parameter the norm that is reported of this rank's residual is that of what it saves."""
    optimizer = Run(CASE.but(kind=kind), 5, rank, group()).optimizer
    found = list(optimizer.diagnostics().values())
    saved = [own.get(f"residual_of_rank_{rank}") for own in optimizer.state_dict()["state"].values()]
    norms = [0.0 if e is None else float(e.norm()) for e in saved]
    assert [own["residual_norm"] for own in found] == pytest.approx(norms, rel=1e-5)
    assert max(norms) > 0 and (0.0 in norms or rank > 0)
    return found[0]["momentum_scale"]

"""Two levels in whole steps: DDP, scaled gradients, bad gradients, diagnostics, and nodes that are found."""

from __future__ import annotations

import math
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
from tests.onebit.optim.contract import give, skips, started
from tests.onebit.runs import Case, bits, build, kinds, nodes_of
from tests.ranks import group, run_ranks

CASE = Case(shapes=((7, 9), (33,), (2,), (130,), (400,)), steps=6, options={"freeze_step": 2, "chunks": 2}, each=2)


@kinds
def test_a_bad_gradient_of_one_rank_skips_the_step_on_all(kind: str) -> None:
    ends = run_ranks(4, skips, CASE.but(kind=kind), ((2, 1, math.nan), (4, 2, math.inf)))
    assert len(set(ends)) == 1


def scaled(rank: int, size: int, case: Case) -> list[bytes]:
    """By a power of 2, another one on every rank, as GradScaler does it; and not."""
    ends = []
    for scale in (1.0, 2.0 ** (8 + rank)):
        params, optimizer = started(case, 0, rank, size)
        for step in range(1, 7):
            give(case, params, step, rank)
            for p in params:
                p.grad *= scale
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
            optimizer.step()
        ends.append(bits(params))
    return ends


def test_gradients_may_be_scaled_on_every_rank_by_another_number() -> None:
    for one, other in run_ranks(4, scaled, CASE):
        assert one == other


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


def ways(rank: int, size: int, kind: str) -> tuple[list[Tensor], list[str], list[bool]]:
    """With mean sizes, of all scales the smallest: a sign that rounding turns moves least. 1-bit Adam also with
    gradients of 16 bits. Also whether a step itself averages slices over the node."""
    ends, warned, averaged = [], [], []
    for options in ({}, {"gradient_dtype": torch.bfloat16}) if kind == "OneBitAdam" else ({},):
        for ddp, overlap in ((False, False), (False, True), (True, False), (True, True)):
            with patch.object(gradients, "average_slices", wraps=gradients.average_slices) as average:
                end, texts = trained(rank, kind, ddp, overlap=overlap, norm="l1", **options)
            ends.append(end)
            warned += texts
            averaged.append(average.call_count > 0)
    return ends, warned, averaged


@kinds
def test_ddp_and_overlap_with_accumulated_gradients(kind: str) -> None:
    """The same bits on all ranks, with overlap and without; with DDP, which averages over the node once, the same but
    for the order of its sums."""
    found = run_ranks(4, ways, kind)
    ends = found[0][0]
    assert all(not warned and all(map(torch.equal, own, ends)) for own, warned, _ in found)
    assert all(averaged[:4] == [True, averaged[1], False, False] for *_, averaged in found)
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[2], ends[3])
    assert (ends[0] - ends[2]).abs().max() < 1e-6
    if narrow := ends[4:]:
        assert torch.equal(narrow[0], narrow[1])
        for one, other in ((0, 2), (2, 3)):  # rounding to 16 bits turns a sign or two
            assert (narrow[one] - narrow[other]).abs().max() < 5e-3
        assert (ends[0] - narrow[0]).abs().max() > 1e-4


def on_hosts(rank: int, size: int, hosts: list[int]) -> tuple[int, int, list[str], bytes]:
    case = CASE.but(options={"freeze_step": 2, "node_group": "auto"}, each=1)
    with patch.dict(os.environ, {"GROUP_RANK": str(hosts[rank])}), logged() as said:
        run = Run(case, 4, rank, group())
        topology, run.optimizer, state = run.optimizer.setup.topology, case.build(run.params, group()), run.all()[1]
        run.optimizer.load_state_dict(state)
        assert run.optimizer.setup.topology.place == topology.place
        run.on(5, 6)
    return topology.slices, topology.place, said, bits(run.params)


def test_hosts_are_nodes() -> None:
    """Found in the first step, or before a load."""
    for hosts, slices in (([0, 0, 1, 1], 2), ([0, 0, 0, 0], 1)):
        found = run_ranks(4, on_hosts, hosts)
        assert [one[:2] for one in found] == [(slices, rank) for rank in range(4)]
        assert any("2 nodes of 2 ranks" in line for line in found[0][2]) == (slices == 2)
        assert len({end for *_, end in found}) == 1


def diagnosed(rank: int, size: int, case: Case) -> tuple[list[float], list[float], dict[str, Any]]:
    """Of every parameter the norm that is reported of this rank's residual, that of what it saves, and other keys."""
    optimizer = Run(case, 5, rank, group()).optimizer
    found = list(optimizer.diagnostics().values())
    saved = [own.get(f"residual_of_rank_{rank}") for own in optimizer.state_dict()["state"].values()]
    norms = [0.0 if e is None else float(e.norm()) for e in saved]
    return [own["residual_norm"] for own in found], norms, found[0]


@kinds
def test_diagnostics_are_of_this_ranks_slice(kind: str) -> None:
    found = run_ranks(4, diagnosed, CASE.but(kind=kind))
    for reported, saved, _ in found:
        assert reported == pytest.approx(saved, rel=1e-5)
    assert any(0.0 in saved for _, saved, _ in found)
    assert all(one[2]["momentum_scale"] == found[0][2]["momentum_scale"] for one in found)

"""Two levels in whole steps: overlap, DDP, clipping, scaled gradients, bad gradients, and nodes found or refused."""

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
from tests.onebit.parallel.test_overlap import check
from tests.onebit.runs import Case, bits, build, frozen_name, kinds, nodes_of, take, unchanged
from tests.ranks import group, run_ranks

SHAPES = ((7, 9), (33,), (2,), (130,), (400,))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("OneBitAdam", {}),
        ("OneBitAdam", {"reply": "direct", "scale": "tensor"}),
        ("OneBitLamb", {"reply": "direct"}),
        ("ZeroOneAdam", {"scale": "tensor"}),
    ],
)
def test_overlap_changes_no_bit(kind: str, options: dict[str, Any]) -> None:
    """Nor does a bad gradient of one rank, in its own slice or another's."""
    case = Case(kind, SHAPES, steps=9, options=options, each=2, bad=((6, 3, math.nan), (7, 0, math.inf)))
    for one in check(4, case):
        assert one["skipped"] == 2
        assert one["early"][5:] == [True] * 4
        assert not one["warned"]


def test_clipping_ends_overlap_and_changes_no_bit() -> None:
    for one in check(4, Case(shapes=SHAPES, steps=9, each=2), how="clip", first=7):
        assert one["early"][5:8] == [True, True, False]


def with_a_bad_gradient(rank: int, size: int, case: Case) -> tuple[bool, list[bytes]]:
    """Is the state what it was after a step with a bad gradient, and what do the ranks hold at the end?"""
    run = Run(case, 3, rank, group())
    optimizer, params, before = run.optimizer, run.params, run.all()[1]
    take(case.but(bad=((4, 2, math.inf),)), rank, optimizer, params, 4)
    same = unchanged(before, run.all()[1])
    run.on(4, 6)
    return same, [bits(params), bits([optimizer.state[p][frozen_name(case.kind)] for p in params])]


@kinds
def test_a_bad_gradient_of_one_rank_skips_the_step_on_all(kind: str) -> None:
    case = Case(kind, SHAPES, options={"freeze_step": 2, "chunks": 2}, each=2)
    found = run_ranks(4, with_a_bad_gradient, case)
    assert all(same for same, _ in found)
    assert all(end == found[0][1] for _, end in found)


def clipped(rank: int, size: int, case: Case) -> tuple[list[float], bytes]:
    params = case.parameters()
    optimizer = case.build(params, group())
    norms = []
    for step in range(1, 7):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = g
        norms.append(float(optimizer.clip_grad_norm_(2.0)))
        optimizer.step()
    return norms, bits(params)


def test_the_norm_that_is_clipped_is_that_of_the_nodes() -> None:
    """Stage 1: of the mean over all. Stage 2: the root mean square over nodes of their means' norms."""
    case = Case(shapes=SHAPES, options={"freeze_step": 3, "chunks": 2}, each=2)
    found = run_ranks(4, clipped, case)
    assert all(one == found[0] for one in found)
    for step, norm in enumerate(found[0][0], start=1):
        nodes = [[g.double() for g in case.node_gradients(n, step) if g is not None] for n in (0, 1)]
        squares = [sum(float(g.square().sum()) for g in of) for of in nodes]
        whole = sum(float(((a + b) / 2).square().sum()) for a, b in zip(*nodes, strict=True))
        assert norm == pytest.approx(math.sqrt(whole if step <= 3 else sum(squares) / 2), rel=1e-5)


def scaled(rank: int, size: int, case: Case) -> list[bytes]:
    """By a power of 2, another one on every rank, as GradScaler does it; and not."""
    ends = []
    for scale in (None, 2.0 ** (8 + rank)):
        params = case.parameters()
        optimizer = case.build(params, group())
        for step in range(1, 7):
            for p, g in zip(params, case.gradients(rank, step), strict=True):
                assert g is not None
                p.grad = g if scale is None else g * scale
            if scale is not None:
                optimizer.grad_scale = torch.tensor(scale)
                optimizer.found_inf = torch.tensor(0.0)
            optimizer.step()
        ends.append(bits(params))
    return ends


def test_gradients_may_be_scaled_on_every_rank_by_another_number() -> None:
    case = Case(shapes=SHAPES, options={"freeze_step": 3}, each=2)
    for one, other in run_ranks(4, scaled, case):
        assert one == other


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))


def trained(rank: int, kind: str, ddp: bool, **options: Any) -> tuple[Tensor, list[str]]:
    """Two backward passes a step, 8 steps, with DDP or without, on the data of the rank."""
    net = model()
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


def ways(rank: int, size: int, kind: str) -> tuple[list[Tensor], list[str]]:
    """With mean sizes, of all scales the smallest: a sign that rounding turns moves least. 1-bit Adam also with
    gradients of 16 bits."""
    ends, warned = [], []
    for options in ({}, {"gradient_dtype": torch.bfloat16}) if kind == "OneBitAdam" else ({},):
        for ddp, overlap in ((False, False), (False, True), (True, False), (True, True)):
            end, texts = trained(rank, kind, ddp, overlap=overlap, norm="l1", **options)
            ends.append(end)
            warned += texts
    return ends, warned


@kinds
def test_ddp_and_overlap_with_accumulated_gradients(kind: str) -> None:
    """The same bits on all ranks, with overlap and without; with DDP the same but for the order of its sums."""
    found = run_ranks(4, ways, kind)
    ends = found[0][0]
    assert all(not warned and all(map(torch.equal, own, ends)) for own, warned in found)
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[2], ends[3])
    assert (ends[0] - ends[2]).abs().max() < 1e-6
    if narrow := ends[4:]:
        assert torch.equal(narrow[0], narrow[1])
        for one, other in ((0, 2), (2, 3)):  # rounding to 16 bits turns a sign or two
            assert (narrow[one] - narrow[other]).abs().max() < 5e-3
        assert (ends[0] - narrow[0]).abs().max() > 1e-4


def averages_of_the_step(rank: int, size: int, ddp: bool) -> int:
    """How many slices the step itself averages over the node."""
    with patch.object(gradients, "average_slices", wraps=gradients.average_slices) as average:
        trained(rank, "OneBitAdam", ddp)
    return int(average.call_count)


def test_what_ddp_has_averaged_over_the_node_is_not_averaged_again() -> None:
    assert run_ranks(4, averages_of_the_step, True) == [0] * 4
    assert all(run_ranks(4, averages_of_the_step, False))


def on_hosts(rank: int, size: int, hosts: list[int]) -> tuple[int, int, list[str], bytes]:
    case = Case(shapes=SHAPES, options={"freeze_step": 2, "node_group": "auto"})
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
    case = Case(kind, SHAPES, options={"freeze_step": 2, "chunks": 2}, each=2)
    found = run_ranks(4, diagnosed, case)
    for reported, saved, _ in found:
        assert reported == pytest.approx(saved, rel=1e-5)
    assert any(0.0 in saved for _, saved, _ in found)
    assert all(one[2]["momentum_scale"] == found[0][2]["momentum_scale"] for one in found)

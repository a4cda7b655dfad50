"""Models that ranks train in stage 1 as one process does, and those of fp16 in both stages."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.optim.simulation import assert_close, group_or_none, on_ranks
from tests.onebit.runs import Case, arrays, bits, build, kinds
from tests.ranks import group, run_ranks

SAMPLES = 12  # of the whole batch


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model, step, rank, size, dtype=torch.float32):
    """The mean over a rank's part of the batch."""
    data = torch.Generator().manual_seed(step)
    part = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)
    x = torch.randn(SAMPLES, 10, generator=data, dtype=torch.float64)[part].to(dtype)
    y = torch.randn(SAMPLES, 3, generator=data, dtype=torch.float64)[part].to(dtype)
    return ((model(x) - y) ** 2).mean()


def train(rank, size, steps, kind, wrapped):
    """What a rank's model comes to: under DDP with attach, or without DDP."""
    model = run = net()
    own = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.05, "freeze_step": 10**6, "process_group": group_or_none(size)}
    optimizer = build(kind, model.parameters(), **own)
    if wrapped:
        run = DistributedDataParallel(model, process_group=group(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        onebit.attach(run, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(run, step, rank, size).backward()
        before = bits(p.grad for p in model.parameters())
        optimizer.step()
        assert not wrapped or bits(p.grad for p in model.parameters()) == before, "DDP has done that already"
    return arrays(model.parameters()), bits(model.parameters())


@pytest.mark.parametrize(
    ("kind", "size", "wrapped"),
    [("OneBitAdam", 3, True), ("OneBitAdam", 2, False), ("OneBitLamb", 2, True), ("ZeroOneAdam", 3, True)],
)
def test_ranks_in_stage_1_are_one_process_on_the_whole_batch(kind, size, wrapped):
    """Which, of Adam, trains as with torch.optim.AdamW."""
    (expected, _), *_ = on_ranks(1, train, 30, kind, False)
    found = on_ranks(size, train, 30, kind, wrapped)
    for parameters, their_bits in found:
        assert_close(parameters, expected)
        assert their_bits == found[0][1]
    if kind == "OneBitAdam":
        model = net().double()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.05)
        for step in range(30):
            adamw.zero_grad()
            loss_of(model, step, 0, 1, torch.float64).backward()
            adamw.step()
        assert_close(found[0][0], arrays(model.parameters()))


def target(parameter, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + parameter))


def distance(params):
    return sum(float((p.detach().float() - target(i, p.shape)).square().sum()) for i, p in enumerate(params))


def train_fp16(rank, size, kind):
    """By gradients of half the squared distance to a target, which has another noise on every rank and at every step.
    The distance at the start, at the freeze and at the end; how often a parameter moved; its bits."""
    more = {"max_coeff": 2.0} if kind == "OneBitLamb" else {}
    case = Case(kind, dtype="float16", options={"freeze_step": 20, "lr": 2e-2, **more})
    params = case.parameters()
    optimizer = case.build(params, group())
    distances, moved, finer = [distance(params)], [0] * len(params), 0
    for step in range(1, 41):
        before = [p.detach().clone() for p in params]
        for i, p in enumerate(params):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + 10 * rank + i))
            p.grad = (p.detach().float() - target(i, p.shape) + 0.1 * noise).half()
        optimizer.step()
        assert optimizer.compressing == (step > 20)
        masters = [optimizer.state[p]["master"] for p in params]
        for i, (p, master, old) in enumerate(zip(params, masters, before, strict=True)):
            assert p.dtype == torch.float16 and master.dtype == torch.float32
            assert torch.equal(p, master.half()), f"parameter {i} is not its master copy rounded, step {step}"
            moved[i] += bool((p != old).any())
            finer += bool((master != p.float()).any())
        if step in (20, 40):
            distances.append(distance(params))
    assert optimizer.skipped_steps == 0
    return distances, moved, finer, bits(params), bits(masters)


@kinds
def test_fp16_parameters_train_into_stage_2_and_are_their_master_copies_rounded(kind):
    found = run_ranks(2, train_fp16, kind)
    (start, freeze, end), moved, finer, _, _ = found[0]
    assert end < 0.9 * freeze < 0.9 * 0.9 * start
    assert min(moved) > 30
    assert finer > 150, "the master copies hold no more than fp16 does"
    assert found[1] == found[0]

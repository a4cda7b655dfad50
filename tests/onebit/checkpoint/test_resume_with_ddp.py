"""A resumed run of three ranks with DDP: to rounding, since a new DDP adds its first gradients in another order."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.runs import bits
from tests.ranks import group, run_ranks


def built(with_ddp):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)], nn.Linear(40, 3))
    model = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.01) if with_ddp else net
    optimizer = onebit.OneBitAdam(net.parameters(), lr=0.01, freeze_step=12, process_group=group(), block_size=32)
    if with_ddp:
        onebit.attach(model, optimizer)
    return model, optimizer


def train(rank, model, optimizer, steps):
    for step in steps:
        batch = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def resumed(rank, size, folder, with_ddp, at):
    ends = []
    for load in (False, True):
        model, optimizer = built(with_ddp)
        if load:
            onebit.load(folder, model, optimizer)
        else:
            train(rank, model, optimizer, range(at))
            onebit.save(folder, model, optimizer)
        train(rank, model, optimizer, range(at, at + 6))
        ends.append([p.detach().clone() for p in model.parameters()])
    return ends


def test_it_is_exact_where_the_optimizer_adds_and_in_stage_2_and_to_rounding_where_ddp_does(tmp_path):
    found = {}
    for name, with_ddp, at in (("ddp", True, 4), ("optimizer", False, 4), ("stage 2", True, 14)):
        for end, again in run_ranks(3, resumed, str(tmp_path / name), with_ddp, at):
            found.setdefault(name, []).append(bits(end) == bits(again))
            for p, q in zip(end, again, strict=True):
                torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5)
    assert all(found["optimizer"] + found["stage 2"])

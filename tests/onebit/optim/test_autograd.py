"""What passes write by address autograd learns of: a graph that kept a value raises, and gives no wrong gradient."""

import pytest
import torch
from torch import nn

import onebit
from tests.onebit.runs import build, kinds, on_ranks
from tests.ranks import group


def stale(net, change):
    """Return whether autograd refuses to go through what was computed before the change."""
    x = torch.ones(4, 8, requires_grad=True)
    loss = net(x).square().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    change()
    try:
        torch.autograd.grad(loss, x)
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def a_layer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


@kinds
def test_a_step_is_a_change_in_place(kind):
    net = a_layer()
    optimizer = build(kind, net.parameters(), freeze_step=2)
    assert all(stale(net, lambda: step(net, optimizer)) for _ in range(4))
    assert optimizer.compressing


@on_ranks(2)
def test_so_are_local_steps_and_what_brings_them_together(rank):
    net = a_layer()
    local = {"var_update_scaler": 1, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 8}
    optimizer = onebit.ZeroOneAdam(net.parameters(), **local, process_group=group())
    for _ in range(4):
        step(net, optimizer)
    assert not optimizer.synchronized

    def look_at_last_sync():
        with optimizer.at_last_sync():
            pass

    for change in (look_at_last_sync, optimizer.synchronize, lambda: step(net, optimizer)):
        assert stale(net, change)


@on_ranks(2)
def test_so_is_a_compressed_all_reduce(rank):
    average = onebit.collectives.CompressedAllReduce(4, process_group=group())
    x, scale = torch.ones(4, requires_grad=True), torch.ones(4)
    loss = (x * scale).sum()
    average(scale)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        average(torch.ones(4))  # which has no version

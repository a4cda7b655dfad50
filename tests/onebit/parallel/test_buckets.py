"""DDP leaves its buckets out of backward passes that compressed steps follow, and everything else is as with them."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.parallel.buckets import LOCAL
from tests.onebit.runs import bits
from tests.ranks import group, run_ranks

STEPS = 9


def built(kind, overlap=False, view=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 30), nn.Linear(30, 1))
    ddp = DistributedDataParallel(model, process_group=group(), bucket_cap_mb=0.001, gradient_as_bucket_view=view)
    options = {"var_update_scaler": 2} if kind == "ZeroOneAdam" else {"freeze_step": 3}
    options |= {"lr": 0.01, "process_group": group(), "block_size": 32, "chunks": 3, "overlap": overlap}
    optimizer = getattr(onebit, kind)(ddp.parameters(), **options)
    onebit.attach(ddp, optimizer)
    return model, ddp, optimizer


def loss_of(model, rank, step):
    data = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(8, 6, generator=data)).square().mean()


def train(rank, size, kind, buckets, overlap=False, accumulate=False, bad=None, view=False):
    """Parameters; buffers, and bytes sent; before which steps DDP's hook was called, and before which messages left in
    backward. buckets: whether they are used in every step."""
    model, ddp, optimizer = built(kind, overlap, view)
    if buckets:
        optimizer.leave_out_buckets = lambda _: None
    hooked, early, begin, of_step = [], [], optimizer.begin_step, []
    optimizer.begin_step = lambda: (of_step.append(1), begin())
    for step in range(STEPS):
        optimizer.zero_grad()
        of_step.clear()
        for again in range(1 + accumulate):
            with ddp.no_sync() if accumulate and not again else nullcontext():
                loss_of(ddp, rank, 2 * step + again).backward()
        early.append(optimizer.overlap.in_flight)
        hooked.append(bool(of_step) and not early[-1])
        if (step, rank) == bad:
            model[0].weight.grad[0, 0] = torch.nan
        optimizer.step()
    buffers = bits(b.detach().clone() for b in model.buffers())
    return bits(model.parameters()), (buffers, optimizer.wire_bytes), hooked, early


@pytest.mark.parametrize(
    ("kind", "accumulate"), [("OneBitAdam", False), ("OneBitAdam", True), ("OneBitLamb", True), ("ZeroOneAdam", False)]
)
def test_results_and_buffers_are_those_with_buckets(kind, accumulate):
    """Bit for bit, the buffers of BatchNorm too, which are rank 0's before every forward pass. The hook is called where
    gradients are averaged, and before the first compressed step, which is known to be one only when it begins."""
    found = run_ranks(2, train, kind, False, False, accumulate)
    expected = run_ranks(2, train, kind, True, False, accumulate)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert all(expected[0][2])
    full = {4, 6} if kind == "ZeroOneAdam" else set()
    for *_, hooked, _ in found:
        assert hooked == [step < 4 or step in full for step in range(STEPS)]


@pytest.mark.parametrize(
    ("kind", "accumulate", "view"),
    [
        ("OneBitAdam", False, True),
        ("OneBitAdam", True, False),
        ("OneBitLamb", True, True),
        ("ZeroOneAdam", True, False),
    ],
)
def test_overlap_gives_the_same_bits_and_knows_whether_somebody_accumulates(kind, accumulate, view):
    found = run_ranks(2, train, kind, False, True, accumulate, None, view)
    expected = run_ranks(2, train, kind, True, False, accumulate, None, view)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for *_, hooked, early in found:
        assert any(early) and all(a != b for a, b in zip(hooked[4:], early[4:], strict=True))


def stepping_within_no_sync(rank, size):
    """Whether DDP's switch stays where the user has put it, and the parameters at the end."""
    model, ddp, optimizer = built("OneBitAdam", overlap=True)
    kept = []
    with ddp.no_sync():
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, rank, 2 * step).backward()
            kept.append(ddp.require_backward_grad_sync is False and not optimizer.overlap.in_flight)
            optimizer.step()
            kept.append(ddp.require_backward_grad_sync is False)
    return bits(model.parameters()), all(kept)


def test_a_step_within_no_sync_leaves_it_on_and_averages_itself():
    expected = run_ranks(2, train, "OneBitAdam", True)
    assert run_ranks(2, stepping_within_no_sync) == [(each[0], True) for each in expected]


def test_a_full_step_that_was_not_expected_is_averaged_by_the_step():
    """A step that is skipped moves the schedule by one: the gradients of a full step may not have been in a bucket."""
    algorithm = onebit.ZeroOneAdam([nn.Parameter(torch.ones(2))], var_update_scaler=2).setup.algorithm
    assert [algorithm.kind(step) for step in (4, 5, 6)] == ["1 bit", "full", "1 bit"]
    for bad in ((4, 1), (4, 0)):
        found = run_ranks(2, train, "ZeroOneAdam", False, False, False, bad)
        expected = run_ranks(2, train, "ZeroOneAdam", True, False, False, bad)
        assert found[0][0] == found[1][0]
        assert not found[0][2][5]
        assert [each[:2] for each in found] == [each[:2] for each in expected]


def test_a_copy_of_the_model_averages_as_ddp_does():
    assert copy.deepcopy(LOCAL) is True
    assert pickle.loads(pickle.dumps(LOCAL)) is True
    assert not LOCAL


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, last):
        return self.layers[1](self.layers[0](x)) if last else self.layers[0](x)


def left_out(rank, size, each, overlap, accumulate, left_out_on):
    """The second layer is left out of the full step 11, on every rank or on one, after it was used in compressed ones.
    each: whether each layer has an optimizer of its own."""
    torch.manual_seed(0)
    net = Layers()
    ddp = DistributedDataParallel(net, process_group=group(), find_unused_parameters=True)
    options = {"var_update_scaler": 2, "process_group": group(), "block_size": 32, "overlap": overlap, "lr": 0.01}
    parts = [layer.parameters() for layer in net.layers] if each else [net.parameters()]
    optimizers = [onebit.ZeroOneAdam(part, **options) for part in parts]
    for optimizer in optimizers:
        onebit.attach(ddp, optimizer)
    for step in range(1, 13):
        for optimizer in optimizers:
            optimizer.zero_grad()
        used = step != 11 or rank not in left_out_on
        for again in range(1 + accumulate):
            with ddp.no_sync() if accumulate and not again else nullcontext():
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + 10 * again + rank))
                ddp(x, used).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return bits(net.parameters())


@pytest.mark.parametrize(
    ("each", "overlap", "accumulate", "ranks"),
    [
        (False, False, False, (0, 1)),
        (False, True, True, (0,)),
        (True, True, False, (1,)),
        (True, False, True, (0, 1)),
    ],
)
def test_a_layer_may_be_left_out_of_any_step(each, overlap, accumulate, ranks):
    first, second = run_ranks(2, left_out, each, overlap, accumulate, ranks)
    assert first == second

"""The DDP hook with real ranks: against a loop that averages by hand, over DDP's bucket rebuild, and over a restart."""

import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.internals import parameter_names
from tests.onebit.runs import nodes_of
from tests.ranks import group, run_ranks, run_ranks_once

BLOCK = 256


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


def loss_of(net, step, rank, size):
    data = torch.Generator().manual_seed(step * size + rank)
    x = torch.randn(32, 64, generator=data)
    return ((net(x) - torch.tanh(x.sum(1, keepdim=True) / 8)) ** 2).mean()


def train(net, ddp, steps, rank, size, momentum=0.9):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=momentum)
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, step, rank, size).backward()
        optimizer.step()


def hooked(net, state):
    ddp = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.03)
    ddp.register_comm_hook(state, onebit.onebit_hook)
    return ddp


def new_state(net, reply=1, each=1):
    """each: ranks a node."""
    return onebit.OneBitState(net, group(), reply=reply, block_size=BLOCK, node_group=own_node(each))


def own_node(each):
    return None if each == 1 else nodes_of(group(), each).node


def values(net):
    return torch.cat([p.detach().view(-1) for p in net.parameters()])


def with_the_hook(rank, size, steps, reply=1, each=1):
    net = model()
    state = new_state(net, reply, each)
    train(net, hooked(net, state), range(steps), rank, size)
    buckets = [bucket["parameters"] for bucket in state.state_dict()["buckets"]]
    return values(net), buckets, state.wire_bytes


def by_hand(rank, size, steps, compressed, reply=1, each=1):
    net = model()
    parameters = list(net.parameters())
    average = onebit.CompressedAllReduce(
        [p.numel() for p in parameters], block_size=BLOCK, reply=reply, chunks=1, process_group=group(),
        node_group=own_node(each),
    )  # fmt: skip
    optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step, rank, size).backward()
        if compressed:
            average([p.grad for p in parameters])
        else:
            for p in parameters:
                torch.distributed.all_reduce(p.grad, group=group())
                p.grad /= size
        optimizer.step()
    return values(net)


@pytest.mark.parametrize("reply", [1, 2, "direct"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_hook_gives_what_averaging_by_hand_gives_bit_for_bit(size, reply):
    """Also across the rebuild of the buckets: block scales do not depend on who averages what."""
    found = run_ranks(size, with_the_hook, 12, reply)
    expected = run_ranks(size, by_hand, 12, True, reply)[0]
    for parameters, _, _ in found:
        assert torch.equal(parameters, expected)


@pytest.mark.parametrize("reply", [1, "direct"])
def test_nodes_with_the_hook_and_by_hand_give_the_same_bits(reply):
    """Residuals of slices move with their parameters when DDP rebuilds its buckets."""
    found = run_ranks(4, with_the_hook, 12, reply, 2)
    expected = run_ranks(4, by_hand, 12, True, reply, 2)[0]
    for parameters, _, _ in found:
        assert torch.equal(parameters, expected)
    assert found[0][2] < 0.6 * run_ranks(2, with_the_hook, 12, reply)[0][2]


def test_training_with_the_hook_gets_where_training_without_gets():
    def loss(parameters):
        net = model()
        nn.utils.vector_to_parameters(parameters, net.parameters())
        return float(torch.stack([loss_of(net, 10**6 + i, 0, 1) for i in range(20)]).mean().detach())

    start = loss(values(model()))
    dense = loss(run_ranks(2, by_hand, 150, False)[0])
    compressed = loss(run_ranks(2, with_the_hook, 150)[0][0])
    assert dense < 0.7 * start
    assert compressed - dense < 0.1 * (start - dense)


def test_there_are_several_buckets_and_each_parameter_is_in_one():
    _, buckets, sent = run_ranks(2, with_the_hook, 3)[0]
    names = [name for bucket in buckets for name in bucket]
    assert len(buckets) > 1
    assert sorted(names) == sorted(name for name, _ in model().named_parameters())
    assert sent > 0


def interrupted(rank, size, how, each=1):
    net = model()
    state = new_state(net, each=each)
    train(net, hooked(net, state), range(5), rank, size, momentum=0)
    saved = {"net": net.state_dict(), "residuals": state.state_dict()}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = model()
    again.load_state_dict(loaded["net"])
    if how == "pickle":
        other = pickle.loads(pickle.dumps(state))
        other.bind(again, group(), own_node(each))
    else:
        other = new_state(again, each=each)
        other.load_state_dict(loaded["residuals"])
    if how == "forgotten":
        other = new_state(again)
    train(again, hooked(again, other), range(5, 10), rank, size, momentum=0)
    return values(again)


def uninterrupted(rank, size, each=1):
    net = model()
    state = new_state(net, each=each)
    train(net, hooked(net, state), range(10), rank, size, momentum=0)
    return values(net)


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_a_resumed_run_goes_on_bit_for_bit(how):
    expected = run_ranks(3, uninterrupted)
    found = run_ranks(3, interrupted, how)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_a_resumed_run_of_nodes_goes_on_bit_for_bit(how):
    expected = run_ranks(4, uninterrupted, 2)
    found = run_ranks(4, interrupted, how, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_run_that_forgets_its_residuals_goes_elsewhere():
    assert not torch.equal(run_ranks(3, interrupted, "forgotten")[0], run_ranks(3, uninterrupted)[0])


def with_nan_on_rank_1(rank, size):
    net = model()
    state = new_state(net)
    ddp = hooked(net, state)
    for step in range(3):
        loss_of(ddp, step, rank, size).backward()
    before = residuals(state)
    net.zero_grad()
    loss = loss_of(ddp, 3, rank, size)
    (loss * torch.nan if rank == 1 else loss).backward()
    poisoned = [bool(p.grad.isnan().all()) for p in net.parameters()]
    untouched = all(torch.equal(a, b) for a, b in zip(before, residuals(state), strict=True))
    net.zero_grad()
    loss_of(ddp, 4, rank, size).backward()
    healthy = all(bool(p.grad.isfinite().all()) for p in net.parameters())
    return poisoned, untouched, healthy


def residuals(state):
    buckets = state.state_dict()["buckets"]
    return [bucket[name].clone() for bucket in buckets for name in ("residual", "server_residual")]


def test_nan_on_one_rank_is_nan_on_all_and_leaves_the_residuals_alone():
    for poisoned, untouched, healthy in run_ranks(3, with_nan_on_rank_1):
        assert all(poisoned)
        assert untouched
        assert healthy


def loaded_on_one_rank_only(rank, size):
    net = model()
    state = new_state(net)
    train(net, hooked(net, state), range(3), rank, size)
    again = model()
    other = new_state(again)
    if rank == 0:
        other.load_state_dict(state.state_dict())
    try:
        train(again, hooked(again, other), range(1), rank, size)
    except ValueError as error:
        return str(error)
    return ""


def test_residuals_loaded_on_one_rank_only_are_an_error_on_all():
    for error in run_ranks_once(2, loaded_on_one_rank_only):
        assert "the ranks do not agree" in error and "loaded buckets" in error


def test_names_are_those_of_the_model_wrapped_or_not():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.module = nn.Linear(2, 2, bias=False)

    state = onebit.OneBitState(Nested())
    assert sorted(parameter_names(state)) == ["module.weight", "weight"]


def test_the_state_of_another_rank_is_refused():
    net = nn.Linear(2, 2)
    state = onebit.OneBitState(net)
    state.reduce(list(net.parameters()), torch.ones(6))
    saved = state.state_dict()
    saved["buckets"][0]["rank"] = 3
    with pytest.raises(ValueError, match="saved by rank 3"):
        onebit.OneBitState(net).load_state_dict(saved)


def test_a_gradient_of_an_unknown_parameter_is_refused():
    state = onebit.OneBitState(nn.Linear(2, 2))
    unknown = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"does not know.*state\.bind"):
        state.reduce([unknown], torch.zeros(3))


def test_a_state_of_something_else_is_refused():
    net = nn.Linear(2, 2)
    state = onebit.OneBitState(net)
    state.reduce(list(net.parameters()), torch.ones(6))
    saved = state.state_dict()
    with pytest.raises(ValueError, match=r"no parameter '(bias|weight)'"):
        onebit.OneBitState(nn.Sequential(nn.Linear(2, 2))).load_state_dict(saved)
    with pytest.raises(ValueError, match="block_size=2048"):
        onebit.OneBitState(nn.Linear(2, 2), block_size=64).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"saved with .*reply='auto'; build"):
        onebit.OneBitState(net, reply="direct").load_state_dict(saved)
    with pytest.raises(ValueError, match="not a state of OneBitState"):
        state.load_state_dict({"weight": torch.zeros(2)})


def test_a_wrong_block_size_is_refused_at_once():
    with pytest.raises(ValueError, match="multiple of 32"):
        onebit.OneBitState(nn.Linear(2, 2), block_size=100)

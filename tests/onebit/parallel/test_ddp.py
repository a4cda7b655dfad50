"""The DDP hook with real ranks: against a loop that averages by hand, over DDP's bucket rebuild, and over a restart."""

import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.runs import bits, nodes_of, on_ranks, on_warnings, same, snapshot
from tests.ranks import group, run_ranks

BLOCK = 256


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


def loss_of(net, step, rank, size):
    data = torch.Generator().manual_seed(step * size + rank)
    x = torch.randn(32, 64, generator=data)
    return ((net(x) - torch.tanh(x.sum(1, keepdim=True) / 8)) ** 2).mean()


def train(ddp, steps, rank, size, momentum=0.9, before_step=lambda: None, after_step=lambda: None):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=momentum)
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, step, rank, size).backward()
        before_step()
        optimizer.step()
        after_step()


def hooked(net, state, **options):
    ddp = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.03, **options)
    ddp.register_comm_hook(state, onebit.onebit_hook)
    return ddp


def new_state(net, reply=1, each=1):
    """each: ranks a node."""
    return onebit.OneBitState(net, group(), reply=reply, block_size=BLOCK, node_group=own_node(each))


def own_node(each):
    return None if each == 1 else nodes_of(group(), each).node


def with_the_hook(rank, size, reply=1, each=1):
    net = model()
    state, sent = new_state(net, reply, each), []
    train(hooked(net, state), range(12), rank, size, after_step=lambda: sent.append(state.wire_bytes))
    return list(net.parameters()), sent


def by_hand(rank, size, reply=1, each=1):
    net = model()
    parameters, count = list(net.parameters()), [0]
    options = {"block_size": BLOCK, "reply": reply, "process_group": group(), "node_group": own_node(each)}
    average = onebit.CompressedAllReduce([p.numel() for p in parameters], chunks=1, **options)

    def average_gradients():
        if count == [1]:  # as the hook does where DDP rebuilds its buckets
            average.synchronize()
        average([p.grad for p in parameters])
        count[0] += 1

    train(net, range(12), rank, size, before_step=average_gradients)
    return parameters


@pytest.mark.parametrize(("size", "reply", "each"), [(2, "direct", 1), (3, 1, 1), (4, 1, 2), (4, "direct", 2)])
def test_the_hook_gives_what_averaging_by_hand_gives(size, reply, each):
    """It does across the rebuild of the buckets, too: block scales do not depend on who averages what, and the mean
    residuals move with their parameters. Bit for bit where a mean is of two numbers: the order of more depends on
    the bucket."""
    found = run_ranks(size, with_the_hook, reply, each)
    expected = run_ranks(size, by_hand, reply, each)[0]
    for parameters, sent in found:
        assert bits(parameters) == bits(found[0][0])
        if reply == "direct":
            assert bits(parameters) == bits(expected)
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-6)
        assert sent[-1] == sent[0] + 11 * (sent[-1] - sent[-2]) > 0  # those of the first buckets count too
    if each > 1:
        assert found[0][1][-1] < 0.6 * run_ranks(2, with_the_hook, reply)[0][1][-1]


def on(net, state, steps, rank, size, ddp=None):
    train(ddp or hooked(net, state), steps, rank, size, momentum=0)
    return bits(net.parameters())


@pytest.mark.parametrize(
    ("size", "how", "each"),
    [(3, "state_dict", 1), (3, "pickle", 1), (4, "state_dict", 2), (3, "forgotten", 1)],
)
@on_ranks()
def test_a_resumed_run_goes_on_bit_for_bit_unless_it_forgets_its_residuals(rank, size, how, each):
    """A run that goes on from what another has saved ends where that one does, if DDP keeps its buckets."""
    net, again = model(), model()
    state, other = new_state(net, each=each), new_state(again, each=each)
    ddp, next_ddp = (hooked(*pair, find_unused_parameters=True) for pair in ((net, state), (again, other)))
    on(net, state, range(5), rank, size, ddp)
    state.synchronize()
    file = io.BytesIO()
    saved = pickle.loads(pickle.dumps(state)) if how == "pickle" else state.state_dict()
    torch.save({"net": net.state_dict(), "residuals": saved}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again.load_state_dict(loaded["net"])
    if how != "forgotten":
        other.load_state_dict(loaded["residuals"])
        assert same(other.state_dict(), saved)
    expected = on(net, state, range(5, 10), rank, size, ddp)
    assert (on(again, other, range(5, 10), rank, size, next_ddp) == expected) == (how != "forgotten")
    return expected, saved


def steps_of(rank, size, saved, loads, steps):
    """Return where a run of so many ranks ends, and its state; `loads`: the ranks that load one."""
    net = model()
    state = new_state(net)
    if saved is not None:
        net.load_state_dict(saved[0])
        if rank in loads:
            state.load_state_dict(saved[1])
    on(net, state, steps, rank, size)
    state.synchronize()
    return snapshot(net.state_dict()), state.state_dict()


def test_a_state_is_the_same_on_all_ranks_and_loads_on_another_number():
    """One of them alone loads it, too: then its residuals are a third in the mean, and no rank waits for another."""
    saved = run_ranks(2, steps_of, None, (), range(5))
    assert same(saved[0], saved[1])
    shapes = {name: each.shape for name, each in model().named_parameters()}
    assert {name: each.shape for name, each in saved[0][1]["residuals"].items()} == shapes
    assert [name for name, each in saved[0][1]["residuals"].items() if not each.any()] == ["4.bias"]  # of one element
    ends = []
    for loads in ((0, 1, 2), (1,), ()):
        found = run_ranks(3, steps_of, saved[0], loads, range(5, 8))
        assert all(same(own[0], found[0][0]) for own in found)
        assert all(same(own[1]["residuals"], found[0][1]["residuals"]) for own in found)
        ends.append(found[0][0])
    assert not any(same(*pair) for pair in itertools.combinations(ends, 2))


@on_ranks(2)
def test_residuals_are_left_out_with_one_warning_where_ranks_differ(rank, size):
    net = model()
    state = new_state(net)
    on(net, state, range(3), rank, size)
    with on_warnings() as said:
        found = state.state_dict()
    assert found == {"residuals": {}, "sent": state.wire_bytes}
    assert len(said) == 1 and "Call synchronize() on every rank before state_dict()" in said[0]


def one_bucket(net, **options):
    state = onebit.OneBitState(net, block_size=32, **options)
    gradient = torch.linspace(-1, 2, sum(p.numel() for p in net.parameters()))
    state.reduce(list(net.parameters()), gradient)
    return state


def test_names_are_those_of_the_model_wrapped_or_not():
    nested = nn.Module()
    nested.weight, nested.module = nn.Parameter(torch.ones(2)), nn.Linear(2, 2, bias=False)
    assert list(one_bucket(nested).state_dict()["residuals"]) == ["weight", "module.weight"]


def test_residuals_move_to_other_buckets_and_to_other_strides():
    """A bucket has the gradients of a parameter in the order of its memory."""
    net, other = nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    saved = one_bucket(net).state_dict()
    again = onebit.OneBitState(other)
    again.load_state_dict(saved)
    assert same(again.state_dict(), saved)
    found = torch.zeros(24)
    again.reduce([other.weight], found)
    assert again.state_dict()["residuals"].keys() == {"weight", "bias"}
    expected = saved["residuals"]["weight"].permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(found.sign(), expected.sign())
    again.load_state_dict(saved)
    found = again.state_dict()
    assert all(torch.equal(found["residuals"][name], each) for name, each in saved["residuals"].items())


def test_a_state_of_something_else_is_refused_and_changes_nothing():
    net = nn.Linear(2, 2)
    state = one_bucket(net)
    saved = state.state_dict()
    weight = saved["residuals"]["weight"]
    for residuals, error, message in (
        ({"weight": weight, "body": weight}, ValueError, r"no parameter 'body'"),
        (
            {"weight": weight, "bias": torch.zeros(3)},
            ValueError,
            r"bias has shape \[3\] in the state, here it is \[2\]",
        ),
        ({"bias": torch.zeros(2), "weight": weight * torch.inf}, ValueError, "weight has values .* not finite"),
        ({"weight": weight.long()}, TypeError, "floating-point"),
        ([weight], TypeError, "a dict by parameter names, not a list"),
    ):
        with pytest.raises(error, match=message):
            state.load_state_dict({**saved, "residuals": residuals})
    for other, error, message in (
        ({"weight": weight}, ValueError, "not a state of OneBitState"),
        ({**saved, "sent": None}, ValueError, "not None"),
        (None, TypeError, "NoneType"),
    ):
        with pytest.raises(error, match=message):
            state.load_state_dict(other)
    assert same(state.state_dict(), saved)
    unknown = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="does not know"):
        state.reduce([unknown], torch.zeros(3))
    with pytest.raises(ValueError, match="multiple of 32"):
        onebit.OneBitState(net, block_size=100)

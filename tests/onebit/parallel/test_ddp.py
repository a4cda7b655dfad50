"""The DDP hook with real ranks: against a loop that averages by hand, over DDP's bucket rebuild, and over a restart."""

import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.runs import bits, nodes_of, on_ranks
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


def hooked(net, state):
    ddp = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.03)
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
    buckets = [bucket["parameters"] for bucket in state.state_dict()["buckets"]]
    return bits(net.parameters()), buckets, sent


def by_hand(rank, size, reply=1, each=1):
    net = model()
    parameters = list(net.parameters())
    options = {"block_size": BLOCK, "reply": reply, "process_group": group(), "node_group": own_node(each)}
    average = onebit.CompressedAllReduce([p.numel() for p in parameters], chunks=1, **options)
    train(net, range(12), rank, size, before_step=lambda: average([p.grad for p in parameters]))
    return bits(net.parameters())


@pytest.mark.parametrize(("size", "reply", "each"), [(2, "direct", 1), (3, 1, 1), (4, 1, 2), (4, "direct", 2)])
def test_the_hook_gives_what_averaging_by_hand_gives_bit_for_bit(size, reply, each):
    """Also across the rebuild of the buckets: block scales do not depend on who averages what, and the residuals, with
    nodes those of slices, move with their parameters."""
    found = run_ranks(size, with_the_hook, reply, each)
    expected = run_ranks(size, by_hand, reply, each)[0]
    for parameters, buckets, sent in found:
        assert parameters == expected
        names = [name for bucket in buckets for name in bucket]
        assert len(buckets) > 1 and sorted(names) == sorted(name for name, _ in model().named_parameters())
        assert sent[-1] == sent[0] + 11 * (sent[-1] - sent[-2]) > 0  # those of the first buckets count too
    if each > 1:
        assert found[0][2][-1] < 0.6 * run_ranks(2, with_the_hook, reply)[0][2][-1]


def on(net, state, steps, rank, size):
    train(hooked(net, state), steps, rank, size, momentum=0)
    return bits(net.parameters())


@pytest.mark.parametrize(
    ("size", "how", "each"),
    [(3, "state_dict", 1), (3, "pickle", 1), (4, "state_dict", 2), (4, "pickle", 2), (3, "forgotten", 1)],
)
@on_ranks()
def test_a_resumed_run_goes_on_bit_for_bit_unless_it_forgets_its_residuals(rank, size, how, each):
    """From what another has saved it ends where one does that nothing interrupts."""
    uninterrupted, net, again = model(), model(), model()
    expected = on(uninterrupted, new_state(uninterrupted, each=each), range(10), rank, size)
    on(net, state := new_state(net, each=each), range(5), rank, size)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "residuals": state.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again.load_state_dict(loaded["net"])
    if how == "pickle":
        other = pickle.loads(pickle.dumps(state))
        other.bind(again, group(), own_node(each))
    else:
        other = new_state(again, each=each)
    if how == "state_dict":
        other.load_state_dict(loaded["residuals"])
    assert (on(again, other, range(5, 10), rank, size) == expected) == (how != "forgotten")
    return expected


@on_ranks(2)
def test_residuals_loaded_on_one_rank_only_are_an_error_on_all(rank, size):
    net, again = model(), model()
    state, other = new_state(net), new_state(again)
    train(hooked(net, state), range(3), rank, size)
    if rank == 0:
        other.load_state_dict(state.state_dict())
    with pytest.raises(ValueError, match=r"(?s)the ranks do not agree.*loaded buckets"):
        train(hooked(again, other), range(1), rank, size)


def test_names_are_those_of_the_model_wrapped_or_not():
    nested = nn.Module()
    nested.weight, nested.module = nn.Parameter(torch.ones(2)), nn.Linear(2, 2, bias=False)
    state = onebit.OneBitState(nested)
    state.reduce([nested.weight, nested.module.weight], torch.ones(6))
    assert state.state_dict()["buckets"][0]["parameters"] == ["weight", "module.weight"]


def test_a_state_of_something_else_is_refused():
    net = nn.Linear(2, 2)
    state = onebit.OneBitState(net)
    state.reduce(list(net.parameters()), torch.ones(6))
    saved = state.state_dict()
    of_rank_3 = {**saved, "buckets": [{**saved["buckets"][0], "rank": 3}]}
    for other, given, message in (
        (onebit.OneBitState(nn.Sequential(nn.Linear(2, 2))), saved, r"no parameter '(bias|weight)'"),
        (onebit.OneBitState(net, block_size=64), saved, "block_size=2048"),
        (onebit.OneBitState(net, reply="direct"), saved, r"saved with .*reply='auto'; build"),
        (state, {"weight": torch.zeros(2)}, "not a state of OneBitState"),
        (state, of_rank_3, "saved by rank 3"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(given)
    unknown = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"does not know.*state\.bind"):
        state.reduce([unknown], torch.zeros(3))
    with pytest.raises(ValueError, match="multiple of 32"):
        onebit.OneBitState(net, block_size=100)

"""States of sharded parameters in the hands of torch's own tools, and parameters of one element."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import onebit
from tests.onebit.parallel.test_fsdp import OPTIONS, mesh_of
from tests.onebit.runs import OPTIMIZERS, bits, build
from tests.ranks import run_ranks_once

FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def made(kind, mesh):
    """The bias has one element, as every value head's and regression head's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 21), nn.Tanh(), nn.Linear(21, 1))
    fully_shard(net, mesh=mesh["shard"])
    net.set_force_sum_reduction_for_comms(True)
    optimizer = build(kind, net.parameters(), process_group=mesh.get_group("replicate"), **{**OPTIONS, "reply": 1})
    onebit.attach(net, optimizer)
    return net, optimizer


def train(net, optimizer, steps):
    for step in steps:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return bits(p.full_tensor() for p in net.parameters())


def on_four(rank, size, folder):
    return {kind: carried(rank, kind, mesh_of(2, 2), f"{folder}/{kind}") for kind in OPTIMIZERS}


def carried(rank, kind, mesh, folder):
    """Whether a run goes on bit for bit, by way of the state that was carried."""
    net, optimizer = made(kind, mesh)
    versions = [p._version for p in net.parameters()]
    train(net, optimizer, range(16))
    assert all(p._version > before for p, before in zip(net.parameters(), versions, strict=True))
    onebit.save(folder, net, optimizer)
    file, state = f"{folder} {rank}.pt", optimizer.state_dict()
    torch.save(state, file)
    copied, full = copy.deepcopy(state), get_optimizer_state_dict(net, optimizer, options=FULL)
    ways = {
        "onebit": lambda net, new: onebit.load(folder, net, new),
        "torch.save": lambda net, new: new.load_state_dict(torch.load(file, weights_only=True)),
        "deepcopy": lambda net, new: new.load_state_dict(copied),
        "full": lambda net, new: set_optimizer_state_dict(net, new, full, options=FULL),
    }
    from_0 = copy.deepcopy(full) if rank == 0 else {}
    values = copy.deepcopy(net.state_dict())
    end, found = train(net, optimizer, range(16, 19)), {}
    for way, load in ways.items():
        again, resumed = made(kind, mesh)
        again.load_state_dict(values)
        load(again, resumed)
        found[way] = train(again, resumed, range(16, 19)) == end
    again, resumed = made(kind, mesh)
    with pytest.raises(ValueError, match="make_room") if rank else contextlib.nullcontext():
        set_optimizer_state_dict(again, resumed, from_0, options=BROADCAST)
    return {**found, "by hand": by_hand(kind, mesh, values, from_0)}


def by_hand(kind, mesh, values, from_0):
    """As PyTorch's FSDP2 example loads one rank's file: it walks what the new optimizer has."""
    sent = [from_0]
    dist.broadcast_object_list(sent)
    (full,) = sent
    net, optimizer = made(kind, mesh)
    net.load_state_dict(values)
    onebit.make_room(full, net, optimizer)
    groups, state = (optimizer.state_dict()[name] for name in ("param_groups", "state"))
    for group, saved in zip(groups, full["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
        for i, name in zip(group["params"], saved["params"], strict=True):
            for field, value in full["state"][name].items():
                like = state[i][field]
                placed = isinstance(like, DTensor)
                state[i][field] = distribute_tensor(value, like.device_mesh, like.placements) if placed else value
    with pytest.warns(UserWarning, match="residuals") if dist.get_rank() > 1 else contextlib.nullcontext():
        optimizer.load_state_dict({"param_groups": groups, "state": state})
    ends = [None] * dist.get_world_size()
    dist.all_gather_object(ends, train(net, optimizer, range(16, 19)))
    return optimizer.compressing and len(set(ends)) == 1


def test_torchs_tools_carry_a_sharded_state(tmp_path):
    for own in run_ranks_once(4, on_four, (str(tmp_path),)):
        for kind, found in own.items():
            assert all(found.values()), (kind, found)

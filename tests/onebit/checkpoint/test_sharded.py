"""Checkpoints of sharded parameters: bit for bit on the same mesh, the same state on another and of whole parameters,
and in the hands of torch's own tools, with no call but `optimizer.synchronize()`.

Meshes are of all ranks there are: one world of four does what four can, one of two loads what that has saved.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as tools
from torch.distributed.tensor import DTensor, distribute_tensor

import onebit
from onebit.collectives.transport import transport_for
from tests.limits import HUNG
from tests.onebit.parallel import test_fsdp as fsdp
from tests.onebit.parallel.test_fsdp import loss_of, mesh_of, model, parts_of, sharded, whole
from tests.onebit.runs import bits, build, on_warnings, same
from tests.ranks import run_ranks_once

OPTIONS = fsdp.OPTIONS | {"freeze_step": 4}
SAVED = 9  # steps
WIDTH = 21  # parts of different sizes; blocks that are not full
ROWS = {"OneBitAdam": "direct", "OneBitLamb": 1, "ZeroOneAdam": 1}  # the reply of each
SHAPES = ((1, 4), (4, 1))
FULL = tools.StateDictOptions(full_state_dict=True)
TO_RANK_0 = tools.StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = tools.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def with_head(width):
    """The last bias has one element, as every value head's and regression head's."""
    net = model(width)
    net[-1] = nn.Linear(width, 1)
    return net


def built(net, mesh, kind="OneBitAdam", **options):
    return build(kind, net.parameters(), process_group=mesh.get_group("replicate"), **{**OPTIONS, **options})


def made(mesh, kind="OneBitAdam", width=WIDTH, **options):
    net = sharded(with_head(width), mesh)
    optimizer = built(net, mesh, kind, **options)
    onebit.attach(net, optimizer)
    return net, optimizer


def train(rank, net, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()


def trained(rank, *args, **options):
    """Train SAVED steps and synchronize."""
    net, optimizer = made(*args, **options)
    train(rank, net, optimizer, range(SAVED))
    optimizer.synchronize()
    return net, optimizer


def tensors(optimizer):
    """Each parameter's state, whole."""
    with on_warnings("error"):
        state = optimizer.state_dict()["state"]
    return [{name: whole_of(value).clone() for name, value in own.items()} for own in state.values()]


def whole_of(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def seen(rank, net, optimizer):
    """State and parameters as they are now, and after two more steps."""
    before, at = tensors(optimizer), bits(whole(net))
    train(rank, net, optimizer, range(SAVED, SAVED + 2))
    return before, at, bits(whole(net))


def loaded(rank, folder, kind, shape, by_dcp=False):
    """shape: of the mesh; None for a model that is not sharded, of which each rank is a replica, or two are a node."""
    if shape in (None, "nodes"):
        net = with_head(WIDTH)
        node = transport_for(None).split(rank // 2) if shape == "nodes" else None
        optimizer = build(kind, net.parameters(), node_group=node, **{**OPTIONS, "reply": ROWS[kind]})
    else:
        net, optimizer = made(mesh_of(*shape), kind, reply=ROWS[kind])
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
    if by_dcp:
        from_dcp(f"{folder}/{kind} by dcp", net, optimizer)
    else:
        onebit.load(f"{folder}/{kind}", net, optimizer)
    assert optimizer.compressing
    return seen(rank, net, optimizer)


def to_dcp(folder, net, optimizer):
    model_state, state = tools.get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)


def from_dcp(folder, net, optimizer):
    model_state, state = tools.get_state_dict(net, optimizer)
    found = {"model": model_state, "optimizer": state}
    dcp.load(found, checkpoint_id=folder)
    tools.set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


def by_name(rank, folder, steps):
    """Load into an optimizer that has as much by now."""
    mesh = mesh_of(2, 2)
    one, other = made(mesh), made(mesh, lr=1e-4)
    train(rank, *one, range(steps))
    one[1].synchronize()
    to_dcp(folder, *one)
    train(rank, *other, range(100, 100 + steps))
    with on_warnings("ignore", message="state_dict"):
        from_dcp(folder, *other)
    for each in (one, other):
        train(rank, *each, range(steps, steps + 3))
    assert bits(whole(one[0])) == bits(whole(other[0]))


def other_reply(rank, folder):
    """Saved with one bit by parts of different sizes, of which some serve nothing of a parameter."""
    mesh = mesh_of(2, 2)
    net, optimizer = trained(rank, mesh, width=11, reply=1)
    onebit.save(folder, net, optimizer)
    others = [built(net, mesh, reply=reply) for reply in (1, "direct", "direct")]
    for other in others[:2]:
        onebit.load(folder, net, other)
    others[2].load_state_dict(optimizer.state_dict())
    alike, *direct = map(tensors, others)
    assert same(alike, tensors(optimizer))
    assert all(same(found, with_other_messages(alike)) for found in direct)


def with_other_messages(found):
    """How a state is loaded where they make other steps: what is usual is found anew."""
    return [{**own, "usual_step": torch.zeros_like(own["usual_step"])} for own in found]


def of_the_other_replica(rank, net, optimizer, again, file):
    """What a rank of the other replica has saved of the same part."""
    torch.save(parts_of(optimizer.state_dict()), f"{file} {rank}")
    torch.distributed.barrier()
    again[1].load_state_dict(torch.load(f"{file} {(rank + 2) % 4}", weights_only=True))
    assert same(tensors(again[1]), tensors(optimizer))


def of_whole_parameters(rank, folder):
    """Load into shards, and back into whole ones."""
    net = with_head(WIDTH)
    optimizer = build("OneBitAdam", net.parameters(), **OPTIONS, reply=1)
    train(rank, net, optimizer, range(SAVED))
    onebit.save(f"{folder}/whole", net, optimizer)
    to_dcp(f"{folder}/whole by dcp", net, optimizer)
    there = seen(rank, net, optimizer)
    for load, name in ((onebit.load, "whole"), (from_dcp, "whole by dcp")):
        for shape in ((2, 2), *SHAPES):
            again = made(mesh_of(*shape), reply=1)
            load(f"{folder}/{name}", *again)
            here = seen(rank, *again)
            assert same(here[:2], there[:2]), (name, shape)
    again = made(mesh_of(2, 2), reply=1)
    again[1].load_state_dict(build_from(f"{folder}/whole").state_dict())
    assert same(tensors(again[1]), there[0])


def build_from(folder):
    """An optimizer of whole parameters that has loaded what is there."""
    net = with_head(WIDTH)
    optimizer = build("OneBitAdam", net.parameters(), **OPTIONS, reply=1)
    onebit.load(folder, net, optimizer)
    return optimizer


def ways_of(net, optimizer, file):
    """How torch's tools bring the state of now into a new optimizer; and the whole state."""
    copied = copy.deepcopy(optimizer.state_dict())
    full = copy.deepcopy(tools.get_optimizer_state_dict(net, optimizer, options=FULL))
    from_0 = copy.deepcopy(tools.get_optimizer_state_dict(net, optimizer, options=TO_RANK_0))
    torch.save(optimizer.state_dict(), file)
    return full, {
        "torch.save": lambda net, new: new.load_state_dict(torch.load(file, weights_only=True)),
        "deepcopy": lambda net, new: new.load_state_dict(copied),
        "full": lambda net, new: tools.set_optimizer_state_dict(net, new, full, options=FULL),
        "from rank 0": lambda net, new: tools.set_optimizer_state_dict(net, new, from_0, options=BROADCAST),
    }


def by_hand(rank, net, optimizer, from_0):
    """Load one rank's file as PyTorch's FSDP2 example does: it walks what the new optimizer has."""
    sent = [from_0]
    dist.broadcast_object_list(sent)
    (full,) = sent
    groups, state = (optimizer.state_dict()[name] for name in ("param_groups", "state"))
    for group, saved in zip(groups, full["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
        for i, name in zip(group["params"], saved["params"], strict=True):
            for field, value in full["state"][name].items():
                like = state[i][field]
                placed = isinstance(like, DTensor)
                state[i][field] = distribute_tensor(value, like.device_mesh, like.placements) if placed else value
    optimizer.load_state_dict({"param_groups": groups, "state": state})
    assert optimizer.compressing


def on_four(rank, size, folder):
    found = {}
    for kind, reply in ROWS.items():
        mesh = mesh_of(2, 2)
        net, optimizer = made(mesh, kind, reply=reply)
        versions = [p._version for p in net.parameters()]
        train(rank, net, optimizer, range(SAVED))
        assert all(p._version > before for p, before in zip(net.parameters(), versions, strict=True))
        onebit.save(f"{folder}/{kind}", net, optimizer)
        to_dcp(f"{folder}/{kind} by dcp", net, optimizer)
        values, (full, ways) = copy.deepcopy(net.state_dict()), ways_of(net, optimizer, f"{folder}/{kind} {rank}.pt")

        def new(mesh=mesh, kind=kind, reply=reply, values=values):
            again = made(mesh, kind, reply=reply)
            again[0].load_state_dict(values)
            return again

        of_the_other_replica(rank, net, optimizer, new(), f"{folder}/{kind} of replica")
        found[kind, "saved"] = there = seen(rank, net, optimizer)
        assert same(loaded(rank, folder, kind, (2, 2)), there), kind
        ways["by hand"] = lambda net, new, full=full: by_hand(rank, net, new, full if rank == 0 else {})
        for way, load in ways.items():
            again = new()
            load(*again)
            assert same(seen(rank, *again), there), (kind, way)
        for shape in (*SHAPES, None, "nodes"):
            found[kind, shape] = loaded(rank, folder, kind, shape)
        assert same(loaded(rank, folder, kind, (2, 2), by_dcp=True), there), kind
    for shape in ((4, 1), None):
        found["OneBitLamb by dcp", shape] = loaded(rank, folder, "OneBitLamb", shape, by_dcp=True)
    for steps in (2, SAVED):
        by_name(rank, f"{folder}/by name {steps}", steps)
    other_reply(rank, f"{folder}/reply")
    of_whole_parameters(rank, folder)
    return found


def on_two(rank, size, folder):
    found = {(kind, shape): loaded(rank, folder, kind, shape) for kind in ROWS for shape in ((2, 1), None)}
    found["OneBitLamb by dcp", (2, 1)] = loaded(rank, folder, "OneBitLamb", (2, 1), by_dcp=True)
    return found


@pytest.fixture(scope="module")
def four_and_two(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sharded"))
    return tuple(run_ranks_once(size, work, (folder,), timeout=HUNG) for size, work in ((4, on_four), (2, on_two)))


@pytest.mark.parametrize("name", [*ROWS, "OneBitLamb by dcp"])
def test_a_mesh_goes_on_bit_for_bit_and_others_with_the_same_state(name, four_and_two):
    """Bit for bit where it was saved, by each of torch's ways: see on_four. What a state means a step later:
    test_other_ranks.py."""
    there = [own[name.split()[0], "saved"] for own in four_and_two[0]]
    assert all(same(own, there[0]) for own in there) and any(own["residual"].any() for own in there[0][0])
    others = [(key[1], [own[key] for own in ranks]) for ranks in four_and_two for key in ranks[0] if key[0] == name]
    assert len(others) >= 3
    for shape, here in others:
        state, at, _ = there[0]
        senders = {"saved": 2, "nodes": 2, None: len(here)}.get(shape) or shape[0]
        if ROWS[name.split()[0]] == "direct" and senders != 2:
            state = with_other_messages(state)
        assert all(same(own[:2], (state, at)) for own in here)
        assert all(end == here[0][2] for _, _, end in here)

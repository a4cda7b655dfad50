"""Checkpoints of sharded parameters: bit for bit on the same mesh, resharded to another with nothing lost, and in the
hands of torch's own tools.

Meshes are of all ranks there are: one world of four does what four can, one of two loads what that has saved.
"""

import contextlib
import copy

import numpy as np
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
from tests.onebit.runs import bits, build, frozen_name, on_warnings, same
from tests.ranks import run_ranks_once

OPTIONS = fsdp.OPTIONS | {"freeze_step": 4}
SAVED = 9  # steps
WIDTH = 21  # parts of different sizes; blocks that are not full
ROWS = {"OneBitAdam": "direct", "OneBitLamb": 1, "ZeroOneAdam": 1}  # the reply of each
SHAPES = ((1, 4), (4, 1))
FULL = tools.StateDictOptions(full_state_dict=True)
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


def tensors(optimizer):
    """Of each parameter its state, whole: a replica's own residual alone."""
    return [
        {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).double() for name, v in own.items()}
        for own in optimizer.state_dict()["state"].values()
    ]


def seen(rank, net, optimizer):
    """State and parameters as they are now, and after two more steps."""
    before, at = tensors(optimizer), bits(whole(net))
    train(rank, net, optimizer, range(SAVED, SAVED + 2))
    return before, at, bits(whole(net))


def loaded(rank, folder, kind, shape, by_dcp=False):
    net, optimizer = made(mesh_of(*shape), kind, reply=ROWS[kind])
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
    if by_dcp:
        onebit.make_room(f"{folder}/{kind} by dcp", net, optimizer)
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
    """Into an optimizer that has as much by now."""
    mesh = mesh_of(2, 2)
    one, other = made(mesh), made(mesh, lr=1e-4)
    train(rank, *one, range(steps))
    to_dcp(folder, *one)
    train(rank, *other, range(100, 100 + steps))
    from_dcp(folder, *other)
    for each in (one, other):
        train(rank, *each, range(steps, steps + 3))
    assert bits(whole(one[0])) == bits(whole(other[0]))


def other_reply(rank, folder):
    """Saved with one bit by parts of different sizes, of which some serve nothing of a parameter."""
    mesh = mesh_of(2, 2)
    net, optimizer = made(mesh, width=11, reply=1)
    train(rank, net, optimizer, range(SAVED))
    onebit.save(folder, net, optimizer)
    others = [built(net, mesh, reply=reply) for reply in (1, "direct", "direct")]
    for other in others[:2]:
        onebit.load(folder, net, other)
    with on_warnings("error"):
        # a rank's own state keeps all there is, as each of the others loads its own
        others[2].load_state_dict(optimizer.state_dict())
    return [tensors(each) for each in (optimizer, *others)]


def of_one_replica(rank, folder):
    """Of all replicas the first's state is loaded: what it has left out is not everyone's, which the others are told.
    And whole parameters that are loaded into shards."""
    mesh = mesh_of(2, 1)
    net, optimizer = made(mesh, reply=1)
    train(rank, net, optimizer, range(SAVED))
    torch.save(parts_of(optimizer.state_dict()), f"{folder}/{rank}")
    torch.distributed.barrier()
    saved = torch.load(f"{folder}/0", weights_only=True)
    for reply in ("direct", 1):
        with on_warnings() as texts:
            built(net, mesh, reply=reply).load_state_dict(saved)
        assert "start from zero" in "".join(texts) if rank else texts == []
    net = with_head(WIDTH)
    optimizer = build("OneBitAdam", net.parameters(), **OPTIONS)
    train(rank, net, optimizer, range(SAVED))
    onebit.save(f"{folder}/whole", net, optimizer)
    with pytest.raises(ValueError, match="one of whole parameters in stage 2"):
        onebit.load(f"{folder}/whole", *made(mesh_of(1, 2)))


def to_whole(rank, folder, nodes):
    net = with_head(WIDTH)
    node = transport_for(None).split(rank // 2) if nodes else None
    optimizer = build("OneBitAdam", net.parameters(), node_group=node, **OPTIONS)
    onebit.load(f"{folder}/OneBitAdam", net, optimizer)
    train(rank, net, optimizer, range(SAVED, SAVED + 3))
    return bits(net.parameters())


def ways_of(net, optimizer, file):
    """How torch's tools bring the state of now into a new optimizer; and the whole state."""
    copied = copy.deepcopy(optimizer.state_dict())
    full = copy.deepcopy(tools.get_optimizer_state_dict(net, optimizer, options=FULL))
    torch.save(optimizer.state_dict(), file)
    return full, {
        "torch.save": lambda net, new: new.load_state_dict(torch.load(file, weights_only=True)),
        "deepcopy": lambda net, new: new.load_state_dict(copied),
        "full": lambda net, new: tools.set_optimizer_state_dict(net, new, full, options=FULL),
    }


def by_hand(rank, net, optimizer, from_0):
    """As PyTorch's FSDP2 example loads one rank's file: it walks what the new optimizer has."""
    sent = [from_0]
    dist.broadcast_object_list(sent)
    (full,) = sent
    onebit.make_room(full, net, optimizer)
    groups, state = (optimizer.state_dict()[name] for name in ("param_groups", "state"))
    for group, saved in zip(groups, full["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
        for i, name in zip(group["params"], saved["params"], strict=True):
            for field, value in full["state"][name].items():
                like = state[i][field]
                placed = isinstance(like, DTensor)
                state[i][field] = distribute_tensor(value, like.device_mesh, like.placements) if placed else value
    with pytest.warns(UserWarning, match="residuals") if rank > 1 else contextlib.nullcontext():
        optimizer.load_state_dict({"param_groups": groups, "state": state})
    assert optimizer.compressing
    train(rank, net, optimizer, range(SAVED, SAVED + 3))
    return bits(whole(net))


def on_four(rank, size, folder):
    found = {"by hand": {}}
    for kind, reply in ROWS.items():
        mesh = mesh_of(2, 2)
        net, optimizer = made(mesh, kind, reply=reply)
        versions = [p._version for p in net.parameters()]
        train(rank, net, optimizer, range(SAVED))
        assert all(p._version > before for p, before in zip(net.parameters(), versions, strict=True))
        onebit.save(f"{folder}/{kind}", net, optimizer)
        to_dcp(f"{folder}/{kind} by dcp", net, optimizer)
        values, (full, ways) = copy.deepcopy(net.state_dict()), ways_of(net, optimizer, f"{folder}/{kind} {rank}.pt")
        found[kind] = seen(rank, net, optimizer)
        assert same(loaded(rank, folder, kind, (2, 2)), found[kind]), kind

        def new(mesh=mesh, kind=kind, reply=reply, values=values):
            again = made(mesh, kind, reply=reply)
            again[0].load_state_dict(values)
            return again

        for way, load in ways.items():
            again = new()
            load(*again)
            assert same(seen(rank, *again), found[kind]), (kind, way)
        from_0 = full if rank == 0 else {}
        with pytest.raises(ValueError, match="make_room") if rank else contextlib.nullcontext():
            tools.set_optimizer_state_dict(*new(), copy.deepcopy(from_0), options=BROADCAST)
        found["by hand"][kind] = by_hand(rank, *new(), from_0)
        for shape in SHAPES:
            found[f"{kind} {shape}"] = loaded(rank, folder, kind, shape)
    assert same(loaded(rank, folder, "OneBitLamb", (2, 2), by_dcp=True), found["OneBitLamb"])
    found["OneBitLamb by dcp (4, 1)"] = loaded(rank, folder, "OneBitLamb", (4, 1), by_dcp=True)
    for steps in (2, SAVED):
        by_name(rank, f"{folder}/by name {steps}", steps)
    found["reply"] = other_reply(rank, f"{folder}/reply")
    found["whole"] = to_whole(rank, folder, nodes=True)
    return found


def on_two(rank, size, folder):
    found = {f"{kind} (2, 1)": loaded(rank, folder, kind, (2, 1)) for kind in ROWS}
    found["OneBitLamb by dcp (2, 1)"] = loaded(rank, folder, "OneBitLamb", (2, 1), by_dcp=True)
    of_one_replica(rank, folder)
    return {**found, "whole": to_whole(rank, folder, nodes=False)}


@pytest.fixture(scope="module")
def four_and_two(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sharded"))
    return tuple(run_ranks_once(size, work, (folder,), timeout=HUNG) for size, work in ((4, on_four), (2, on_two)))


def everything(states, beta1=0.9):
    """Of each parameter mean e + E + b1 m, from every rank's state; ranks of a replica say the same."""
    found = []
    for own in zip(*states, strict=True):
        together = {name: value.numpy() for each in own for name, value in each.items()}
        e = np.mean([v for name, v in together.items() if name.startswith("residual_of")], axis=0)
        servers = sum(v for name, v in together.items() if name.startswith("server_residual_of"))
        m = np.mean([v for name, v in together.items() if name.startswith("momentum_of")], axis=0)
        found.append(e + servers + beta1 * m)
    return found


def assert_nothing_lost(here, there):
    for got, expected in zip(everything(here), everything(there), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", [*ROWS, "OneBitLamb by dcp"])
def test_a_mesh_goes_on_bit_for_bit_and_others_lose_nothing(name, four_and_two):
    """Bit for bit where it was saved: see on_four."""
    four, two = four_and_two
    kind = name.split()[0]
    there = [own[kind] for own in four]
    assert all(end == there[0][2] for _, _, end in there)
    others = [[own[f"{name} {shape}"] for own in four] for shape in SHAPES if f"{name} {shape}" in four[0]]
    assert others
    for here in (*others, [own[f"{name} (2, 1)"] for own in two]):
        assert all(at == there[0][1] for _, at, _ in here)
        assert all(end == here[0][2] for _, _, end in here)
        assert_nothing_lost([s for s, _, _ in here], [s for s, _, _ in there])
        for got, expected in zip(here[0][0], there[0][0], strict=True):
            assert torch.equal(got[frozen_name(kind)], expected[frozen_name(kind)])


def test_another_reply_loses_nothing(four_and_two):
    there, *others = zip(*(own["reply"] for own in four_and_two[0]), strict=True)
    for here in others:
        assert_nothing_lost(here, there)


def test_a_sharded_state_loads_into_whole_parameters_of_one_level_and_two(four_and_two):
    for ranks in four_and_two:
        assert len({own["whole"] for own in ranks}) == 1


def test_torchs_tools_carry_a_sharded_state(four_and_two):
    """Bit for bit, see on_four; one rank's file by hand to the same end on all ranks."""
    four = [own["by hand"] for own in four_and_two[0]]
    assert all(own == four[0] for own in four) and len(four[0]) == len(ROWS)

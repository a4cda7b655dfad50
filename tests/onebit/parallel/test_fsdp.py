"""FSDP2: parameters sharded inside a node, momentum averaged with 1 bit between the replicas of a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.collectives.transport import transport_for
from onebit.optim.sharding import local
from tests.limits import HUNG
from tests.onebit.runs import adam_first, bits, build, same, snapshot
from tests.ranks import run_ranks_once

AT = (24, 30, 110)  # steps after which runs are compared
OPTIONS = {"lr": 5e-3, "freeze_step": 10, "block_size": 32, "chunks": 2, "variance_floor": 0.01}


def model(width: int = 64) -> nn.Module:
    """With width 64 and two shards every part is whole blocks, as it is without shards."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 16, generator=source)
    return x, torch.sin(x.sum(1, keepdim=True)).expand(-1, 64)


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    x, y = data(rank, step)
    out = net(x)
    return (out - y[:, : out.shape[1]]).square().mean()


def mesh_of(replicas: int, shards: int) -> Any:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(net: nn.Module, mesh: Any) -> nn.Module:
    for module in (net[0], net[2], net):  # type: ignore[index]
        fully_shard(module, mesh=mesh["shard"])
        module.set_force_sum_reduction_for_comms(True)  # Gloo's average is a sum
    return net


def trained(rank: int, net: nn.Module, optimizer: Any, steps: int, values: Callable[[], Any]) -> list[Any]:
    """The values that there are after the steps of AT."""
    ends = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
        if step + 1 in AT:
            ends.append(values())
    return ends


def with_fsdp(rank: int, kind: str, steps: int, mesh: Any, attached: bool, width: int = 64, **options: Any) -> Any:
    net = sharded(model(width), mesh)
    optimizer = build(kind, net.parameters(), process_group=mesh.get_group("replicate"), **{**OPTIONS, **options})
    if attached:
        onebit.attach(net, optimizer)
    return net, optimizer, trained(rank, net, optimizer, steps, lambda: whole(net))


def with_ddp(rank: int, kind: str, steps: int, **options: Any) -> tuple[Any, list[list[Tensor]]]:
    net = model()
    node = transport_for(None).split(rank // 2)
    ddp = DistributedDataParallel(net)
    optimizer = build(kind, net.parameters(), node_group=node, **{**OPTIONS, **options})
    onebit.attach(ddp, optimizer)
    return optimizer, trained(rank, ddp, optimizer, steps, lambda: [p.detach().clone() for p in net.parameters()])


def whole(net: nn.Module) -> list[Tensor]:
    return [p.full_tensor().detach() for p in net.parameters()]  # type: ignore[attr-defined]


def both(rank: int, size: int, kind: str, reply: Any) -> dict[str, Any]:
    mesh = mesh_of(2, 2)
    common: dict[str, Any] = {"reply": reply, "norm": "l1"}  # with smaller scales a sign that rounding turns moves less
    net, optimizer, ends = with_fsdp(rank, kind, AT[-1], mesh, attached=True, **common)
    _, _, plain = with_fsdp(rank, kind, AT[-1], mesh, attached=False, **common)
    ddp_optimizer, theirs = with_ddp(rank, kind, AT[-1], **common)
    theirs_at_the_end = model()
    for p, value in zip(theirs_at_the_end.parameters(), theirs[-1], strict=True):
        p.data.copy_(value)
    return {
        "same": [bits(a) == bits(b) for a, b in zip(ends, plain, strict=True)],
        "bits": bits(ends[-1]),
        "off": [
            max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))
            for one, other in zip(ends, theirs, strict=True)
        ],
        "losses": [float(loss_of(other, 0, 1000).detach()) for other in (net, theirs_at_the_end, model())],
        "compressing": (optimizer.compressing, ddp_optimizer.compressing),
    }


@adam_first
@pytest.mark.parametrize("reply", ["direct", pytest.param(1, marks=pytest.mark.slow)])
def test_hsdp_is_ddp_with_two_levels(kind: str, reply: Any) -> None:
    """20 steps past the freeze to rounding of sums; 100 steps past it a sign or two within rounding of 0 have turned.
    With the hook and without it every bit is the same."""
    found = run_ranks_once(4, both, (kind, reply), timeout=HUNG)
    assert all(one["compressing"] == (True, True) and one["same"] == [True] * 3 for one in found)
    assert all(one["bits"] == found[0]["bits"] for one in found)
    assert max(one["off"][0] for one in found) < 1e-6
    # 0/1 Adam's first sign within rounding of 0 turns in step 26.
    assert max(one["off"][1] for one in found) < (1e-3 if kind == "ZeroOneAdam" else 1e-6)
    assert max(one["off"][2] for one in found) < 5e-2
    loss, ddp, before = found[0]["losses"]
    assert loss == pytest.approx(ddp, rel=0.005) and loss < before


def uneven(rank: int, size: int) -> tuple[bytes, bool, list[float]]:
    """Parts of different sizes, some empty; clipped; the last step has a bad gradient on one rank."""
    mesh = mesh_of(2, 2)
    net = sharded(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)), mesh)
    for p in net.parameters():
        nn.init.normal_(p.to_local(), generator=torch.Generator().manual_seed(rank % 2))  # type: ignore[attr-defined]
    optimizer = build(
        "OneBitAdam", net.parameters(), process_group=mesh.get_group("replicate"), freeze_step=3, block_size=32
    )
    onebit.attach(net, optimizer)
    source, norms = torch.Generator().manual_seed(rank), []
    for step in range(8):
        optimizer.zero_grad()
        net(torch.randn(4, 5, generator=source)).square().mean().backward()
        if step == 7 and rank == 2:
            next(net.parameters()).grad.to_local().fill_(float("nan"))  # type: ignore[union-attr]
        else:
            norms.append(float(optimizer.clip_grad_norm_(0.5))) if step < 7 else None
        before = bits(whole(net))
        optimizer.step()
    return bits(whole(net)), before == bits(whole(net)), norms


def test_uneven_parts_clipping_and_a_bad_gradient() -> None:
    found = run_ranks_once(4, uneven)
    assert all(one == found[0] for one in found)
    assert found[0][1]
    assert len(found[0][2]) == 7


def masked(rank: int, size: int) -> tuple[bytes, bool, str]:
    """Some rows of the first weight are held, in both parts."""
    mesh = mesh_of(2, 2)
    net = sharded(model(8), mesh)
    weight, mask = net[0].weight, torch.ones(8, 16, dtype=torch.bool)  # type: ignore[index]
    mask[1::3] = False
    first = weight.full_tensor()[~mask].clone()
    others = [p for p in net.parameters() if p is not weight]
    options = {"process_group": mesh.get_group("replicate"), "freeze_step": 3, "weight_decay": 0.1}
    try:
        build("OneBitAdam", [{"params": [weight], "mask": mask}], **options)
        error = ""
    except ValueError as found:
        error = str(found)
    of_parts = distribute_tensor(mask, weight.device_mesh, weight.placements)
    optimizer = build("OneBitAdam", [{"params": [weight], "mask": of_parts}, {"params": others}], **options)
    onebit.attach(net, optimizer)
    trained(rank, net, optimizer, 7, lambda: None)
    return bits(whole(net)), bits([weight.full_tensor()[~mask]]) == bits([first]), error


@pytest.mark.slow
def test_a_mask_of_a_sharded_parameter() -> None:
    found = run_ranks_once(4, masked)
    assert all(one == found[0] for one in found)
    assert found[0][1]
    assert "must be sharded as it is" in found[0][2]


def refused(rank: int, size: int, case: str) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = mesh_of(2, 2)
    options: dict[str, Any] = {"process_group": mesh.get_group("replicate")}
    if case == "plain FSDP":
        fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
        options = {}
    elif case == "two dimensions":
        fully_shard(net, mesh=mesh)
    else:
        fully_shard(net[0] if case == "in part" else net, mesh=mesh["shard"])
    if case == "the shard group":
        options = {"process_group": mesh.get_group("shard")}
    elif case == "everyone":
        options = {}
    elif case == "node_group":
        options["node_group"] = mesh.get_group("shard")
    elif case == "overlap":
        options["overlap"] = True
    elif case == "rotated":
        options["norm"] = "rotated"
    try:
        build("OneBitAdam", net.parameters(), **options)
    except ValueError as error:
        return str(error)
    return "no error"


REFUSED = {
    "two dimensions": "mesh['shard']",
    "the shard group": "process_group is the group that the parameters are sharded over",
    "plain FSDP": "the parameters are sharded over all 4 ranks",
    "rotated": 'Pass norm="unbiased"',
    "everyone": "process_group has rank",
    "in part": "is whole where others are sharded",
    "node_group": "Leave it out",
    "overlap": "Pass overlap=False",
}


def refused_all(rank: int, size: int) -> list[str]:
    return [refused(rank, size, case) for case in REFUSED]


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    for texts in run_ranks_once(4, refused_all):
        for text, says in zip(texts, REFUSED.values(), strict=True):
            assert says in text


def parts_of(state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What this rank has of every tensor."""
    return {key: {name: local(v) for name, v in own.items()} for key, own in state.items()}


def with_a_layer_apart(rank: int, size: int, kind: str) -> tuple[bytes, bytes]:
    """In DDP's place FSDP's hook averages in stage 1, and the optimizer does without; then a state of stage 2 loads."""
    mesh, ends = mesh_of(2, 2), []
    for attached in (True, False):
        net = sharded(model(), mesh)
        layers = [{"params": net[:-1].parameters()}, {"params": net[-1].parameters(), "compress": False}]  # type: ignore[index]
        optimizer = build(kind, layers, process_group=mesh.get_group("replicate"), **OPTIONS)
        if attached:
            onebit.attach(net, optimizer)
        trained(rank, net, optimizer, 20, lambda: None)
        assert optimizer.compressing and len(optimizer.current.uncompressed) == 1
        ends.append(bits(whole(net)))
    state = snapshot(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert same(*({**found, "state": parts_of(found["state"])} for found in (snapshot(optimizer.state_dict()), state)))
    trained(rank, net, optimizer, 2, lambda: None)
    assert ends[0] == ends[1]
    return ends[0], bits(whole(net))


@adam_first
def test_a_layer_that_stays_uncompressed(kind: str) -> None:
    assert len(set(run_ranks_once(4, with_a_layer_apart, (kind,)))) == 1


def attached_to_the_wrong(rank: int, size: int) -> str:
    mesh = mesh_of(1, 2)
    net = model()
    optimizer = build("OneBitAdam", net.parameters())
    try:
        onebit.attach(sharded(net, mesh), optimizer)
    except ValueError as error:
        return str(error)
    return "no error"


def test_attach_says_in_which_order() -> None:
    for text in run_ranks_once(2, attached_to_the_wrong):
        assert "call fully_shard first" in text


def with_policies(rank: int, size: int) -> list[tuple[bytes, bool]]:
    """bf16 compute with fp32 shards, parameters kept after forward, activations computed again."""
    mesh, ends = mesh_of(2, 2), []
    for policy, reshard, again in (
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), True, False),
        (MixedPrecisionPolicy(), False, True),
    ):
        net: Any = model()
        if again:
            net = nn.Sequential(checkpoint_wrapper(net[0]), *net[1:])
        for module in (net[0], net[2], net):
            fully_shard(module, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=reshard)
            module.set_force_sum_reduction_for_comms(True)
        optimizer = build("OneBitAdam", net.parameters(), process_group=mesh.get_group("replicate"), **OPTIONS)
        onebit.attach(net, optimizer)
        for step in range(14):
            optimizer.zero_grad()
            for last in (False, True):  # gradients are accumulated before they are reduced
                net.set_requires_gradient_sync(last)
                loss_of(net, rank, 2 * step + last).backward()
            optimizer.step()
        assert all(p.dtype == torch.float32 for p in net.parameters())
        ends.append((bits(whole(net)), optimizer.compressing))
    return ends


def test_policies_of_fsdp_and_accumulated_gradients() -> None:
    found = run_ranks_once(4, with_policies)
    assert all(own == found[0] for own in found)
    assert all(compressing for _, compressing in found[0])
    assert found[0][0][0] != found[0][1][0]


def attached_in_part(rank: int, size: int) -> list[str]:
    """To an optimizer that lacks parameters of the model, or has others."""
    mesh, texts = mesh_of(1, 2), []
    for chosen in ("some", "more"):
        net, other = sharded(model(), mesh), sharded(model(), mesh)
        params = list(net.parameters())
        params = params[:2] if chosen == "some" else [*params, *other.parameters()]
        optimizer = build("OneBitAdam", params, process_group=mesh.get_group("replicate"))
        try:
            onebit.attach(net, optimizer)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_attach_wants_the_models_parameters() -> None:
    for some, more in run_ranks_once(2, attached_in_part):
        assert "the optimizer does not hold '2.weight' and 3 more of the model" in some
        assert "the model does not hold parameter" in more


def with_a_refused_hook(rank: int, size: int) -> tuple[bytes, bytes, bool]:
    """A module that takes no hook: the optimizer averages in step, to the same end."""
    mesh = mesh_of(2, 2)
    expected, _, _ = with_fsdp(rank, "OneBitAdam", 14, mesh, attached=True)
    net = sharded(model(), mesh)

    def refuse(hook: Any) -> None:
        raise ValueError("several param groups")

    net[2].set_all_reduce_hook = refuse  # type: ignore[index]
    optimizer = build("OneBitAdam", net.parameters(), process_group=mesh.get_group("replicate"), **OPTIONS)
    onebit.attach(net, optimizer)
    trained(rank, net, optimizer, 14, lambda: None)
    return bits(whole(net)), bits(whole(expected)), optimizer.averaged_in_backward


def test_a_module_that_takes_no_hook() -> None:
    for own, expected, averaged in run_ranks_once(4, with_a_refused_hook):
        assert own == expected and not averaged


def diverged(rank: int, size: int) -> list[str]:
    """One bit of rank 0's part differs, from the start and later: an error on all ranks, in the same step."""
    mesh, texts = mesh_of(2, 2), []
    for when in (0, 3):
        net = sharded(model(), mesh)
        options = {**OPTIONS, "check_every": 2}
        optimizer = build("OneBitAdam", net.parameters(), process_group=mesh.get_group("replicate"), **options)
        onebit.attach(net, optimizer)
        text = "no error"
        for step in range(6):
            if step == when and rank == 0:
                next(net.parameters()).data.to_local().view(-1)[3] += 1e-3  # type: ignore[operator]
            optimizer.zero_grad()
            try:
                loss_of(net, rank, step).backward()
                optimizer.step()
            except (ValueError, RuntimeError) as error:
                text = f"step {step}: {error}"
                break
        texts.append(text)
    return texts


def test_a_difference_in_one_part_is_an_error_on_all_ranks() -> None:
    found = run_ranks_once(4, diverged)
    for rank, (start, later) in enumerate(found):
        assert start.startswith("step 0: ") and later.startswith("step 3: "), (start, later)
        own = rank in (0, 2)
        assert ("parameter 0.weight has other values" in start) == own
        assert ("do not hold the same bits: parameter" in later) == own
        assert own or ("another part of the parameters" in start and "another part of the parameters" in later)

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
from tests.onebit.runs import OPTIMIZERS, bits, build, same, snapshot
from tests.ranks import run_ranks_once

LAMB, ZERO_ONE = ("OneBitLamb", 1), ("ZeroOneAdam", "direct")
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


@pytest.mark.parametrize(
    ("kind", "reply"),
    [("OneBitAdam", "direct"), *(pytest.param(*own, marks=pytest.mark.slow) for own in (LAMB, ZERO_ONE))],
)
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


def uneven(rank: int, mesh: Any) -> tuple[bytes, bool, list[float]]:
    """Parts of different sizes, some empty; clipped; the last step has a bad gradient on one rank."""
    net = sharded(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)), mesh)
    for p in net.parameters():
        nn.init.normal_(p.to_local(), generator=torch.Generator().manual_seed(rank % 2))  # type: ignore[attr-defined]
    optimizer = attached(net, mesh, freeze_step=3)
    source, norms = torch.Generator().manual_seed(rank), []
    for step in range(8):
        optimizer.zero_grad()
        net(torch.randn(4, 5, generator=source)).square().mean().backward()
        if step < 7:
            norms.append(float(optimizer.clip_grad_norm_(0.5)))
        elif rank == 2:
            next(net.parameters()).grad.to_local().fill_(float("nan"))  # type: ignore[union-attr]
        before = bits(whole(net))
        optimizer.step()
    return bits(whole(net)), before == bits(whole(net)), norms


def attached(net: nn.Module, mesh: Any, kind: str = "OneBitAdam", params: Any = None, **options: Any) -> Any:
    options = {**OPTIONS, "process_group": mesh.get_group("replicate"), **options}
    optimizer = build(kind, net.parameters() if params is None else params, **options)
    onebit.attach(net, optimizer)
    return optimizer


def masked(rank: int, mesh: Any) -> tuple[bytes, bool, str]:
    """Some rows of the first weight are held, in both parts."""
    net = sharded(model(8), mesh)
    weight, mask = net[0].weight, torch.ones(8, 16, dtype=torch.bool)  # type: ignore[index]
    mask[1::3] = False
    first = weight.full_tensor()[~mask].clone()
    with pytest.raises(ValueError) as refused:
        build("OneBitAdam", [{"params": [weight], "mask": mask}], process_group=mesh.get_group("replicate"))
    of_parts = distribute_tensor(mask, weight.device_mesh, weight.placements)
    others = [p for p in net.parameters() if p is not weight]
    params = [{"params": [weight], "mask": of_parts}, {"params": others}]
    optimizer = attached(net, mesh, params=params, freeze_step=3, weight_decay=0.1)
    trained(rank, net, optimizer, 7, lambda: None)
    return bits(whole(net)), bits([weight.full_tensor()[~mask]]) == bits([first]), str(refused.value)


def parts_of(state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What this rank has of every tensor."""
    return {key: {name: local(v) for name, v in own.items()} for key, own in state.items()}


def with_a_layer_apart(rank: int, mesh: Any, kind: str) -> list[bytes]:
    """In DDP's place FSDP's hook averages in stage 1, and the optimizer does without; then a state of stage 2 loads."""
    ends = []
    for hooked in (True, False):
        net = sharded(model(), mesh)
        layers = [{"params": net[:-1].parameters()}, {"params": net[-1].parameters(), "compress": False}]  # type: ignore[index]
        if hooked:
            optimizer = attached(net, mesh, kind, layers)
        else:
            optimizer = build(kind, layers, process_group=mesh.get_group("replicate"), **OPTIONS)
        trained(rank, net, optimizer, 20, lambda: None)
        assert optimizer.compressing and len(optimizer.current.uncompressed) == 1
        ends.append(bits(whole(net)))
    state = snapshot(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert same(*({**found, "state": parts_of(found["state"])} for found in (snapshot(optimizer.state_dict()), state)))
    trained(rank, net, optimizer, 2, lambda: None)
    assert ends[0] == ends[1]
    return [ends[0], bits(whole(net))]


def with_policies(rank: int, mesh: Any) -> list[tuple[bytes, bool]]:
    """bf16 compute with fp32 shards, parameters kept after forward, activations computed again; gradients are
    accumulated before they are reduced."""
    ends = []
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
        optimizer = attached(net, mesh)
        for step in range(14):
            optimizer.zero_grad()
            for last in (False, True):
                net.set_requires_gradient_sync(last)
                loss_of(net, rank, 2 * step + last).backward()
            optimizer.step()
        assert all(p.dtype == torch.float32 for p in net.parameters())
        ends.append((bits(whole(net)), optimizer.compressing))
    return ends


def with_a_refused_hook(rank: int, mesh: Any) -> tuple[bool, bool]:
    """A module that takes no hook: the optimizer averages in step, to the same end."""
    expected, _, _ = with_fsdp(rank, "OneBitAdam", 14, mesh, attached=True)
    net = sharded(model(), mesh)

    def refuse(hook: Any) -> None:
        raise ValueError("several param groups")

    net[2].set_all_reduce_hook = refuse  # type: ignore[index]
    optimizer = attached(net, mesh)
    trained(rank, net, optimizer, 14, lambda: None)
    return bits(whole(net)) == bits(whole(expected)), optimizer.averaged_in_backward


def diverged(rank: int, mesh: Any) -> list[str]:
    """One bit of rank 0's part differs, from the start and later: an error on all ranks, in the same step."""
    texts = []
    for when in (0, 3):
        net = sharded(model(), mesh)
        optimizer, text = attached(net, mesh, check_every=2), "no error"
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


def all_runs(rank: int, size: int) -> dict[str, Any]:
    mesh = mesh_of(2, 2)
    return {
        "uneven": uneven(rank, mesh),
        "masked": masked(rank, mesh),
        "apart": [with_a_layer_apart(rank, mesh, kind) for kind in OPTIMIZERS],
        "policies": with_policies(rank, mesh),
        "no hook": with_a_refused_hook(rank, mesh),
        "diverged": diverged(rank, mesh),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks_once(4, all_runs)


@pytest.mark.slow
def test_uneven_parts_clipping_and_a_bad_gradient(found: Any) -> None:
    _, untouched, norms = found[0]["uneven"]
    assert all(one["uneven"] == found[0]["uneven"] for one in found)
    assert untouched and len(norms) == 7


@pytest.mark.slow
def test_a_mask_of_a_sharded_parameter(found: Any) -> None:
    _, held, refused = found[0]["masked"]
    assert all(one["masked"] == found[0]["masked"] for one in found)
    assert held and "must be sharded as it is" in refused


@pytest.mark.slow
def test_a_layer_that_stays_uncompressed(found: Any) -> None:
    assert all(one["apart"] == found[0]["apart"] for one in found)


@pytest.mark.slow
def test_policies_of_fsdp_and_accumulated_gradients(found: Any) -> None:
    (one, compressing), (other, compressing_too) = found[0]["policies"]
    assert all(each["policies"] == found[0]["policies"] for each in found)
    assert compressing and compressing_too and one != other


@pytest.mark.slow
def test_a_module_that_takes_no_hook(found: Any) -> None:
    assert [one["no hook"] for one in found] == [(True, False)] * 4


@pytest.mark.slow
def test_a_difference_in_one_part_is_an_error_on_all_ranks(found: Any) -> None:
    for rank, one in enumerate(found):
        start, later = one["diverged"]
        assert start.startswith("step 0: ") and later.startswith("step 3: "), (start, later)
        own = rank in (0, 2)
        assert ("parameter 0.weight has other values" in start) == own
        assert ("do not hold the same bits: parameter" in later) == own
        assert own or ("another part of the parameters" in start and "another part of the parameters" in later)


def refused(case: str, mesh: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options: dict[str, Any] = {"process_group": mesh.get_group("replicate")}
    if case == "plain FSDP":
        fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
        options = {}
    elif case == "two dimensions":
        fully_shard(net, mesh=mesh)
    else:
        fully_shard(net[0] if case == "in part" else net, mesh=mesh["shard"])
    options |= {
        "the shard group": {"process_group": mesh.get_group("shard")},
        "everyone": {"process_group": None},
        "node_group": {"node_group": mesh.get_group("shard")},
        "overlap": {"overlap": True},
        "rotated": {"norm": "rotated"},
    }.get(case, {})
    build("OneBitAdam", net.parameters(), **options)


def refused_by_attach(case: str, mesh: Any) -> None:
    """An optimizer that was built too early, lacks parameters of the model, or has others."""
    net, other = model(), sharded(model(), mesh)
    if case == "too early":
        optimizer = build("OneBitAdam", net.parameters())
        onebit.attach(sharded(net, mesh), optimizer)
    params = list(sharded(net, mesh).parameters())
    attached(net, mesh, params=params[:2] if case == "some" else [*params, *other.parameters()])


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
REFUSED_BY_ATTACH = {
    "too early": "call fully_shard first",
    "some": "the optimizer does not hold '2.weight' and 3 more of the model",
    "more": "the model does not hold parameter",
}


def refusals(rank: int, size: int) -> list[str]:
    mesh, texts = mesh_of(2, 2), []
    for cases, call in ((REFUSED, refused), (REFUSED_BY_ATTACH, refused_by_attach)):
        for case in cases:
            with pytest.raises(ValueError) as error:
                call(case, mesh)
            texts.append(str(error.value))
    return texts


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    for texts in run_ranks_once(4, refusals):
        for text, says in zip(texts, [*REFUSED.values(), *REFUSED_BY_ATTACH.values()], strict=True):
            assert says in text

"""Runs of a few steps on the simulated device: together they reach all that waits for something."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.collectives import CompressedAllReduce
from onebit.collectives.topology import Topology
from onebit.collectives.transport import transport_for
from tests.onebit.runs import on_warnings
from tests.streams.device import Device
from tests.streams.hosts import Clock, take_over
from tests.streams.recorder import Stream

SMALL = {"block_size": 32, "chunks": 2, "lr": 1e-3}
OF_KIND: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 2},
    "OneBitLamb": {"freeze_step": 2},
    "ZeroOneAdam": {"var_update_scaler": 1, "var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 2},
}
RANKS = 4
STEPS = 8
BAD = 4  # the step whose gradients are not finite


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 1))


def groups(kind: str) -> Any:
    """The first ranks of the world, all of them alike."""
    match kind:
        case "one level":
            return _group(2)
        case "two levels":
            first = transport_for(_group(2))
            return Topology(transport_for(_group(4)), first, first.split(0))
    raise ValueError(kind)


def _group(ranks: int) -> Any:
    return dist.new_group(list(range(ranks)))


def loss_of(model: nn.Module, bad: bool = False) -> Tensor:
    x = torch.ones(3, 5) * (float("inf") if bad else 1.0)
    return model(x).square().sum()


def optimizer_of(model: nn.Module, kind: str, ranks: Any, **options: Any) -> Any:
    options = {**SMALL, **OF_KIND[kind], "process_group": ranks, **options}
    return getattr(onebit, kind)(model.parameters(), **options)


def train(
    optimizer: Any,
    model: nn.Module,
    steps: int = STEPS,
    bad: int = BAD,
    accumulate: bool = False,
    change: Callable[[int], None] = lambda step: None,
) -> None:
    """accumulate: two backward passes a step. change: what comes between backward and a step."""
    for step in range(steps):
        if accumulate:
            with model.no_sync():
                loss_of(model).backward()
        loss_of(model, step == bad).backward()
        change(step)
        optimizer.step()
        optimizer.zero_grad()


def plain(device: Device, kind: str, levels: str = "one level", clip: bool = False, **options: Any) -> None:
    model = net()
    optimizer = optimizer_of(model, kind, groups(levels), **options)
    train(optimizer, model, change=lambda step: optimizer.clip_grad_norm_(1.0) if clip else None)


def in_ddp(device: Device, kind: str, levels: str = "one level", accumulate: bool = False, **options: Any) -> None:
    ranks = groups(levels)
    group = ranks.everyone.group if isinstance(ranks, Topology) else ranks
    model = DistributedDataParallel(net(), process_group=group)
    optimizer = optimizer_of(model, kind, ranks, **options)
    onebit.attach(model, optimizer)
    train(optimizer, model, accumulate=accumulate)


def two_optimizers(device: Device) -> None:
    """A bucket of DDP's has gradients of both, whose steps are of two kinds."""
    group = groups("one level")
    model = DistributedDataParallel(net(), process_group=group)
    params = list(model.parameters())
    made = [
        onebit.OneBitAdam(params[:2], freeze_step=2, process_group=group, **SMALL),
        onebit.OneBitAdam(params[2:4], freeze_step=50, process_group=group, gradient_dtype=torch.bfloat16, **SMALL),
    ]
    for each in made:
        onebit.attach(model, each)
    for _ in range(5):
        loss_of(model).backward()
        for each in made:
            each.step()
            each.zero_grad()
        model.zero_grad()


def with_hook(device: Device) -> None:
    """Gradients of any optimizer, by DDP's hook."""
    group = groups("one level")
    model = net()
    ddp = DistributedDataParallel(model, process_group=group)
    compression = onebit.compress_gradients(ddp, bits=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        train(optimizer, ddp, steps=6)
        compression.synchronize()
        compression.load_state_dict(compression.state_dict())
    with on_warnings("error", message="state_dict"):  # that residuals are zero
        assert compression.state_dict()["sent"] > 0


def tensors_alone(device: Device, levels: str = "one level", **options: Any) -> None:
    ranks = groups(levels)
    average = CompressedAllReduce([70, 300], block_size=32, chunks=2, process_group=ranks, **options)
    tensors = [torch.ones(70), torch.ones(300)]
    for _ in range(3):
        average(tensors)
    for _ in range(2):
        average.synchronize()
        average.load_state_dict(average.state_dict())
        average(tensors)


def in_two_streams(device: Device, **options: Any) -> None:
    """Backward runs in the streams that forward ran in."""
    model, other = net(), device.new(name="other")
    optimizer = optimizer_of(model, "OneBitAdam", groups("one level"), **options)
    layers = list(model)
    for _ in range(STEPS):
        main = device.recorder.current
        x = layers[1](layers[0](torch.ones(3, 5)))
        x.register_hook(partial(_go_to, device, main))
        take_over(other.clock, main.clock)
        with device.within(other):
            loss = layers[3](layers[2](x)).square().sum()
        loss.register_hook(partial(_go_to, device, other))
        take_over(main.clock, other.clock)
        loss.backward()
        device.recorder.current = main
        take_over(main.clock, other.clock)  # as torch does when a backward pass ends
        device.keep_all([x, loss, *(p.grad for p in model.parameters() if p.grad is not None)], main)
        device.keep_all([x], other)
        del x, loss
        optimizer.step()
        optimizer.zero_grad()


def in_two_branches(device: Device) -> None:
    """Train a model whose branches run in two streams: neither one's backward pass waits for the other's. The first
    gradient of a pass comes from the stream of the first chunk, and the last chunk is sent first."""
    one, two, other = net(), net(), device.new(name="other")
    params = [*two.parameters(), *one.parameters()]
    optimizer = onebit.OneBitAdam(params, freeze_step=2, overlap=True, process_group=groups("one level"), **SMALL)
    for _ in range(STEPS):
        main, x = device.recorder.current, torch.ones(3, 5)
        optimizer.param_groups[0]["lr"] *= 0.9  # so that its numbers are written anew
        take_over(other.clock, main.clock)
        y = one(x)
        y.register_hook(partial(_go_to, device, main, after=main.clock))
        with device.within(other):
            z = two(x)
        z.register_hook(partial(_go_to, device, other, after=main.clock))
        take_over(main.clock, other.clock)
        (y + z).square().sum().backward()
        device.recorder.current = main
        take_over(main.clock, other.clock)
        device.keep_all([y, z, *(p.grad for p in params if p.grad is not None)], main)
        device.keep_all([x], other)
        del x, y, z
        optimizer.step()
        optimizer.zero_grad()


def _go_to(device: Device, stream: Stream, gradient: Tensor, after: Clock | None = None) -> None:
    """Go from one function of a backward pass to the next as torch does. after: what comes before, if it is not what
    the function that ran last did."""
    take_over(stream.clock, after or device.recorder.current.clock)
    device.recorder.part(gradient).memory.kept_for.add(stream)
    device.recorder.current = stream


def taken_back(device: Device, change: Callable[[Any], None], levels: str = "one level") -> None:
    """Messages have left, and must not count."""
    model = net()
    optimizer = optimizer_of(model, "OneBitAdam", groups(levels), overlap=True)
    train(optimizer, model, bad=STEPS, change=lambda step: change(optimizer) if step == 4 else None)


def drop(optimizer: Any) -> None:
    optimizer.zero_grad()


def double(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(2)


def clip(optimizer: Any) -> None:
    optimizer.clip_grad_norm_(1.0)


def saved(device: Device, kind: str, **options: Any) -> None:
    """State is written and read between steps."""
    model, ranks = net(), groups("two levels" if options.pop("nodes", False) else "one level")
    optimizer = optimizer_of(model, kind, ranks, **options)
    train(optimizer, model, 4)
    other = optimizer_of(model, kind, ranks, **options)
    optimizer.synchronize()
    other.load_state_dict(optimizer.state_dict())
    train(other, model, 4)


def with_scaler(device: Device, kind: str, **options: Any) -> None:
    group = groups("one level")
    model = DistributedDataParallel(net(), process_group=group)
    optimizer = optimizer_of(model, kind, group, **options)
    onebit.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(STEPS):
        scaler.scale(loss_of(model, step == BAD)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def give_fsdp_streams(device: Device, model: nn.Module) -> None:
    """FSDP calls its hook in a stream of its own, with memory of another one, and lets go of it when it has launched
    what it does."""
    scatter, reduce = device.new(name="reduce-scatter"), device.new(name="all-reduce")
    modules: list[Any] = [each for each in model.modules() if hasattr(each, "set_all_reduce_hook")]

    def wrapped(take: Callable[[Any], None], hook: Callable[[Tensor], None]) -> None:
        def hooked(reduced: Tensor) -> None:
            current = device.recorder.current
            buffer = reduced.clone()
            take_over(scatter.clock, current.clock)
            device.recorder.part(buffer).memory.made_in = scatter
            take_over(reduce.clock, scatter.clock)
            with device.within(reduce):
                hook(buffer)
                reduced.copy_(buffer)
            del buffer
            take_over(current.clock, reduce.clock)

        take(hooked)

    for each in modules:
        each.set_all_reduce_hook = partial(wrapped, each.set_all_reduce_hook)


def in_fsdp(device: Device, kind: str = "OneBitAdam", elsewhere: bool = False) -> None:
    """elsewhere: the user trains in another stream than that of `attach`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = net()
    for each in [*model, model]:
        fully_shard(each, mesh=mesh["shard"])
    train_in = device.new(name="user") if elsewhere else device.recorder.current
    take_over(train_in.clock, device.recorder.current.clock)
    with device.within(train_in):
        optimizer = optimizer_of(model, kind, mesh.get_group("replicate"), gradient_dtype=torch.bfloat16)
    give_fsdp_streams(device, model)
    onebit.attach(model, optimizer)
    with device.within(train_in):
        train(optimizer, model, change=lambda step: optimizer.clip_grad_norm_(1.0) if elsewhere else None)
    take_over(device.recorder.main.clock, train_in.clock)


def captured(device: Device, kind: str) -> None:
    """A graph of steps of stage 2, after its warm-up."""
    model = net()
    optimizer = optimizer_of(model, kind, groups("one level"))
    train(optimizer, model, 6)
    stream = device.new(name="capture")
    take_over(stream.clock, device.recorder.current.clock)
    with device.within(stream):
        device.capturing = True
        try:
            train(optimizer, model, 2)
        finally:
            device.capturing = False
    take_over(device.recorder.current.clock, stream.clock)
    train(optimizer, model, 2)


SCENARIOS: dict[str, Callable[[Device], None]] = {}
for _kind in OF_KIND:
    for _overlap in (False, True):
        for _reply in (1, "direct") if _kind == "OneBitAdam" else (1,):
            for _levels in ("one level", "two levels"):
                SCENARIOS[f"{_kind}, overlap={_overlap}, reply={_reply}, {_levels}"] = partial(
                    plain, kind=_kind, overlap=_overlap, reply=_reply, levels=_levels
                )
    SCENARIOS |= {
        f"{_kind} in DDP": partial(in_ddp, kind=_kind, gradient_dtype=torch.bfloat16),
        f"{_kind} in DDP, overlap, accumulated": partial(in_ddp, kind=_kind, overlap=True, accumulate=True),
        f"{_kind} in DDP, two levels": partial(in_ddp, kind=_kind, levels="two levels"),
        f"{_kind} in DDP, two levels, overlap": partial(in_ddp, kind=_kind, levels="two levels", overlap=True),
        f"{_kind}, clipped": partial(plain, kind=_kind, clip=True),
        f"{_kind}, one chunk": partial(plain, kind=_kind, chunks=1),
        f"{_kind}, checked": partial(plain, kind=_kind, check_every=2),
        f"{_kind}, saved": partial(saved, kind=_kind),
        f"{_kind}, saved, two levels": partial(saved, kind=_kind, nodes=True, reply=1),
    }
SCENARIOS |= {
    "two optimizers in DDP": two_optimizers,
    "the hook": with_hook,
    "tensors": partial(tensors_alone, reply=1),
    "tensors, direct": partial(tensors_alone, reply="direct"),
    "tensors, two levels": partial(tensors_alone, reply=1, levels="two levels"),
    "tensors, tensor scale": partial(tensors_alone, reply=1, scale="tensor"),
    "two streams": in_two_streams,
    "two streams, overlap": partial(in_two_streams, overlap=True),
    "dropped": partial(taken_back, change=drop),
    "dropped, two levels": partial(taken_back, change=drop, levels="two levels"),
    "doubled": partial(taken_back, change=double),
    "clipped late": partial(taken_back, change=clip),
    "scaled": partial(with_scaler, kind="OneBitAdam"),
    "scaled, full steps in stage 2": partial(
        with_scaler, kind="ZeroOneAdam", var_freeze_step=None, local_step_scaler=None, local_step_clipper=16
    ),
    "two branches": in_two_branches,
    "FSDP, LAMB": partial(in_fsdp, kind="OneBitLamb"),
    "FSDP, 0/1 Adam": partial(in_fsdp, kind="ZeroOneAdam"),
    "FSDP": in_fsdp,
    "FSDP, another stream": partial(in_fsdp, elsewhere=True),
    "captured": partial(captured, kind="OneBitAdam"),
    "captured, LAMB": partial(captured, kind="OneBitLamb"),
}

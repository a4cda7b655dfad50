"""Models and optimizers that others have wrapped, DDP models with several optimizers, and copies of them."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import onebit
from onebit.parallel.buckets import LOCAL
from tests.onebit.runs import bits, build, nodes_of
from tests.ranks import group, run_ranks, run_ranks_once


class FabricModule(nn.Module):
    """As Lightning's Fabric wraps a model."""

    def __init__(self, forward_module, original_module):
        super().__init__()
        self._forward_module, self._original_module = forward_module, original_module

    @property
    def module(self):
        return self._original_module

    def forward(self, x):
        return self._forward_module(x)


def fabric_optimizer(optimizer):
    """As Lightning's Fabric wraps an optimizer: its class is a subclass of the optimizer's."""

    class FabricOptimizer(type(optimizer)):
        def __init__(self):
            self.__dict__.update(optimizer.__dict__)
            self.__dict__["wrapped"] = optimizer

        @property
        def optimizer(self):
            return self.wrapped

        def step(self, closure=None):
            return self.wrapped.step(closure)

    return FabricOptimizer()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 30), nn.Linear(30, 1))


def wrapped(model, how):
    """The model that is called, and what wraps an optimizer."""
    if how == "replicate":
        return replicate(model, process_group=group()), lambda optimizer: optimizer
    if how == "DDP of compiled":
        model = torch.compile(model, backend="eager")
    ddp = DistributedDataParallel(model, process_group=group())
    if how == "compiled DDP":
        ddp = torch.compile(ddp, backend="eager")
    if how == "Fabric":
        return FabricModule(ddp, model), fabric_optimizer
    return ddp, lambda optimizer: optimizer


def loss_of(model, rank, step):
    return model(torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def train(model, optimizer, rank, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def with_wrappers(rank, size, kind, how, folder):
    """Trained, saved, and gone on in a plain DDP model."""
    inner = net()
    model, wrap = wrapped(inner, how)
    own = build(kind, inner.parameters(), freeze_step=3, process_group=group())
    optimizer, history = wrap(own), onebit.History()
    onebit.attach(model, optimizer)
    train(model, optimizer, rank, 0, 8)
    history.record(optimizer)
    onebit.save(folder, model, optimizer)
    sent = own.wire_bytes
    train(model, optimizer, rank, 8, 12)

    again = net()
    ddp, _ = wrapped(again, "DDP")
    plain = build(kind, again.parameters(), freeze_step=3, process_group=group())
    onebit.attach(ddp, plain)
    onebit.load(folder, ddp, plain)
    train(ddp, plain, rank, 8, 12)
    assert bits(again.parameters()) == bits(inner.parameters())
    onebit.load(folder, model, optimizer)
    return bits(inner.parameters()), history.steps, sent


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("OneBitAdam", how) for how in ("compiled DDP", "Fabric", "replicate")),
        ("OneBitLamb", "DDP of compiled"),
        ("ZeroOneAdam", "Fabric"),
    ],
)
def test_wrapped_models_train_as_ddp_does(kind, how, tmp_path):
    expected = run_ranks(2, with_wrappers, kind, "DDP", str(tmp_path / "a"))
    assert run_ranks(2, with_wrappers, kind, how, str(tmp_path / "b")) == expected
    assert expected[0][2] > 0


def with_several(rank, size, kinds_of, options, ddp):
    """Parameters that share buckets, every other one for each optimizer; without DDP they average themselves."""
    ranks = nodes_of(group(), 2) if size > 2 else group()
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Linear(30, 1))
    for i, p in enumerate(model.parameters()):
        nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(i))
    params, optimizers = list(model.parameters()), []
    called = DistributedDataParallel(model, process_group=group()) if ddp else model
    for i, kind in enumerate(kinds_of):
        own = params[i :: len(kinds_of)]
        if kind == "AdamW":
            optimizers.append(torch.optim.AdamW(own, lr=1e-3))
        else:
            optimizers.append(build(kind, own, freeze_step=4 + i, process_group=ranks, **options))
            if ddp:
                onebit.attach(called, optimizers[-1])
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(called, rank, step).backward()
        for optimizer in optimizers:
            if not ddp and isinstance(optimizer, torch.optim.AdamW):
                for p in optimizer.param_groups[0]["params"]:
                    torch.distributed.all_reduce(p.grad.div_(size), group=group())
            optimizer.step()
    without = ddp and called.require_backward_grad_sync is LOCAL
    return bits(params), without, [o.wire_bytes > 0 for o in optimizers if isinstance(o, onebit.OneBitOptimizer)]


@pytest.mark.parametrize(
    ("kinds_of", "options"),
    [
        (("OneBitAdam", "AdamW"), {}),
        (("OneBitAdam", "ZeroOneAdam"), {"overlap": True}),
        (("OneBitAdam", "AdamW"), {"gradient_dtype": torch.bfloat16}),
        (("OneBitLamb", "ZeroOneAdam"), {}),
        (("ZeroOneAdam", "AdamW"), {"overlap": True}),
    ],
    ids=str,
)
def test_several_optimizers_of_a_model(kinds_of, options):
    """Gradients that no optimizer of onebit has are averaged in every step; buckets are left out where all have one."""
    found, expected = (run_ranks(2, with_several, kinds_of, options, ddp) for ddp in (True, False))
    assert found[0][0] == found[1][0] == expected[0][0]
    assert all(found[0][2])
    assert found[0][1] == ("AdamW" not in kinds_of)


def test_several_optimizers_with_nodes():
    """Some gradients of a bucket are averaged over a node, and others over all ranks."""
    found, expected = (run_ranks(4, with_several, ("OneBitAdam", "AdamW"), {}, ddp) for ddp in (True, False))
    assert {each[0] for each in found} == {found[0][0]}
    one, other = (torch.frombuffer(bytearray(each[0][0]), dtype=torch.float32) for each in (found, expected))
    assert (one - other).abs().max() < 1e-6  # four ranks' gradients are added in another order


def copied(rank, size, kind, overlap):
    """In both stages: copies train as DDP alone does, and take an optimizer of their own."""
    inner, ends = net(), []
    ddp = DistributedDataParallel(inner)
    optimizer = build(kind, inner.parameters(), freeze_step=3, overlap=overlap)
    onebit.attach(ddp, optimizer)
    for first in (0, 4):
        train(ddp, optimizer, rank, first, first + 4)
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        averaged = AveragedModel(ddp)
        averaged.update_parameters(ddp)
        for twin in (copy.deepcopy(ddp), torch.load(file, weights_only=False), averaged.module):
            loss_of(twin, rank, 50).backward()
            ends.append(bits(p.grad for p in twin.parameters()))
            again = build(kind, twin.module.parameters(), freeze_step=3)
            onebit.attach(twin, again)
            train(twin, again, rank, 0, 5)
            assert again.compressing
    train(ddp, optimizer, rank, 8, 10)
    return bits(inner.parameters()), ends


@pytest.mark.parametrize(("kind", "overlap"), [("OneBitAdam", True), ("ZeroOneAdam", False)])
def test_copies_of_an_attached_model(kind, overlap):
    one, other = run_ranks_once(2, copied, (kind, overlap))
    assert one == other
    assert one[1][0] == one[1][1] == one[1][2] and one[1][3] == one[1][4] == one[1][5]


def test_what_is_no_optimizer_of_onebit(tmp_path):
    model = net()
    foreign = torch.optim.AdamW(model.parameters())
    for call, *before in (
        (onebit.attach, model),
        (onebit.save, tmp_path, model),
        (onebit.load, tmp_path, model),
        (onebit.make_room, {}, model),
        (onebit.History().record,),
    ):
        with pytest.raises(TypeError, match="needs an optimizer of onebit, such as OneBitAdam; this is a AdamW"):
            call(*before, foreign)
    own = build("OneBitAdam", model.parameters())
    for call in (onebit.save, onebit.load):
        with pytest.raises(TypeError, match=r"needs a model, a torch\.nn\.Module; this is a list"):
            call(tmp_path, list(model.parameters()), own)

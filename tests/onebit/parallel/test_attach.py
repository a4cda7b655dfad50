"""`attach` and DDP: what is refused, models and optimizers that others have wrapped, several optimizers of a model,
copies, `join`, and DDP's buckets, which backward passes that compressed steps follow leave out."""

import copy
import gc
import io
import itertools
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel

import onebit
from onebit.parallel.buckets import LOCAL
from tests import internals
from tests.collectives.work import error_of
from tests.onebit.runs import bits, build, kinds, nodes_of, on_ranks, on_warnings, refused
from tests.ranks import group, run_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 30), nn.Linear(30, 1))


def loss_of(model, rank, step):
    return model(torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def train(model, optimizer, rank, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


# Refused


@kinds
@on_ranks(2)
def test_attach_says_what_is_wrong(rank, kind):
    def ddp_of(model, **options):
        return DistributedDataParallel(model, process_group=group(), **options)

    def fails(error, model, params, *parts, ranks=None):
        optimizer = build(kind, params, process_group=ranks or group())
        with refused(error, *parts):
            onebit.attach(model, optimizer)

    plain, ddp, hooked, ignoring = net(), ddp_of(net()), ddp_of(net()), net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["2.bias", "3.weight"])
    partly = ddp_of(ignoring)
    hooked.register_comm_hook(None, allreduce_hook)
    more, alone = [*ddp.parameters(), nn.Parameter(torch.ones(2))], [torch.distributed.get_rank()]
    apart = torch.distributed.new_group(alone, use_local_synchronization=True)
    says = ("DistributedDataParallel", "Sequential", "averages gradients itself")
    fails(TypeError, plain, plain.parameters(), *says)
    fails(ValueError, ddp, more, "does not hold parameter 8 of group 0", "one of their own")
    fails(ValueError, partly, partly.parameters(), "not average", "parameter 2.bias and 1 more", "told to ignore it")
    onebit.attach(partly, build(kind, ignoring[:2].parameters(), process_group=group()))
    fails(ValueError, hooked, hooked.parameters(), "hook already", "allreduce_hook", "without that call")
    fails(ValueError, ddp, ddp.parameters(), "2 ranks", "process_group=", ranks=apart)
    if torch.cuda.is_available() or not torch.version.cuda:  # else DDP itself asks for a stream of a GPU
        narrow = ddp_of(net(), mixed_precision=_MixedPrecision(param_dtype=torch.float16))
        fails(ValueError, narrow, narrow.parameters(), "hook already", "mixed_precision", "torch.autocast")
    optimizer = build(kind, ddp.parameters(), process_group=group())
    onebit.attach(ddp, optimizer)
    with pytest.raises(ValueError, match=r"twice.*once is enough"):
        onebit.attach(ddp, optimizer)
    fails(ValueError, ddp, more[2:-1], "'1.weight'", "one optimizer", "to replace that one, wrap")


def test_what_is_no_optimizer_of_onebit_or_no_model(tmp_path):
    model = net()
    foreign, own = torch.optim.AdamW(model.parameters()), build("OneBitAdam", model.parameters())
    for call, *before in (
        (onebit.attach, model),
        (onebit.save, tmp_path, model),
        (onebit.load, tmp_path, model),
        (lambda optimizer: onebit.reform(optimizer, None),),
    ):
        with pytest.raises(TypeError, match="needs an optimizer of onebit, such as OneBitAdam; this is a AdamW"):
            call(*before, foreign)
    with pytest.raises(TypeError, match=r"takes the model first.*attach\(model, optimizer\)"):
        onebit.attach(own, model)
    for call, *before in ((onebit.attach,), (onebit.save, tmp_path), (onebit.load, tmp_path)):
        with refused(TypeError, "needs a model", "list"):
            call(*before, list(model.parameters()), own)


@pytest.mark.parametrize("how", ["forgotten", "attached", "no DDP", "zeros"])
@on_ranks(2)
def test_forgetting_attach_warns_once(rank, how):
    """There is no reason to warn if every rank has gradients of its own, or none."""
    model = net()
    optimizer = build("OneBitAdam", model.parameters(), freeze_step=2, process_group=group())
    called = model if how == "no DDP" else DistributedDataParallel(model, process_group=group())
    if how == "attached":
        onebit.attach(called, optimizer)
    with on_warnings(category=UserWarning) as said:
        for step in range(5):
            optimizer.zero_grad()
            (loss_of(called, rank, step) * (how != "zeros" or step > 0)).backward()
            optimizer.step()
    texts = [text for text in said if "onebit" in text]
    assert len(texts) == (how == "forgotten" and rank == 0)
    for text in texts:
        says = ("DistributedDataParallel", "onebit.attach(model, optimizer)", "no time is gained")
        assert all(part in text for part in says)


class Growing(nn.Module):
    """Its second layer is frozen until `grow`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)])
        self.layers[1].requires_grad_(False)
        self.added = None

    def grow(self, how, optimizer):
        if how == "added":
            self.added = nn.Linear(8, 8)
            optimizer.add_param_group({"params": self.added.parameters()})
        self.layers[1].requires_grad_()

    def forward(self, x):
        first, second, last = self.layers
        return last((self.added or torch.tanh)(second(first(x))))


GROWING = [(kind, "unfrozen", at) for kind in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam") for at in (1, 3)]


@pytest.mark.parametrize(("kind", "how", "at"), [*GROWING, ("OneBitAdam", "added", 3), ("ZeroOneAdam", "unfrozen", 0)])
@on_ranks(2)
def test_what_ddp_does_not_average_is_an_error_until_the_model_is_wrapped_anew(rank, kind, how, at):
    """Parameters that train only since the model was wrapped, before it was attached or after so many steps. The
    optimizer goes on with its state; another one of the model, and what nobody trains, are not in the way."""
    model = Growing()
    ddp = DistributedDataParallel(model, process_group=group(), bucket_cap_mb=0.0001)
    first, *others = (layer.parameters() for layer in model.layers)
    options = {"freeze_step": 5, "process_group": group()}
    other = build("OneBitAdam", first, **options)
    optimizer = build(kind, [p for each in others for p in each], **options)

    def on(last):
        for step in range(optimizer.steps, last):
            model.zero_grad()
            loss_of(ddp, rank, step).backward()
            for each in (other, optimizer):
                each.step()

    def attach():
        for each in (other, optimizer):
            onebit.attach(ddp, each)

    if at > 0:
        attach()
        on(at)
        model.grow(how, optimizer)
    else:
        model.grow(how, optimizer)
        attach()
    before = bits(model.parameters())
    name = "layers.1.weight" if how == "unfrozen" else "layers.1.weight and 3 more"
    for _ in range(2):
        with refused(ValueError, "DDP does not average", f"parameter {name}", "Wrap the model anew", "attach again"):
            on(at + 1)
    assert bits(model.parameters()) == before and optimizer.steps == at
    ddp = DistributedDataParallel(model, process_group=group(), bucket_cap_mb=0.0001)
    attach()
    on(12)
    assert optimizer.compressing and optimizer.steps == 12
    optimizer.synchronize()
    return bits(model.parameters())


@kinds
@on_ranks(2)
def test_another_optimizer_takes_a_model_that_is_wrapped_anew(rank, kind):
    """It does in stage 2. The first one is gone with the model that it was attached to."""
    model, ends = net(), []
    for _ in range(2):
        ddp = DistributedDataParallel(model, process_group=group())
        optimizer = build(kind, model.parameters(), freeze_step=3, process_group=group())
        onebit.attach(ddp, optimizer)
        gc.collect()
        ends.append(weakref.ref(optimizer))
        assert [end() is optimizer for end in ends] == [end is ends[-1] for end in ends]
        train(ddp, optimizer, rank, 0, 8)
        assert optimizer.compressing
    return bits(model.parameters())


@on_ranks(2)
def test_a_layer_that_is_never_used_and_whose_buckets_ddp_skips(rank):
    class Skipping(Growing):
        def forward(self, x):
            return self.layers[2](self.layers[0](x))

    model = Skipping().requires_grad_()
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-5}
    ddp = DistributedDataParallel(model, process_group=group(), **options)
    optimizer = build("OneBitAdam", model.parameters(), freeze_step=3, process_group=group())
    onebit.attach(ddp, optimizer)
    train(ddp, optimizer, rank, 0, 6)
    return bits(model.parameters())


@on_ranks(2)
def test_sparse_gradients_of_another_optimizer_are_averaged_as_by_ddp(rank):
    """They have a bucket of their own."""
    averages = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
        ddp = DistributedDataParallel(model, process_group=group())
        if attached:
            onebit.attach(ddp, build("OneBitAdam", model[1].parameters(), freeze_step=3, process_group=group()))
        ddp(torch.arange(3) + 2 * rank).square().sum().backward()
        averages.append(model[0].weight.grad.to_dense())
    assert averages[0].equal(averages[1]) and averages[0].count_nonzero() == 5 * 4
    return bits(averages)


JOINS = [
    ("OneBitAdam", 50, "model.join"),
    ("OneBitAdam", 2, "Join"),
    ("OneBitLamb", 2, "model.join"),
    ("ZeroOneAdam", 2, "Join"),
    *(("OneBitAdam", freeze_step, how) for freeze_step in (50, 2) for how in ("disabled", "throwing")),
]


@pytest.mark.parametrize(("kind", "freeze_step", "how"), JOINS)
@on_ranks(2)
def test_join_is_refused_on_all_ranks_where_it_repeats_collectives(rank, kind, freeze_step, how):
    """Three even steps, then rank 1 has one batch less than rank 0. Refused before any collective; what is switched off
    works, or ends all ranks with the first that runs out."""
    ddp = DistributedDataParallel(nn.Linear(6, 3), process_group=group())
    optimizer = build(kind, ddp.parameters(), freeze_step=freeze_step, process_group=group())
    onebit.attach(ddp, optimizer)
    train(ddp, optimizer, rank, 0, 3)
    joined = {
        "model.join": ddp.join,
        "Join": lambda: Join([ddp]),
        "disabled": lambda: ddp.join(enable=False),
        "throwing": lambda: ddp.join(throw_on_early_termination=True),
    }[how]
    errors = []
    with error_of(errors), joined():
        train(ddp, optimizer, rank, 3, 6 if how == "disabled" else 6 - rank)
    steps, words = {
        "disabled": (6, []),
        "throwing": (5, ["Throwing across all ranks" if rank == 0 else "Rank 1 exhausted"]),
    }.get(how, (3, ["ValueError: ", "join()", "drop_last=True", "throw_on_early_termination=True"]))
    assert optimizer.steps == steps and len(errors) == bool(words)
    assert all(word in "".join(errors) for word in words), errors


# Wrapped


class FabricModule(nn.Module):
    """A model as Lightning's Fabric wraps it."""

    def __init__(self, forward_module, original_module):
        super().__init__()
        self._forward_module, self._original_module = forward_module, original_module

    @property
    def module(self):
        return self._original_module

    def forward(self, x):
        return self._forward_module(x)


def fabric_optimizer(optimizer):
    """Wrap an optimizer as Lightning's Fabric does: its class is a subclass of the optimizer's."""

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


def wrapped(model, how):
    """The model that is called."""
    if how == "replicate":
        return replicate(model, process_group=group())
    if how == "DDP of compiled":
        model = torch.compile(model, backend="eager")
    ddp = DistributedDataParallel(model, process_group=group())
    if how == "compiled DDP":
        return torch.compile(ddp, backend="eager")
    return FabricModule(ddp, model) if how == "Fabric" else ddp


def with_wrappers(kind, how, folder, rank, at):
    """Trained, saved after so many steps, and gone on in a plain DDP model."""
    inner = net()
    model = wrapped(inner, how)
    own = build(kind, inner.parameters(), freeze_step=3, process_group=group())
    optimizer = fabric_optimizer(own) if how == "Fabric" else own
    onebit.attach(model, optimizer)
    train(model, optimizer, rank, 0, at)
    onebit.save(folder, model, optimizer)
    train(model, optimizer, rank, at, 12)
    sent = own.wire_bytes

    again = net()
    ddp, plain = wrapped(again, "DDP"), build(kind, again.parameters(), freeze_step=3, process_group=group())
    onebit.attach(ddp, plain)
    onebit.load(folder, ddp, plain)
    train(ddp, plain, rank, at, 12)
    assert bits(again.parameters()) == bits(inner.parameters())
    onebit.load(folder, model, optimizer)
    return bits(inner.parameters()), sent


WRAPPED = [("OneBitAdam", how) for how in ("compiled DDP", "Fabric", "replicate")]


@pytest.mark.parametrize(("kind", "how"), [*WRAPPED, ("OneBitLamb", "DDP of compiled"), ("ZeroOneAdam", "Fabric")])
@on_ranks(2)
def test_wrapped_models_train_as_ddp_does(rank, kind, how, tmp_path):
    at = 2 if how == "replicate" else 8  # in stage 1, or 2
    found, expected = (with_wrappers(kind, each, str(tmp_path / each), rank, at) for each in (how, "DDP"))
    assert found == expected and expected[1] > 0
    return found


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
        model.zero_grad()
        loss_of(called, rank, step).backward()
        for optimizer in optimizers:
            if not ddp and isinstance(optimizer, torch.optim.AdamW):
                for p in optimizer.param_groups[0]["params"]:
                    torch.distributed.all_reduce(p.grad.div_(size), group=group())
            optimizer.step()
    without = ddp and called.require_backward_grad_sync is LOCAL
    return bits(params), without, [o.wire_bytes > 0 for o in optimizers if isinstance(o, onebit.OneBitOptimizer)]


@pytest.mark.parametrize(
    ("size", "kinds_of", "options"),
    [
        (2, ("OneBitAdam", "AdamW"), {}),
        (2, ("OneBitAdam", "ZeroOneAdam"), {"overlap": True}),
        (2, ("OneBitAdam", "AdamW"), {"gradient_dtype": torch.bfloat16}),
        (2, ("OneBitLamb", "ZeroOneAdam"), {}),
        (2, ("ZeroOneAdam", "AdamW"), {"overlap": True}),
        (4, ("OneBitAdam", "AdamW"), {}),  # some gradients of a bucket are averaged over a node, others over all ranks
    ],
    ids=str,
)
def test_several_optimizers_of_a_model(size, kinds_of, options):
    """Gradients that no optimizer of onebit has are averaged in every step; buckets are left out where all have one."""
    found, expected = (run_ranks(size, with_several, kinds_of, options, ddp) for ddp in (True, False))
    assert {each[0] for each in found} == {found[0][0]}
    one, other = (torch.frombuffer(bytearray(each[0][0]), dtype=torch.float32) for each in (found, expected))
    assert (one - other).abs().max() <= (0 if size == 2 else 1e-6)  # four ranks' gradients are added in another order
    assert all(found[0][2])
    assert found[0][1] == ("AdamW" not in kinds_of)


@pytest.mark.parametrize(("kind", "overlap"), [("OneBitAdam", True), ("ZeroOneAdam", False)])
@on_ranks(2, once=True)
def test_copies_of_an_attached_model(rank, kind, overlap):
    """Copies train in both stages as DDP alone does, and take an optimizer of their own."""
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
    assert ends[0] == ends[1] == ends[2] and ends[3] == ends[4] == ends[5]
    return bits(inner.parameters()), ends


# Buckets

STEPS = 9


def bucketed(kind, overlap=False, view=False):
    model = net()
    ddp = DistributedDataParallel(model, process_group=group(), bucket_cap_mb=0.001, gradient_as_bucket_view=view)
    options = {"var_update_scaler": 2} if kind == "ZeroOneAdam" else {"freeze_step": 3}
    options |= {"lr": 0.01, "process_group": group(), "block_size": 32, "chunks": 3, "overlap": overlap}
    optimizer = getattr(onebit, kind)(ddp.parameters(), **options)
    onebit.attach(ddp, optimizer)
    return model, ddp, optimizer


def with_buckets(rank, kind, buckets, overlap=False, accumulate=False, bad=None, view=False):
    """Parameters; buffers, and bytes sent; before which steps DDP's hook was called, and before which messages left in
    backward. buckets: whether they are used in every step."""
    model, ddp, optimizer = bucketed(kind, overlap, view)
    if buckets:
        optimizer.leave_out_buckets = lambda _: None
    hooked, early, begin, of_step = [], [], optimizer.begin_step, []
    optimizer.begin_step = lambda: (of_step.append(1), begin())[1]
    for step in range(STEPS):
        optimizer.zero_grad()
        of_step.clear()
        for again in range(1 + accumulate):
            with ddp.no_sync() if accumulate and not again else nullcontext():
                loss_of(ddp, rank, 2 * step + again).backward()
        early.append(optimizer.overlap.in_flight)
        hooked.append(bool(of_step) and not early[-1])
        if (step, rank) == bad:
            model[0].weight.grad[0, 0] = torch.nan
        optimizer.step()
    buffers = bits(b.detach().clone() for b in model.buffers())
    return bits(model.parameters()), (buffers, optimizer.wire_bytes), hooked, early


BUCKETS = [  # optimizer, accumulated, overlap, views
    ("OneBitAdam", False, False, False),
    ("OneBitAdam", True, False, False),
    ("OneBitLamb", True, False, False),
    ("ZeroOneAdam", False, False, False),
    ("OneBitAdam", False, True, True),
    ("OneBitAdam", True, True, False),
    ("OneBitLamb", True, True, True),
    ("ZeroOneAdam", True, True, False),
]


@pytest.mark.parametrize(("kind", "accumulate", "overlap", "view"), BUCKETS)
@on_ranks(2)
def test_results_and_buffers_are_those_with_buckets(rank, kind, accumulate, overlap, view):
    """Bit for bit, the buffers of BatchNorm too, which are rank 0's before every forward pass. The hook is called where
    gradients are averaged, and before the first compressed step, which is known to be one only when it begins."""
    *found, hooked, early = with_buckets(rank, kind, False, overlap, accumulate, None, view)
    *expected, always, _ = with_buckets(rank, kind, True, False, accumulate, None, view)
    assert found == expected and all(always)
    full = {4, 6} if kind == "ZeroOneAdam" else set()
    if overlap:
        assert any(early) and all(a != b for a, b in zip(hooked[4:], early[4:], strict=True))
    else:
        assert hooked == [step < 4 or step in full for step in range(STEPS)]
    return found[0]


@on_ranks(2)
def test_a_step_within_no_sync_leaves_it_on_and_averages_itself(rank):
    """DDP's switch stays where the user has put it."""
    expected, *_ = with_buckets(rank, "OneBitAdam", True)
    model, ddp, optimizer = bucketed("OneBitAdam", overlap=True)
    with ddp.no_sync():
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, rank, 2 * step).backward()
            assert ddp.require_backward_grad_sync is False and not optimizer.overlap.in_flight
            optimizer.step()
            assert ddp.require_backward_grad_sync is False
    assert bits(model.parameters()) == expected


@on_ranks(2)
def test_a_full_step_that_was_not_expected_is_averaged_by_the_step(rank):
    """A step that is skipped moves the schedule by one: the gradients of a full step may not have been in a bucket."""
    algorithm = internals.algorithm(onebit.ZeroOneAdam([nn.Parameter(torch.ones(2))], var_update_scaler=2))
    assert [algorithm.kind(step) for step in (4, 5, 6)] == ["1 bit", "full", "1 bit"]
    ends = []
    for bad in ((4, 1), (4, 0)):
        *found, hooked, _ = with_buckets(rank, "ZeroOneAdam", False, False, False, bad)
        *expected, _, _ = with_buckets(rank, "ZeroOneAdam", True, False, False, bad)
        assert not hooked[5] and found == expected
        ends.append(found[0])
    return ends


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, last):
        return self.layers[1](self.layers[0](x)) if last else self.layers[0](x)


@pytest.mark.parametrize(
    ("each", "overlap", "accumulate", "ranks"),
    [(False, False, False, (0, 1)), (False, True, True, (0,)), (True, True, False, (1,)), (True, False, True, (0, 1))],
)
@on_ranks(2)
def test_a_layer_may_be_left_out_of_any_step(rank, each, overlap, accumulate, ranks):
    """The second layer is left out of the full step 11, on every rank or on one, after it was used in compressed ones.
    each: whether each layer has an optimizer of its own."""
    torch.manual_seed(0)
    net = Layers()
    ddp = DistributedDataParallel(net, process_group=group(), find_unused_parameters=True)
    options = {"var_update_scaler": 2, "process_group": group(), "block_size": 32, "overlap": overlap, "lr": 0.01}
    parts = [layer.parameters() for layer in net.layers] if each else [net.parameters()]
    optimizers = [onebit.ZeroOneAdam(part, **options) for part in parts]
    for optimizer in optimizers:
        onebit.attach(ddp, optimizer)
    for step in range(1, 13):
        for optimizer in optimizers:
            optimizer.zero_grad()
        used = step != 11 or rank not in ranks
        for again in range(1 + accumulate):
            with ddp.no_sync() if accumulate and not again else nullcontext():
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + 10 * again + rank))
                ddp(x, used).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return bits(net.parameters())


def adversaries(kind, freeze_step, toggled, overlap, rank):
    """Two layers, each with an optimizer and a loss of its own, which goes through both. toggled: the other's
    parameters are frozen meanwhile, as Lightning's `toggle_optimizer` does."""
    torch.manual_seed(0)
    net = Layers()
    ddp = DistributedDataParallel(net, process_group=group(), find_unused_parameters=True)
    options = {"freeze_step": freeze_step, "process_group": group(), "block_size": 32, "overlap": overlap, "lr": 0.01}
    optimizers = [build(kind, layer.parameters(), **options) for layer in net.layers]
    for optimizer in optimizers:
        onebit.attach(ddp, optimizer)
    for step in range(1, 11):
        for own, other in enumerate(reversed(net.layers)):
            other.requires_grad_(not toggled)
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + 10 * own + rank))
            optimizers[own].zero_grad()
            (ddp(x, True) - own).square().mean().backward()
            optimizers[own].step()
            other.requires_grad_()
    assert [optimizer.compressing for optimizer in optimizers] == [freeze_step < 10] * 2
    return bits(net.parameters())


@kinds
@pytest.mark.parametrize("freeze_step", [4, 20])
@on_ranks(2)
def test_the_other_optimizers_parameters_may_be_frozen_in_a_backward_pass(rank, kind, freeze_step):
    runs = [adversaries(kind, freeze_step, *each, rank) for each in itertools.product((True, False), repeat=2)]
    assert len(set(runs)) == 1
    return runs[0]

"""`attach` and DDP: what is refused, models and optimizers that others have wrapped, several optimizers of a model,
copies, `join`, and DDP's buckets, which backward passes that compressed steps follow leave out."""

import copy
import io
import warnings
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
from tests.collectives.work import error_of
from tests.onebit.runs import OPTIMIZERS, assert_message, bits, build, nodes_of
from tests.ranks import group, run_ranks, run_ranks_once


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


def attach_error(kind, case):
    """The error of a wrong call of `attach`."""
    model, ours = net(), {"process_group": group()}
    params, precision = list(model.parameters()), None
    if case == "mixed precision":
        precision = _MixedPrecision(param_dtype=torch.float16)
    ddp = DistributedDataParallel(model, process_group=group(), mixed_precision=precision)
    own = [*params, nn.Parameter(torch.ones(2))] if case == "a parameter of another model" else params
    if case == "another group":
        alone = [torch.distributed.get_rank()]
        ours = {"process_group": torch.distributed.new_group(alone, use_local_synchronization=True)}
    optimizer = build(kind, own, **ours)
    if case == "another hook":
        ddp.register_comm_hook(None, allreduce_hook)
    if case == "another optimizer of the same parameters":
        onebit.attach(ddp, build(kind, params[2:], process_group=group()))
    if case == "twice":
        onebit.attach(ddp, optimizer)
    errors = []
    with error_of(errors):
        onebit.attach(model if case == "no DDP" else ddp, optimizer)
    return "".join(errors)


def attach_errors(rank, size, kind, cases):
    return [attach_error(kind, case) for case in cases]


ATTACH = {
    "no DDP": ("TypeError", ["DistributedDataParallel", "Sequential", "averages gradients itself"]),
    "a parameter of another model": ("ValueError", ["does not hold parameter 8 of group 0", "one of their own"]),
    "another hook": ("ValueError", ["hook already", "allreduce_hook", "without that call"]),
    "mixed precision": ("ValueError", ["hook already", "mixed_precision", "torch.autocast"]),
    "another optimizer of the same parameters": ("ValueError", ["'1.weight'", "one optimizer"]),
    "another group": ("ValueError", ["2 ranks", "process_group="]),
    "twice": ("ValueError", ["twice", "once is enough"]),
}


@pytest.mark.parametrize(
    ("kind", "cases"),
    [("OneBitAdam", list(ATTACH)), ("OneBitLamb", ["another hook"]), ("ZeroOneAdam", ["another group"])],
    ids=OPTIMIZERS,
)
def test_attach_says_what_is_wrong(kind, cases):
    if torch.version.cuda and not torch.cuda.is_available():
        cases = [case for case in cases if case != "mixed precision"]  # there DDP itself asks for a stream of a GPU
    for found in run_ranks(2, attach_errors, kind, cases):
        for case, text in zip(cases, found, strict=True):
            error, parts = ATTACH[case]
            assert text.startswith(f"{error}: ") and all(part in text for part in parts), text


def test_what_is_no_optimizer_of_onebit_or_no_model(tmp_path):
    model = net()
    foreign, own = torch.optim.AdamW(model.parameters()), build("OneBitAdam", model.parameters())
    for call, *before in (
        (onebit.attach, model),
        (onebit.save, tmp_path, model),
        (onebit.load, tmp_path, model),
        (onebit.make_room, {}, model),
        (onebit.History().record,),
    ):
        with pytest.raises(TypeError, match="needs an optimizer of onebit, such as OneBitAdam; this is a AdamW"):
            call(*before, foreign)
    for call, *before in ((onebit.attach,), (onebit.save, tmp_path), (onebit.load, tmp_path)):
        with pytest.raises(TypeError) as caught:
            call(*before, list(model.parameters()), own)
        assert_message(caught, "needs a model", "list")


def first_warnings(rank, size, how):
    """What is warned of in five steps."""
    model = net()
    optimizer = build("OneBitAdam", model.parameters(), freeze_step=2, process_group=group())
    called = model if how == "no DDP" else DistributedDataParallel(model, process_group=group())
    if how == "attached":
        onebit.attach(called, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            optimizer.zero_grad()
            (loss_of(called, rank, step) * (how != "zeros" or step > 0)).backward()
            optimizer.step()
    return [str(w.message) for w in caught if w.category is UserWarning and "onebit" in str(w.message)]


def test_forgetting_attach_warns_once():
    (text,), nothing = run_ranks(2, first_warnings, "forgotten")
    says = ("DistributedDataParallel", "onebit.attach(model, optimizer)", "nothing is saved")
    assert all(part in text for part in says)
    assert nothing == []
    for how in ("attached", "no DDP", "zeros"):  # gradients of its own on every rank, or none: no reason to warn
        assert run_ranks(2, first_warnings, how) == [[], []], how


def uneven(rank, size, kind, freeze_step, how):
    """Three even steps, then rank 1 has one batch less than rank 0. The error of each rank, and the steps taken."""
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
    return "".join(errors), optimizer.steps


@pytest.mark.parametrize(
    ("kind", "freeze_step", "how"),
    [
        ("OneBitAdam", 50, "model.join"),
        ("OneBitAdam", 2, "Join"),
        ("OneBitLamb", 2, "model.join"),
        ("ZeroOneAdam", 2, "Join"),
    ],
)
def test_join_is_refused_on_all_ranks(kind, freeze_step, how):
    """Before any collective."""
    for text, steps in run_ranks(2, uneven, kind, freeze_step, how):
        assert text.startswith("ValueError: ") and steps == 3
        assert all(part in text for part in ("join()", "drop_last=True", "throw_on_early_termination=True"))


@pytest.mark.parametrize("freeze_step", [50, 2], ids=["stage 1", "stage 2"])
def test_join_that_repeats_nothing_works(freeze_step):
    """What is switched off, or ends all ranks with the first that runs out."""
    assert run_ranks(2, uneven, "OneBitAdam", freeze_step, "disabled") == [("", 6)] * 2
    (one, steps), (other, also) = run_ranks(2, uneven, "OneBitAdam", freeze_step, "throwing")
    assert "Throwing across all ranks" in one and "Rank 1 exhausted" in other and steps == also == 5


# Wrapped


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


def with_wrappers(rank, size, kind, how, folder):
    """Trained, saved, and gone on in a plain DDP model."""
    inner = net()
    model = wrapped(inner, how)
    own = build(kind, inner.parameters(), freeze_step=3, process_group=group())
    optimizer, history = fabric_optimizer(own) if how == "Fabric" else own, onebit.History()
    onebit.attach(model, optimizer)
    train(model, optimizer, rank, 0, 8)
    history.record(optimizer)
    onebit.save(folder, model, optimizer)
    sent = own.wire_bytes
    train(model, optimizer, rank, 8, 12)

    again = net()
    ddp, plain = wrapped(again, "DDP"), build(kind, again.parameters(), freeze_step=3, process_group=group())
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


def with_buckets(rank, size, kind, buckets, overlap=False, accumulate=False, bad=None, view=False):
    """Parameters; buffers, and bytes sent; before which steps DDP's hook was called, and before which messages left in
    backward. buckets: whether they are used in every step."""
    model, ddp, optimizer = bucketed(kind, overlap, view)
    if buckets:
        optimizer.leave_out_buckets = lambda _: None
    hooked, early, begin, of_step = [], [], optimizer.begin_step, []
    optimizer.begin_step = lambda: (of_step.append(1), begin())
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
def test_results_and_buffers_are_those_with_buckets(kind, accumulate, overlap, view):
    """Bit for bit, the buffers of BatchNorm too, which are rank 0's before every forward pass. The hook is called where
    gradients are averaged, and before the first compressed step, which is known to be one only when it begins."""
    found = run_ranks(2, with_buckets, kind, False, overlap, accumulate, None, view)
    expected = run_ranks(2, with_buckets, kind, True, False, accumulate, None, view)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert all(expected[0][2])
    full = {4, 6} if kind == "ZeroOneAdam" else set()
    for *_, hooked, early in found:
        if overlap:
            assert any(early) and all(a != b for a, b in zip(hooked[4:], early[4:], strict=True))
        else:
            assert hooked == [step < 4 or step in full for step in range(STEPS)]


def stepping_within_no_sync(rank, size):
    """Whether DDP's switch stays where the user has put it, and the parameters at the end."""
    model, ddp, optimizer = bucketed("OneBitAdam", overlap=True)
    kept = []
    with ddp.no_sync():
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, rank, 2 * step).backward()
            kept.append(ddp.require_backward_grad_sync is False and not optimizer.overlap.in_flight)
            optimizer.step()
            kept.append(ddp.require_backward_grad_sync is False)
    return bits(model.parameters()), all(kept)


def test_a_step_within_no_sync_leaves_it_on_and_averages_itself():
    expected = run_ranks(2, with_buckets, "OneBitAdam", True)
    assert run_ranks(2, stepping_within_no_sync) == [(each[0], True) for each in expected]


def test_a_full_step_that_was_not_expected_is_averaged_by_the_step():
    """A step that is skipped moves the schedule by one: the gradients of a full step may not have been in a bucket."""
    algorithm = onebit.ZeroOneAdam([nn.Parameter(torch.ones(2))], var_update_scaler=2).setup.algorithm
    assert [algorithm.kind(step) for step in (4, 5, 6)] == ["1 bit", "full", "1 bit"]
    for bad in ((4, 1), (4, 0)):
        found = run_ranks(2, with_buckets, "ZeroOneAdam", False, False, False, bad)
        expected = run_ranks(2, with_buckets, "ZeroOneAdam", True, False, False, bad)
        assert found[0][0] == found[1][0]
        assert not found[0][2][5]
        assert [each[:2] for each in found] == [each[:2] for each in expected]

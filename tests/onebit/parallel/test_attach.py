"""`attach` and DDP: wrong arguments are refused, and a missing `attach` warns once."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import onebit
from tests.collectives.work import error_of
from tests.onebit.runs import OPTIMIZERS, build
from tests.ranks import group, run_ranks


def attach_error(kind, case):
    """The error of a wrong call of `attach`."""
    model, ours = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), {"process_group": group()}
    params, precision = list(model.parameters()), None
    if case == "mixed precision":
        precision = _MixedPrecision(param_dtype=torch.float16)
    ddp = DistributedDataParallel(model, process_group=group(), mixed_precision=precision)
    own = [*params, nn.Parameter(torch.ones(2))] if case == "a parameter of another model" else params
    if case == "another group":
        alone = [torch.distributed.get_rank()]
        ours = {"process_group": torch.distributed.new_group(alone, use_local_synchronization=True)}
    optimizer = torch.optim.AdamW(params) if case == "no onebit" else build(kind, own, **ours)
    if case == "another hook":
        ddp.register_comm_hook(None, allreduce_hook)
    if case == "another optimizer of the same parameters":
        onebit.attach(ddp, build(kind, params[2:], process_group=group()))
    if case == "twice":
        onebit.attach(ddp, optimizer)
    errors = []
    with error_of(errors):
        onebit.attach({"no DDP": model, "no model": params}.get(case, ddp), optimizer)
    return "".join(errors)


def attach_errors(rank, size, kind, cases):
    return [attach_error(kind, case) for case in cases]


ATTACH = {
    "no DDP": ("TypeError", ["DistributedDataParallel", "Sequential", "averages gradients itself"]),
    "no onebit": ("TypeError", ["an optimizer of onebit", "AdamW"]),
    "no model": ("TypeError", ["needs a model", "list"]),
    "a parameter of another model": ("ValueError", ["does not hold parameter 4 of group 0", "one of their own"]),
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


def first_warnings(rank, size, how):
    """What is warned of in five steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = build("OneBitAdam", model.parameters(), freeze_step=2, process_group=group())
    called = model if how == "no DDP" else DistributedDataParallel(model, process_group=group())
    if how == "attached":
        onebit.attach(called, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            optimizer.zero_grad()
            data = torch.Generator().manual_seed(step * size + rank)
            (called(torch.randn(8, 4, generator=data)).square().mean() * (how != "zeros" or step > 0)).backward()
            optimizer.step()
    return [str(w.message) for w in caught if w.category is UserWarning and "onebit" in str(w.message)]


def test_forgetting_attach_warns_once():
    (text,), nothing = run_ranks(2, first_warnings, "forgotten")
    says = ("DistributedDataParallel", "onebit.attach(model, optimizer)", "no time is gained")
    assert all(part in text for part in says)
    assert nothing == []
    for how in ("attached", "no DDP", "zeros"):  # gradients of its own on every rank, or none: no reason to warn
        assert run_ranks(2, first_warnings, how) == [[], []], how

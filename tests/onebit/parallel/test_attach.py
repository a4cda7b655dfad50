"""`attach` and DDP: wrong arguments are refused, and a missing `attach` warns once."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import onebit
from tests.onebit.runs import build, kinds, parameters
from tests.ranks import group, run_ranks


def attach_error(rank, size, kind, case):
    """The error of a wrong call of `attach`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    ddp = DistributedDataParallel(model, process_group=group())
    params = list(model.parameters())
    target, optimizer = ddp, None
    if case == "no DDP":
        target, optimizer = model, build(kind, params, process_group=group())
    elif case == "no onebit":
        optimizer = torch.optim.AdamW(params)
    elif case == "no model":
        target, optimizer = params, build(kind, params, process_group=group())
    elif case == "a parameter of another model":
        optimizer = build(kind, [*params, nn.Parameter(torch.ones(2))], process_group=group())
    elif case == "another hook":
        ddp.register_comm_hook(None, allreduce_hook)
        optimizer = build(kind, params, process_group=group())
    elif case == "mixed precision":
        ddp = DistributedDataParallel(
            model, process_group=group(), mixed_precision=_MixedPrecision(param_dtype=torch.float16)
        )
        target, optimizer = ddp, build(kind, params, process_group=group())
    elif case == "another optimizer of the same parameters":
        optimizer = build(kind, params, process_group=group())
        onebit.attach(ddp, build(kind, params[2:], process_group=group()))
    elif case == "another group":
        optimizer = build(
            kind, params, process_group=torch.distributed.new_group([rank], use_local_synchronization=True)
        )
    elif case == "twice":
        optimizer = build(kind, params, process_group=group())
        onebit.attach(ddp, optimizer)
    try:
        onebit.attach(target, optimizer)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


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


@pytest.mark.parametrize("case", ATTACH)
@kinds
def test_attach_says_what_is_wrong(kind, case):
    if case == "mixed precision" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("there DDP itself asks for a stream of a GPU")
    error, parts = ATTACH[case]
    for name, text in run_ranks(2, attach_error, kind, case):
        assert name == error, text
        assert all(part in text for part in parts), text


def ddp_run(rank, size, kind, attached):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    ddp = DistributedDataParallel(model, process_group=group())
    optimizer = build(kind, model.parameters(), freeze_step=2, process_group=group())
    if attached:
        onebit.attach(ddp, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            optimizer.zero_grad()
            data = torch.Generator().manual_seed(step * size + rank)
            ddp(torch.randn(8, 4, generator=data)).square().mean().backward()
            optimizer.step()
    return [str(w.message) for w in caught if w.category is UserWarning and "onebit" in str(w.message)]


@kinds
def test_forgetting_attach_warns_once(kind):
    (text,), nothing = run_ranks(2, ddp_run, kind, False)
    assert all(
        part in text for part in ("DistributedDataParallel", "onebit.attach(model, optimizer)", "nothing is saved")
    )
    assert nothing == []
    assert run_ranks(2, ddp_run, kind, True) == [[], []]


def warnings_without_ddp(rank, size, kind):
    """Without DDP, gradients of its own on every rank, or zeros: no reason to warn."""
    texts = []
    for zero in (False, True):
        params = parameters((4, 3))
        optimizer = build(kind, params, freeze_step=2, process_group=group())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params[0].grad = torch.zeros(4, 3) if zero else torch.ones(4, 3) + rank
            optimizer.step()
        texts += [str(w.message) for w in caught]
    return texts


@kinds
def test_no_warning_without_ddp(kind):
    assert run_ranks(2, warnings_without_ddp, kind) == [[], []]

"""What strangers did: each a clear error, or what it should have done."""

import gc
import math
import os
import threading
from typing import Any

import pytest
import torch

from onebit.kernels.cpu.compile import of_this_user
from tests.onebit.optim.contract import backward, started
from tests.onebit.runs import Case, arrays, bits, build, kinds, on_ranks, take

EARLY = Case(options={"freeze_step": 1, "overlap": True}, shapes=((70,), (33,)))


def test_a_loss_whose_weight_is_0_at_first():
    """0/1 Adam's variance comes with a later full step; nothing moves until then."""
    case = Case("ZeroOneAdam", options={"var_update_scaler": 4, "weight_decay": 0.0})
    params, optimizer = started(case, 0)
    before = bits(params)
    for step in range(1, 12):
        for p, g in zip(params, case.gradients(0, step), strict=True):
            p.grad = g * (step > 6)
        optimizer.step()
        assert step > 6 or (optimizer.compressing == (step > 5) and bits(params) == before)
    assert all((a != b).any() for a, b in zip(arrays(params), arrays(case.parameters()), strict=True))
    ends = build("ZeroOneAdam", var_update_scaler=2, var_freeze_step=2)
    with pytest.raises(ValueError, match="no variance to freeze"):
        for _ in range(4):
            for p in ends.param_groups[0]["params"]:
                p.grad = torch.zeros_like(p)
            ends.step()


TWO_NUMBERS, ON_META = torch.tensor([0.9, 0.9]), torch.empty((), device="meta")
WRITTEN: list[tuple[str, Any, str]] = [
    ("lr", math.inf, "lr=inf"),
    ("weight_decay", math.nan, "weight_decay=nan"),
    ("betas", (TWO_NUMBERS, 0.9), "betas.*each of one number"),
    ("betas", (ON_META, 0.9), "betas.*on meta.*would wait"),
]


@kinds
@pytest.mark.parametrize(("name", "value", "match"), WRITTEN)
def test_a_schedule_that_writes_what_no_step_can_take(kind, name, value, match):
    case = Case(kind)
    params, optimizer = started(case, 3)
    before = bits(params)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=match):
        take(case, 0, optimizer, params, 4)
    assert bits(params) == before


@on_ranks(2)
def test_a_gradient_that_was_expanded(rank):
    ends = set()
    for make in (lambda p: torch.ones(1).expand(p.shape), torch.ones_like):
        params, optimizer = started(Case(shapes=((7, 9), (33,)), options={"freeze_step": 2}), 0, rank, 2)
        for _ in range(4):
            for p in params:
                p.grad = make(p)
            optimizer.step()
        ends.add(bits(params))
    assert len(ends) == 1


def test_machine_code_of_another_user_is_not_run(tmp_path, monkeypatch):
    file = tmp_path / "loop.bin"
    file.write_bytes(b"code")
    for mode, another, right in ((0o600, 0, True), (0o622, 0, False), (0o600, 1, False)):
        file.chmod(mode)
        uid = os.getuid() + another
        monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
        assert of_this_user(file) == right


@on_ranks(2, once=True)
def test_an_optimizer_that_was_dropped_leaves_nothing_behind(rank):
    """Neither threads nor files. Some have messages on their way, on one rank alone or on both; the next one is right
    all the same."""
    ends, counts = set(), []
    for in_flight in ((0,), (0, 1), (), (), (), ()):
        params, optimizer = started(EARLY, 0, rank, 2)
        for step in range(5):
            backward(EARLY, rank, optimizer, params, step)
            optimizer.step()
        ends.add(bits(params))
        if rank in in_flight:
            backward(EARLY, rank, optimizer, params, 5)
        assert optimizer.overlap.on
        del optimizer, params
        gc.collect()
        torch.distributed.barrier()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert len(ends) == 1 and counts[-1] == counts[3], counts

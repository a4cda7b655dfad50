"""What a program around the optimizer may do: defaults of torch, groups made late, models of several dtypes, frozen
parameters, warnings that are errors, values written by hand."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from onebit.collectives.transport.protocol import LocalTransport
from onebit.kernels.cpu.compile import of_this_user
from tests import internals
from tests.internals import forget_process_group
from tests.onebit.optim.contract import backward, give, started
from tests.onebit.runs import Case, bits, build, kinds, on_ranks, on_warnings, run, same, snapshot, take
from tests.ranks import group


@pytest.mark.parametrize(
    ("kind", "scale"), [("OneBitAdam", "block"), ("OneBitLamb", "tensor"), ("ZeroOneAdam", "block")]
)
def test_a_default_dtype_changes_nothing(kind: str, scale: str) -> None:
    case = Case(kind, options={"freeze_step": 3, "scale": scale}, groups=({}, {"betas": (0.8, 0.99)}))
    found = []
    for default in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            params, optimizer = started(case, 7)
            optimizer.clip_grad_norm_(1.0)
            state = snapshot(optimizer.state_dict())
            optimizer.load_state_dict(state)
            run(case, 0, optimizer, params, 8, 10)
            optimizer.diagnostics()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append((bits(params), state))
    assert all(same(each, found[0]) for each in found)


@kinds
def test_inference_mode_changes_nothing(kind: str) -> None:
    """Around what builds, loads or steps, and steps that are outside."""
    case, ends = Case(kind, options={"freeze_step": 3}), []
    for within in (True, False):
        params = case.parameters()
        with torch.inference_mode(within):
            optimizer = case.build(params, LocalTransport())
        run(case, 0, optimizer, params, 1, 2)
        with torch.inference_mode(within):
            optimizer.load_state_dict(optimizer.state_dict())
        for step in range(3, 9):
            give(case, params, step, 0)
            with torch.inference_mode(within and step in (4, 7)):
                optimizer.step()
        ends.append(bits(params))
    assert ends[0] == ends[1]


@on_ranks(8)
def test_a_process_group_that_was_made_later_is_found(rank: int) -> bytes:
    case = Case(options={"freeze_step": 3})
    params, optimizer = case.made(LocalTransport())
    forget_process_group(optimizer)
    run(case, rank, optimizer, params, 1, 6)
    assert internals.topology(optimizer).replicas.size == 8
    return bits(params)


@on_ranks(8)
def test_a_process_group_that_was_made_in_stage_2_is_an_error(rank: int) -> None:
    case = Case(options={"freeze_step": 1})
    params, optimizer = case.made(LocalTransport())
    run(case, rank, optimizer, params, 1, 2)
    forget_process_group(optimizer)
    with pytest.raises(ValueError, match="a process group of 8 ranks was made when this optimizer was in stage 2"):
        run(case, rank, optimizer, params, 3, 3)


@on_ranks(2)
def test_warnings_that_are_errors_leave_no_rank_waiting(rank: int) -> None:
    """A freeze warning on rank 0, where warnings are errors; the other ranks go on to the next step's collectives."""
    case, texts = Case(options={"freeze_step": 2}, untouched=((0, 3, 50),)), []
    params, optimizer = started(case, 0, rank, 2)
    with on_warnings("error"):
        for step in range(1, 5):
            try:
                take(case, rank, optimizer, params, step)
            except UserWarning as warning:
                texts.append(str(warning))
    assert optimizer.steps == 4
    assert ["elements without a variance" in text for text in texts] == [True] * (rank == 0)


@pytest.mark.parametrize(
    ("kind", "freeze_step"), [("OneBitAdam", 50), ("OneBitAdam", 2), ("OneBitLamb", 2), ("ZeroOneAdam", 2)]
)
def test_values_written_to_a_16_bit_parameter_are_kept(kind: str, freeze_step: int) -> None:
    case = Case(kind, dtype="bfloat16", options={"freeze_step": freeze_step})
    params, optimizer = started(case, 4)
    others = [optimizer.state[p]["master"].clone() for p in params[1:]]
    with torch.no_grad():
        params[0].fill_(5.0)
    take(case, 0, optimizer, params, 5)
    assert float((params[0].detach() - 5).abs().max()) < 0.5
    for p, before in zip(params[1:], others, strict=True):
        master = optimizer.state[p]["master"]
        assert float((master - before).abs().max()) < 0.5
        assert not same(master, master.bfloat16().float())


def test_elements_that_nobody_wrote_to_keep_their_master_copy() -> None:
    """Steps far below what 16 bits tell apart, and after each a mask or a clamp, as some models need it."""
    for write in (lambda p: p[:8].zero_(), lambda p: p.clamp_(-2, 2)):
        p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = build("OneBitAdam", [p], lr=1e-4)
        for _ in range(200):
            p.grad = torch.ones_like(p)
            optimizer.step()
            with torch.no_grad():
                write(p)
        assert (p[8:] < 0.985).all()


def test_a_16_bit_parameter_that_lies_elsewhere_is_read_again() -> None:
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = build("OneBitAdam", [p], lr=1e-4)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
        torch.nn.utils.vector_to_parameters(torch.full((64,), 3.0, dtype=torch.bfloat16), [p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p > 2.9).all()


@kinds
@pytest.mark.parametrize("what", ["a group is added", "it is saved", "it was loaded", "its state is put in place"])
def test_what_is_written_between_two_steps_is_kept_whatever_comes_between(kind: str, what: str) -> None:
    """Weights are clipped after each step, as a critic's."""
    ends = []
    for between in (False, True):
        p, later = (nn.Parameter(torch.full((n,), 2.0, dtype=torch.bfloat16)) for n in (64, 33))
        optimizer = build(kind, [p])
        p.grad = torch.ones_like(p)
        optimizer.step()
        if what == "it was loaded" and between:
            optimizer.load_state_dict(snapshot(optimizer.state_dict()))
        with torch.no_grad():
            p[:32].clamp_(-0.5, 0.5)
        if what == "a group is added" and between:
            optimizer.add_param_group({"params": [later]})
        elif what == "it is saved" and between:
            state, p = snapshot(optimizer.state_dict()), nn.Parameter(p.detach().clone())
            optimizer = build(kind, [p])
            optimizer.load_state_dict(state)
        elif what == "its state is put in place" and between:
            optimizer.state[p] = {**optimizer.state[p], "exp_avg": optimizer.state[p]["exp_avg"].clone()}
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert (p[:32] < 0.6).all() and (p[32:] > 1.8).all()
        ends.append((bits([p]), optimizer.state[p]["master"].clone()))
    assert same(*ends)


@kinds
@on_ranks(2)
def test_a_model_of_two_dtypes_is_two_models(rank: int, kind: str) -> bytes:
    """They train in one optimizer, and in one for each."""
    cases = [Case(kind, ((40, 3), (5,)), dtype=d, options={"freeze_step": 4}) for d in ("float32", "bfloat16")]
    ends = []
    for together in (True, False):
        wide, half = params = [case.parameters() for case in cases]
        if together:
            both = [{"params": [wide[0], half[0]]}, {"params": [half[1], wide[1]]}]
            options = {"lr": 1e-2, "block_size": 64, "freeze_step": 4, "reply": 1, "variance_floor": 0.0}
            options |= {"update_limit": None}  # as Case has it
            optimizers = [build(kind, both, process_group=group(), **options)]
        else:
            optimizers = [case.build(own, group()) for case, own in zip(cases, params, strict=True)]
        for step in range(1, 13):
            for case, own in zip(cases, params, strict=True):
                give(case, own, step, rank)
            for optimizer in optimizers:
                optimizer.step()
        ends.append(bits([*wide, *half]))
    assert ends[0] == ends[1]
    return ends[0]


# Strangers did these: each is a clear error, or has the effect that it should have


def test_a_loss_whose_weight_is_0_up_to_the_freeze():
    """0/1 Adam's variance may come with a later full step: see test_zero_one.py."""
    ends = build("ZeroOneAdam", var_update_scaler=2, var_freeze_step=2)
    with pytest.raises(ValueError, match=r"no variance to freeze.*gradients so far were 0.*var_freeze_step"):
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


EARLY = Case(options={"freeze_step": 1, "overlap": True}, shapes=((70,), (33,)))


@on_ranks(2, once=True)
def test_an_optimizer_that_was_dropped_leaves_nothing_behind(rank):
    """No threads and no files are left, but for a moment. Some have messages on their way, on one rank alone or on
    both; the next one is right all the same."""
    ends, counts = set(), []

    def count():
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), threading.active_count()))

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
        count()
    for _ in range(100):  # a thread that has ended may still be listed
        if any(now > early for now, early in zip(counts[-1], counts[3], strict=True)):
            time.sleep(0.05)
            count()
    assert len(ends) == 1
    assert all(now <= early for now, early in zip(counts[-1], counts[3], strict=True)), counts

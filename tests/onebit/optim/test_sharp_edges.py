"""What strangers did: each a clear error, or what it should have done."""

import gc
import os
import threading

import pytest
import torch

from onebit.collectives import CompressedAllReduce
from onebit.kernels.cpu.compile import of_this_user
from tests.onebit.runs import Case, arrays, bits, build, kinds, run, take
from tests.ranks import group, run_ranks, run_ranks_once


def test_a_loss_whose_weight_is_0_at_first():
    """0/1 Adam's variance comes with a later full step; nothing moves until then."""
    case = Case("ZeroOneAdam", options={"var_update_scaler": 4, "weight_decay": 0.0})
    params = case.parameters()
    optimizer = case.build(params)
    before = arrays(params)
    for step in range(1, 12):
        for p, g in zip(params, case.gradients(0, step), strict=True):
            p.grad = g * (step > 6)
        optimizer.step()
        if step <= 6:
            assert optimizer.compressing == (step > 5) and all(map(lambda a, b: (a == b).all(), arrays(params), before))
    assert all((a != b).any() for a, b in zip(arrays(params), before, strict=True))
    ends = build("ZeroOneAdam", var_update_scaler=2, var_freeze_step=2)
    with pytest.raises(ValueError, match="no variance to freeze"):
        for _ in range(4):
            for p in ends.param_groups[0]["params"]:
                p.grad = torch.zeros_like(p)
            ends.step()


@kinds
@pytest.mark.parametrize(("name", "value"), [("lr", float("inf")), ("weight_decay", float("nan"))])
def test_a_schedule_that_makes_a_number_infinite(kind, name, value):
    case = Case(kind)
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 3)
    before = arrays(params)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name}={value}"):
        take(case, 0, optimizer, params, 4)
    assert all((a == b).all() for a, b in zip(arrays(params), before, strict=True))


def expanded(rank, size):
    ends = []
    for make in (lambda p: torch.ones(1).expand(p.shape), torch.ones_like):
        case = Case(shapes=((7, 9), (33,)), options={"freeze_step": 2})
        params = case.parameters()
        optimizer = case.build(params, group())
        for _ in range(4):
            for p in params:
                p.grad = make(p)
            optimizer.step()
        ends.append([a.tolist() for a in arrays(params)])
    return ends[0] == ends[1]


def test_a_gradient_that_was_expanded():
    assert all(run_ranks(2, expanded))


def test_states_of_an_all_reduce_and_one_that_is_built_under_inference_mode():
    with torch.inference_mode():
        average = CompressedAllReduce(40, chunks=1)
    x = torch.linspace(-1, 1, 40)
    average(x)
    state = average.state_dict()
    damaged = {name: v * torch.nan if isinstance(v, torch.Tensor) else v for name, v in state.items()}
    with pytest.raises(ValueError, match="not finite"):
        CompressedAllReduce(40, chunks=1).load_state_dict(damaged)
    with pytest.raises(TypeError, match="NoneType"):
        average.load_state_dict(None)


def test_machine_code_of_another_user_is_not_run(tmp_path, monkeypatch):
    file = tmp_path / "loop.bin"
    file.write_bytes(b"code")
    file.chmod(0o600)
    assert of_this_user(file)
    file.chmod(0o622)
    assert not of_this_user(file)
    file.chmod(0o600)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert not of_this_user(file)


def dropped(rank, size):
    case, counts = Case(options={"freeze_step": 1, "overlap": True}, shapes=((70,), (33,))), []
    for _ in range(6):
        params = case.parameters()
        optimizer = case.build(params)
        for step in range(3):
            sum((p * g).sum() for p, g in zip(params, case.gradients(rank, step), strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.overlap.on
        del optimizer, params
        gc.collect()
        torch.distributed.barrier()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), threading.active_count()))
    return counts


def test_overlap_leaves_nothing_behind():
    for counts in run_ranks_once(2, dropped):
        assert counts[-1] == counts[2], counts


def dropped_in_flight(rank, size):
    """The first with messages on their way, on one rank alone or on both; the next one is right all the same."""
    ends = []
    for in_flight in (None, (0,), (0, 1)):
        case = Case(options={"freeze_step": 1, "overlap": True}, shapes=((70,), (33,)))
        for last in (in_flight, None):
            params = case.parameters()
            optimizer = case.build(params)
            for step in range(5):
                if last is not None and step == 4 and rank not in last:
                    break
                sum((p * g).sum() for p, g in zip(params, case.gradients(rank, step), strict=True)).backward()
                if last is not None and step == 4:
                    break
                optimizer.step()
                optimizer.zero_grad()
            if last is None:
                ends.append(bits(params))
            del optimizer, params
            gc.collect()
    return ends


def test_messages_of_one_that_was_dropped_are_not_the_next_ones():
    for ends in run_ranks_once(2, dropped_in_flight):
        assert len(set(ends)) == 1

"""A call that every rank makes and one leaves out: an error that names the cause, and never an abort."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.ranks import run_ranks_once

TIMEOUT = 3.0


def built(freeze_step):
    torch.manual_seed(0)
    net = nn.Linear(300, 40)
    ddp = DistributedDataParallel(net)
    optimizer = onebit.OneBitAdam(ddp.parameters(), freeze_step=freeze_step)
    onebit.attach(ddp, optimizer)
    return ddp, optimizer


def saved_by_rank_0(rank, size, folder):
    ddp, optimizer = built(4)
    try:
        for step in range(12):
            ddp(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            if step == 6 and rank == 0:
                onebit.save(folder, ddp, optimizer)
    except RuntimeError as error:
        return str(error)
    return None


def test_saving_on_rank_0_alone(tmp_path):
    first, second = run_ranks_once(2, saved_by_rank_0, (str(tmp_path),), group_timeout=TIMEOUT)
    assert "which every rank does and not rank 0 alone" in first
    assert "a call that every rank makes, such as onebit.save" in second


def stepping_less(rank, size, left_out, freeze_step):
    """Rank 1 leaves out a step, or the whole iteration, and so has fewer."""
    ddp, optimizer = built(freeze_step)
    try:
        for step in range(9):
            if (left_out, step, rank) == ("iteration", 3, 1):
                continue
            ddp(torch.randn(4, 300)).square().mean().backward()
            if (left_out, step, rank) != ("step", 3, 1):
                optimizer.step()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(("left_out", "freeze_step"), [("step", 6), ("iteration", 6), ("iteration", 50)])
def test_fewer_steps_on_one_rank(left_out, freeze_step):
    """DDP's all-reduce is the one that does not end in stage 1."""
    first, second = run_ranks_once(2, stepping_less, (left_out, freeze_step), group_timeout=TIMEOUT)
    assert "did it get fewer batches" in first[1]
    assert (second is None) == (left_out == "iteration")

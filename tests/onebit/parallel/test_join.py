"""DDP's `join`, for ranks with unequal numbers of batches: refused on all ranks before any collective."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.collectives.work import error_of
from tests.onebit.runs import build
from tests.ranks import group, run_ranks


def uneven(rank, size, kind, freeze_step, how):
    """Three even steps, then rank 1 has one batch less than rank 0. The error of each rank, and the steps taken."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 3), process_group=group())
    optimizer = build(kind, ddp.parameters(), freeze_step=freeze_step, process_group=group())
    onebit.attach(ddp, optimizer)

    def train(batches):
        for _ in range(batches):
            optimizer.zero_grad()
            ddp(torch.ones(2, 4) * (rank + 1)).square().mean().backward()
            optimizer.step()

    train(3)
    joined = {
        "model.join": ddp.join,
        "Join": lambda: Join([ddp]),
        "disabled": lambda: ddp.join(enable=False),
        "throwing": lambda: ddp.join(throw_on_early_termination=True),
    }[how]
    errors = []
    with error_of(errors), joined():
        train(3 if how == "disabled" else 3 - rank)
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
    for text, steps in run_ranks(2, uneven, kind, freeze_step, how):
        assert text.startswith("ValueError: ") and steps == 3
        assert all(part in text for part in ("join()", "drop_last=True", "throw_on_early_termination=True"))


@pytest.mark.parametrize("freeze_step", [50, 2], ids=["stage 1", "stage 2"])
def test_join_that_repeats_nothing_works(freeze_step):
    """What is switched off, or ends all ranks with the first that runs out."""
    assert run_ranks(2, uneven, "OneBitAdam", freeze_step, "disabled") == [("", 6)] * 2
    (one, steps), (other, also) = run_ranks(2, uneven, "OneBitAdam", freeze_step, "throwing")
    assert "Throwing across all ranks" in one and "Rank 1 exhausted" in other and steps == also == 5

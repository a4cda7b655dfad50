"""A loop with Accelerate: what save_state wrote in stage 2 goes on by load_state."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.onebit.integrations.loops import (
    INTERRUPTED,
    LAST,
    SAVED,
    Tiny,
    as_under_torchrun,
    batch_of,
    in_two_processes,
    needs,
    optimizer_of,
)
from tests.onebit.runs import bits


class Loop:
    """A run by hand, as Accelerate's users write it."""

    def __init__(self, rank: int) -> None:
        from accelerate import Accelerator

        from onebit.integrations.accelerate import attach

        self.attach = attach
        self.rank, self.accelerator, self.steps = rank, Accelerator(cpu=True), 0
        model = Tiny()
        optimizer = optimizer_of(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * LAST)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        attach(self.accelerator, self.model, self.optimizer)

    def on(self, last: int) -> None:
        while self.steps < last:
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(**batch_of(self.steps, self.rank))["loss"])
            self.optimizer.step()
            self.schedule.step()
            self.steps += 1

    def load(self, folder: str) -> Loop:
        self.accelerator.load_state(folder)
        self.steps = SAVED
        return self

    @property
    def bits(self) -> bytes:
        return bits(self.model.parameters())


def first(rank: int, size: int, folder: str) -> bytes:
    as_under_torchrun(rank, size)
    undisturbed = Loop(rank)
    undisturbed.on(SAVED)
    assert undisturbed.optimizer.optimizer.compressing
    undisturbed.accelerator.save_state(folder)
    undisturbed.on(LAST)
    return undisturbed.bits


def second(rank: int, size: int, folder: str) -> tuple[bytes, bytes, bytes, list[str]]:
    """New processes go on; go back to the checkpoint from where they are; and go on from what Accelerate alone would
    have written."""
    as_under_torchrun(rank, size)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the state does not hold the residuals")
        resumed = Loop(rank).load(folder)
        resumed.on(LAST)
        again = Loop(rank)
        again.on(INTERRUPTED)
        again.load(folder).on(LAST)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(f"{folder}/onebit")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without = Loop(rank).load(folder)
    without.on(LAST)
    with pytest.raises(TypeError, match="prepare both first"):
        again.attach(again.accelerator, again.model, again.optimizer.optimizer)
    return resumed.bits, again.bits, without.bits, [str(each.message) for each in caught]


@needs("accelerate")
@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_from_a_saved_state(tmp_path: Path) -> None:
    undisturbed = in_two_processes(first, str(tmp_path))
    resumed, again, without, warned = zip(*in_two_processes(second, str(tmp_path)), strict=True)
    assert len({*undisturbed, *resumed, *again}) == 1
    assert undisturbed[0] not in without
    assert any("residuals" in text for text in warned[1])

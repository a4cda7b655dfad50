"""A loop with Accelerate: what save_state wrote in stage 2 goes on by load_state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import onebit
from tests.onebit.integrations import loops
from tests.onebit.runs import bits


class Loop:
    """A run by hand, as Accelerate's users write it."""

    def __init__(self, rank: int) -> None:
        from accelerate import Accelerator

        from onebit.integrations.accelerate import attach

        self.attach = attach
        self.rank, self.accelerator, self.steps = rank, Accelerator(cpu=True), 0
        model = loops.Tiny()
        optimizer = loops.optimizer_of(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * loops.LAST)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        attach(self.accelerator, self.model, self.optimizer)

    def on(self, last: int) -> None:
        while self.steps < last:
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(**loops.batch_of(self.steps, self.rank))["loss"])
            self.optimizer.step()
            self.schedule.step()
            self.steps += 1

    def load(self, folder: str) -> Loop:
        self.accelerator.load_state(folder)
        self.steps = loops.SAVED
        return self

    def end(self) -> bytes:
        self.on(loops.LAST)
        return bits(self.model.parameters())


def runs(rank: int, size: int, folder: str) -> loops.Ends:
    """A run is saved; others go on from there, go back to it, and go on from what Accelerate alone would write."""
    loops.as_under_torchrun(rank, size)
    undisturbed = Loop(rank)
    undisturbed.on(loops.SAVED)
    assert undisturbed.optimizer.optimizer.compressing
    undisturbed.accelerator.save_state(folder)
    with loops.no_residuals_missed():
        resumed, again = Loop(rank).load(folder), Loop(rank)
        again.on(loops.INTERRUPTED)
        ends = [resumed.end(), again.load(folder).end()]
    model, optimizer, history = again.model, again.optimizer, onebit.History()
    history.record(optimizer)
    assert history.steps == [loops.LAST]
    onebit.save(f"{folder}/own", model, optimizer)  # what `prepare` returns is known here too
    onebit.load(f"{folder}/own", model, optimizer)
    assert again.end() == ends[-1]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(f"{folder}/onebit")
    dist.barrier()
    with loops.warned() as texts:
        without = Loop(rank).load(folder)
    with pytest.raises(TypeError, match="prepare both first"):
        again.attach(again.accelerator, model, optimizer.optimizer)
    return loops.Ends(undisturbed.end(), ends, without.end(), texts)


@loops.needs("accelerate")
def test_a_run_goes_on_bit_for_bit_from_a_saved_state(tmp_path: Path) -> None:
    loops.check(runs, tmp_path)

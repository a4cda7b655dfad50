"""The Trainer of Lightning: a run that ended in stage 2 goes on from its own checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.collectives.work import logged
from tests.onebit.integrations import loops
from tests.onebit.runs import bits


def trained(folder: str, *callbacks: Any, resume: str | None = None) -> tuple[Any, Any]:
    """The model and its Trainer at the end."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from onebit.integrations.lightning import OneBitCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = loops.Tiny()

        def training_step(self, batch: Any, index: int) -> Any:
            """Lightning resumes within an epoch and begins the data anew: here a step says which are its own."""
            return self.model(**loops.batch_of(self.global_step, self.global_rank))["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = loops.optimizer_of(self.model)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=loops.LAST)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Module()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=loops.SAVED, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=loops.LAST, plugins=[TorchElasticEnvironment()],
        logger=False, callbacks=[saver, OneBitCallback(), *callbacks], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(range(2 * loops.LAST)), ckpt_path=resume)
    return module, trainer


def interrupt(folder: str) -> None:
    from lightning.pytorch import Callback

    class Interruption(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == loops.INTERRUPTED:
                raise loops.Interrupted

    with pytest.raises(loops.Interrupted):
        trained(folder, Interruption())


def trainers(rank: int, size: int, folder: str) -> loops.Ends:
    """A run, and one that is interrupted and goes on; and once more, from a checkpoint as Lightning alone would write
    it."""
    loops.as_under_torchrun(rank, size)
    with logged() as said:
        undisturbed, trainer = trained(f"{folder}/undisturbed")
    assert trainer.optimizers[0].compressing
    interrupt(f"{folder}/interrupted")
    saved, alone = f"{folder}/interrupted/step={loops.SAVED}.ckpt", f"{folder}/alone.ckpt"
    with loops.no_residuals_missed():
        resumed, _ = trained(f"{folder}/resumed", resume=saved)
    if rank == 0:
        content = torch.load(saved, weights_only=True)
        for of_parameter in content["optimizer_states"][0]["state"].values():
            for name in [name for name in of_parameter if name.endswith("residual_of_rank_1")]:
                del of_parameter[name]
        torch.save(content, alone)
    dist.barrier()
    with loops.warned() as texts:
        without, _ = trained(f"{folder}/without", resume=alone)
    ends = [bits(module.parameters()) for module in (undisturbed, resumed, without)]
    return loops.Ends(ends[0], [ends[1]], ends[2], texts, said)


@loops.needs("lightning")
def test_a_run_goes_on_bit_for_bit_from_lightnings_checkpoint(tmp_path: Path) -> None:
    loops.check(trainers, tmp_path)

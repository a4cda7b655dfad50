"""The Trainer of Lightning: a run that ended in stage 2 goes on from its own checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.onebit.integrations.loops import (
    INTERRUPTED,
    LAST,
    SAVED,
    Interrupted,
    Tiny,
    as_under_torchrun,
    batch_of,
    in_two_processes,
    logged,
    needs,
    optimizer_of,
)
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
            self.model = Tiny()

        def training_step(self, batch: Any, index: int) -> Any:
            """Lightning resumes within an epoch and begins the data anew: here a step says which are its own."""
            return self.model(**batch_of(self.global_step, self.global_rank))["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.model)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=LAST)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Module()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=LAST, plugins=[TorchElasticEnvironment()], logger=False,
        callbacks=[saver, OneBitCallback(), *callbacks], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(range(2 * LAST)), ckpt_path=resume)
    return module, trainer


def interrupt(folder: str) -> None:
    from lightning.pytorch import Callback

    class Interruption(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == INTERRUPTED:
                raise Interrupted

    with pytest.raises(Interrupted):
        trained(folder, Interruption())


def first(rank: int, size: int, folder: str) -> tuple[bytes, list[str]]:
    as_under_torchrun(rank, size)
    said = logged()
    module, trainer = trained(f"{folder}/undisturbed")
    assert trainer.optimizers[0].compressing
    interrupt(f"{folder}/interrupted")
    return bits(module.parameters()), said


def second(rank: int, size: int, folder: str) -> tuple[bytes, bytes, list[str]]:
    """New processes go on; and once more, from a checkpoint as Lightning alone would write it."""
    as_under_torchrun(rank, size)
    saved, alone = f"{folder}/interrupted/step={SAVED}.ckpt", f"{folder}/alone.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the state does not hold the residuals")
        resumed, _ = trained(f"{folder}/resumed", resume=saved)
    if rank == 0:
        content = torch.load(saved, weights_only=True)
        for of_parameter in content["optimizer_states"][0]["state"].values():
            for name in [name for name in of_parameter if name.endswith("residual_of_rank_1")]:
                del of_parameter[name]
        torch.save(content, alone)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without, _ = trained(f"{folder}/without", resume=alone)
    return bits(resumed.parameters()), bits(without.parameters()), [str(each.message) for each in caught]


@needs("lightning")
@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_from_lightnings_checkpoint(tmp_path: Path) -> None:
    undisturbed, said = zip(*in_two_processes(first, str(tmp_path)), strict=True)
    assert [any("1 bit  " in text for text in of_rank) for of_rank in said] == [True, False]  # the report
    resumed, without, warned = zip(*in_two_processes(second, str(tmp_path)), strict=True)
    assert len({*undisturbed, *resumed}) == 1
    assert undisturbed[0] not in without
    assert any("residuals" in text for text in warned[1])

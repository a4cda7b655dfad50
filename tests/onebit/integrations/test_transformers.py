"""The Trainer of HuggingFace: a run that ended in stage 2 goes on from its own checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.collectives.work import logged
from tests.onebit.integrations import loops
from tests.onebit.runs import bits


def trainer_of(folder: str) -> Any:
    from torch.optim.lr_scheduler import LinearLR
    from transformers import TrainingArguments

    from onebit.integrations.transformers import OneBitTrainer

    model = loops.Tiny()
    optimizer = loops.optimizer_of(model)
    arguments = TrainingArguments(
        folder, max_steps=loops.LAST, per_device_train_batch_size=loops.BATCH, save_steps=loops.SAVED, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no", ddp_find_unused_parameters=False,
    )  # fmt: skip
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=loops.LAST)
    return OneBitTrainer(model, arguments, train_dataset=loops.Waves(), optimizers=(optimizer, schedule))


def interrupt(trainer: Any) -> None:
    from transformers import TrainerCallback

    class Interruption(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == loops.INTERRUPTED:
                raise loops.Interrupted

    trainer.add_callback(Interruption())
    with pytest.raises(loops.Interrupted):
        trainer.train()


def trainers(rank: int, size: int, folder: str) -> loops.Ends:
    """An undisturbed run and, in another folder, one that is interrupted and goes on; and once more, from a checkpoint
    as the Trainer alone would write it."""
    loops.as_under_torchrun(rank, size)
    undisturbed = trainer_of(f"{folder}/undisturbed")
    with logged() as said:
        undisturbed.train()
    assert undisturbed.optimizer.optimizer.compressing
    interrupt(trainer_of(f"{folder}/interrupted"))
    with loops.no_residuals_missed():
        resumed = trainer_of(f"{folder}/interrupted")
        resumed.train(resume_from_checkpoint=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(f"{folder}/interrupted/checkpoint-{loops.SAVED}/onebit")
    dist.barrier()
    without = trainer_of(f"{folder}/without")
    with loops.warned() as texts:
        without.train(resume_from_checkpoint=f"{folder}/interrupted/checkpoint-{loops.SAVED}")
    ends = [bits(trainer.model.parameters()) for trainer in (undisturbed, resumed, without)]
    return loops.Ends(ends[0], [ends[1]], ends[2], texts, said)


@loops.needs("transformers", "accelerate")
def test_a_run_goes_on_bit_for_bit_from_the_trainers_checkpoint(tmp_path: Path) -> None:
    loops.check(trainers, tmp_path)

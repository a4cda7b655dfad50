"""The Trainer of HuggingFace: a run that ended in stage 2 goes on from its own checkpoint."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.onebit.integrations.loops import (
    BATCH,
    INTERRUPTED,
    LAST,
    SAVED,
    Interrupted,
    Tiny,
    Waves,
    as_under_torchrun,
    in_two_processes,
    logged,
    needs,
    optimizer_of,
)
from tests.onebit.runs import bits


def trainer_of(folder: str) -> Any:
    from torch.optim.lr_scheduler import LinearLR
    from transformers import TrainingArguments

    from onebit.integrations.transformers import OneBitTrainer

    model = Tiny()
    optimizer = optimizer_of(model)
    arguments = TrainingArguments(
        folder, max_steps=LAST, per_device_train_batch_size=BATCH, save_steps=SAVED, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no", ddp_find_unused_parameters=False,
    )  # fmt: skip
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=LAST)
    return OneBitTrainer(model, arguments, train_dataset=Waves(), optimizers=(optimizer, schedule))


def interrupt(trainer: Any) -> None:
    from transformers import TrainerCallback

    class Interruption(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == INTERRUPTED:
                raise Interrupted

    trainer.add_callback(Interruption())
    with pytest.raises(Interrupted):
        trainer.train()


def first(rank: int, size: int, folder: str) -> tuple[bytes, list[str]]:
    """An undisturbed run and, in another folder, one that is interrupted."""
    as_under_torchrun(rank, size)
    said = logged()
    undisturbed = trainer_of(f"{folder}/undisturbed")
    undisturbed.train()
    assert undisturbed.optimizer.optimizer.compressing
    interrupt(trainer_of(f"{folder}/interrupted"))
    return bits(undisturbed.model.parameters()), said


def second(rank: int, size: int, folder: str) -> tuple[bytes, bytes, list[str]]:
    """New processes go on; and once more, from a checkpoint as the Trainer alone would write it."""
    as_under_torchrun(rank, size)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the state does not hold the residuals")
        resumed = trainer_of(f"{folder}/interrupted")
        resumed.train(resume_from_checkpoint=True)
    if rank == 0:
        shutil.rmtree(f"{folder}/interrupted/checkpoint-{SAVED}/onebit")
    dist.barrier()
    without = trainer_of(f"{folder}/without")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without.train(resume_from_checkpoint=f"{folder}/interrupted/checkpoint-{SAVED}")
    texts = [str(each.message) for each in caught]
    return bits(resumed.model.parameters()), bits(without.model.parameters()), texts


@needs("transformers", "accelerate")
@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_from_the_trainers_checkpoint(tmp_path: Path) -> None:
    undisturbed, said = zip(*in_two_processes(first, str(tmp_path)), strict=True)
    assert [any("1 bit  " in text for text in of_rank) for of_rank in said] == [True, False]  # the report
    resumed, without, warned = zip(*in_two_processes(second, str(tmp_path)), strict=True)
    assert len({*undisturbed, *resumed}) == 1
    assert undisturbed[0] not in without
    assert any("residuals" in text for text in warned[1])

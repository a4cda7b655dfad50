"""The loops of Accelerate, Lightning and HuggingFace, in two processes: a run goes on from the loop's own checkpoint.

steps 1 .. 4      stage 1; of 0/1 Adam steps 1 .. 3
steps 5 .. 10     stage 2; a checkpoint after step 6, the interruption after step 7

Step 6 of 0/1 Adam is a local one, and so are the last three.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

import onebit
from onebit.integrations.attaching import warn_of_total
from tests.collectives.work import logged
from tests.onebit.runs import bits, build, on_ranks, on_warnings

FREEZE, SAVED, INTERRUPTED, LAST = 4, 6, 7, 10
BATCH = 4
ADAM, ZERO_ONE = "OneBitAdam", "ZeroOneAdam"
STAGES = {
    ADAM: {"freeze_step": FREEZE},
    ZERO_ONE: {"var_update_scaler": 3, "var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4},
}


class Interrupted(Exception):
    """What ends a run."""


class Tiny(nn.Module):
    """Its output is its loss, as the Trainer of HuggingFace wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 17))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - y).square().mean()}


class Waves(Dataset):  # type: ignore[type-arg]
    """Enough for all steps of two ranks, in one epoch."""

    def __len__(self) -> int:
        return 2 * BATCH * (LAST + 2)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": torch.sin(x.sum()).expand(17)}


def batch_of(step: int, rank: int) -> dict[str, Tensor]:
    """What a rank of two takes in a step; they count from 0."""
    first = (2 * step + rank) * BATCH
    batch = [Waves()[i] for i in range(first, first + BATCH)]
    return {name: torch.stack([each[name] for each in batch]) for name in batch[0]}


def optimizer_and_schedule(kind: str, model: nn.Module, steps: int = LAST) -> tuple[Any, LinearLR]:
    options = {"lr": 1e-2, "block_size": 64, "chunks": 1, "reply": 1, **STAGES[kind]}
    optimizer = getattr(onebit, kind)(model.parameters(), **options)
    return optimizer, LinearLR(optimizer, 1.0, 0.1, total_iters=steps)


def ended(optimizer: Any, model: nn.Module) -> bytes:
    """Bits of the parameters at the end, the same on all ranks."""
    optimizer.synchronize()
    return bits(model.parameters())


MISSED = {"action": "error", "message": "state_dict: what compression has left out"}


def checked(undisturbed: bytes, resumed: bytes, saved: Any, said: list[str] | None = None) -> bytes:
    """Ends of runs, one from a checkpoint of stage 2, which has what compression had left out; and what was logged,
    where loops report."""
    assert resumed == undisturbed
    assert all(own["residual"].any() for own in saved["state"].values())
    if said is not None:
        assert any("1 bit  " in text for text in said) == (dist.get_rank() == 0)  # the report
    return undisturbed


class ByHand:
    """A run as Accelerate's users write it."""

    def __init__(self, rank: int, kind: str) -> None:
        from accelerate import Accelerator

        from onebit.integrations.accelerate import attach

        self.rank, self.accelerator, self.steps, self.attach = rank, Accelerator(cpu=True), 0, attach
        model = Tiny()
        prepared = self.accelerator.prepare(model, *optimizer_and_schedule(kind, model, 2 * LAST))
        self.model, self.optimizer, self.schedule = prepared
        attach(self.accelerator, self.model, self.optimizer)

    def on(self, last: int) -> None:
        while self.steps < last:
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(**batch_of(self.steps, self.rank))["loss"])
            self.optimizer.step()
            self.schedule.step()
            self.steps += 1

    def load(self, folder: str) -> ByHand:
        self.accelerator.load_state(folder)
        self.steps = SAVED
        return self

    def end(self) -> bytes:
        self.on(LAST)
        return ended(self.optimizer.optimizer, self.model)


def accelerate(kind: str, folder: str) -> bytes:
    """A run is saved; others go on from there, and go back to it."""
    rank = dist.get_rank()
    undisturbed = ByHand(rank, kind)
    undisturbed.on(SAVED)
    assert undisturbed.optimizer.optimizer.compressing
    undisturbed.accelerator.save_state(folder)
    resumed, again = ByHand(rank, kind).load(folder), ByHand(rank, kind)
    again.on(INTERRUPTED)
    end = again.load(folder).end()
    assert resumed.end() == end
    model, optimizer = again.model, again.optimizer
    assert optimizer.optimizer.steps == LAST
    onebit.save(f"{folder}/own", model, optimizer)  # what `prepare` returns is known here too
    onebit.load(f"{folder}/own", model, optimizer)
    assert again.end() == end
    with pytest.raises(TypeError, match="prepare both first"):
        again.attach(again.accelerator, model, optimizer.optimizer)
    return checked(undisturbed.end(), end, torch.load(f"{folder}/optimizer.bin", weights_only=True))


def by_lightning(kind: str, folder: str, resume: str | None = None, stops: bool = False) -> tuple[Any, Any]:
    """The model and its Trainer at the end; one that stops has neither."""
    from lightning.pytorch import Callback, LightningModule, Trainer
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
            optimizer, schedule = optimizer_and_schedule(kind, self.model)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Interruption(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if stops and trainer.global_step == INTERRUPTED:
                raise Interrupted

    module = Module()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=LAST, plugins=[TorchElasticEnvironment()],
        logger=False, callbacks=[saver, OneBitCallback(), Interruption()], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(range(2 * LAST)), ckpt_path=resume)
    return module, trainer


def warns_of_clipping() -> list[bool]:
    """Return whether Lightning's own clipping warns, and a module's that clips with the optimizer's own method."""
    from lightning.pytorch import LightningModule, Trainer

    from onebit.integrations import lightning

    class Clipping(LightningModule):
        def configure_gradient_clipping(self, *given: Any, **named: Any) -> None:
            pass

    trainer, found = Trainer(accelerator="cpu", gradient_clip_val=1.0, max_steps=LAST, logger=False, barebones=True), []
    trainer.strategy.optimizers = [build("ZeroOneAdam")]
    for module in (LightningModule(), Clipping()):
        with on_warnings() as texts, mock.patch.object(lightning, "attach_if_distributed"):
            lightning.OneBitCallback().on_fit_start(trainer, module)
        found.append(any("that rank's norm" in text for text in texts))
    return found


def lightning(kind: str, folder: str) -> bytes:
    with logged() as said:
        undisturbed = by_lightning(kind, f"{folder}/undisturbed")
    assert warns_of_clipping() == [True, False]
    assert undisturbed[1].optimizers[0].compressing
    with pytest.raises(Interrupted):
        by_lightning(kind, f"{folder}/interrupted", stops=True)
    saved = f"{folder}/interrupted/step={SAVED}.ckpt"
    resumed = by_lightning(kind, f"{folder}/resumed", saved)
    ends = [ended(trainer.optimizers[0], module) for module, trainer in (undisturbed, resumed)]
    return checked(*ends, torch.load(saved, weights_only=True)["optimizer_states"][0], said)


def arguments_of(folder: str, steps: int = LAST) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=BATCH, save_steps=SAVED, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1, max_grad_norm=0.1, ddp_find_unused_parameters=False,
    )  # fmt: skip


def trainer_of(kind: str, folder: str, stops: bool = False) -> Any:
    from transformers import TrainerCallback

    from onebit.integrations.transformers import OneBitTrainer

    class Interruption(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if stops and state.global_step == INTERRUPTED:
                raise Interrupted

    model = Tiny()
    arguments = arguments_of(folder)
    trainer = OneBitTrainer(model, arguments, train_dataset=Waves(), optimizers=optimizer_and_schedule(kind, model))
    trainer.add_callback(Interruption())
    return trainer


def transformers(kind: str, folder: str) -> bytes:
    undisturbed, saved = trainer_of(kind, f"{folder}/undisturbed"), f"{folder}/interrupted/checkpoint-{SAVED}"
    with logged() as said:
        undisturbed.train()
    assert undisturbed.optimizer.optimizer.compressing
    norms = [each["grad_norm"] for each in undisturbed.state.log_history if "grad_norm" in each]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, norms)
    assert len(norms) == LAST and min(norms) > 0.1
    assert (everywhere[0] == everywhere[1]) == (kind == ADAM)  # clipped by one norm, but for local steps
    with pytest.raises(Interrupted):
        trainer_of(kind, f"{folder}/interrupted", stops=True).train()
    resumed = trainer_of(kind, f"{folder}/interrupted")
    resumed.train(resume_from_checkpoint=True)
    ends = [ended(trainer.optimizer.optimizer, trainer.model) for trainer in (undisturbed, resumed)]
    return checked(*ends, torch.load(f"{saved}/optimizer.pt", weights_only=True), said)


def set_variables(rank: int, size: int) -> None:
    """Set those that torchrun sets, and one that keeps Accelerate off a GPU."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip


def needs(work: Callable[[str, str], bytes]) -> Any:
    missing = [name for name in {work.__name__, "accelerate"} if find_spec(name) is None]
    reason = f"needs {', '.join(missing)}: pip install 'onebit[integrations]'"
    return pytest.param(work, marks=pytest.mark.skipif(bool(missing), reason=reason))


@pytest.mark.parametrize("kind", [ADAM, ZERO_ONE])
@pytest.mark.parametrize("work", [needs(work) for work in (accelerate, lightning, transformers)])
@on_ranks(2, once=True)
def test_a_run_goes_on_bit_for_bit_from_the_loops_checkpoint(
    rank: int, size: int, work: Callable[[str, str], bytes], kind: str, tmp_path: Path
) -> bytes:
    """Whatever is saved is synchronized, or a warning were an error."""
    set_variables(rank, size)
    with on_warnings(**MISSED):
        return work(kind, str(tmp_path))


@pytest.mark.parametrize("work", [needs(transformers)])
@on_ranks(2, once=True)
def test_the_callback_of_the_docs_goes_on_bit_for_bit_under_adamw(rank: int, size: int, work: Any, tmp_path: Path):
    from transformers import Trainer

    set_variables(rank, size)
    page = (Path(__file__).parents[3] / "docs/usage.md").read_text(encoding="utf-8")
    (callback,) = re.findall(r"```python\n(class Compress\(.*?)```", page, re.S)

    def trained(name: str, steps: int = LAST, resume: bool = False) -> bytes:
        model = Tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=LAST)
        arguments = arguments_of(f"{tmp_path}/{name}", steps)
        trainer = Trainer(model, arguments, train_dataset=Waves(), optimizers=(optimizer, schedule))
        exec(callback, {**sys.modules, "trainer": trainer})
        trainer.train(resume_from_checkpoint=resume)
        return bits(model.parameters())

    undisturbed = trained("undisturbed")
    trained("ended", SAVED)
    assert trained("ended", resume=True) == undisturbed
    return undisturbed


@pytest.mark.parametrize(
    ("kind", "freeze_step", "warns"),
    [("OneBitAdam", 50, True), ("OneBitAdam", "auto", True), ("OneBitLamb", 49, False), ("ZeroOneAdam", None, False)],
)
def test_a_run_that_ends_before_stage_2_is_warned_of(kind, freeze_step, warns):
    optimizer = build(kind, freeze_step=freeze_step)
    with on_warnings() as texts:
        warn_of_total(optimizer, 50)
    assert ["this run has 50 steps" in text for text in texts] == [True] * warns

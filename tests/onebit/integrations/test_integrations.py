"""What is loaded in the place of one rank's state; and the loops of Accelerate, Lightning and HuggingFace, in two
processes, where a run goes on from the loop's own checkpoint.

steps 1 .. 4      stage 1
steps 5 .. 10     stage 2; a checkpoint after step 6, the interruption after step 7
"""

from __future__ import annotations

import os
import shutil
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
from onebit.integrations.whole_state import WholeState, warn_of_total
from tests.checkpoints import Run
from tests.collectives.work import logged
from tests.onebit.runs import Case, bits, build, on_ranks, on_warnings, same
from tests.ranks import group, run_ranks

FREEZE, SAVED, INTERRUPTED, LAST = 4, 6, 7, 10
BATCH = 4
CASE = Case(options={"freeze_step": 3})


def put(run: Run, values: list[Tensor]) -> None:
    """A loop loads its model itself."""
    with torch.no_grad():
        for p, value in zip(run.params, values, strict=True):
            p.copy_(value)


def loaded_once(rank: int, size: int, folder: Path, freeze_step: int) -> None:
    case = CASE.but(options={"freeze_step": freeze_step})
    run = Run(case, 6, rank, group())
    WholeState(run.model, run.optimizer).save(folder / "onebit")
    at_6, values = run.all()[1], [p.detach().clone() for p in run.params]
    of_rank_0 = run.optimizer.state_dict()
    for of_parameter in of_rank_0["state"].values():
        for name in [name for name in of_parameter if name.endswith(f"residual_of_rank_{rank}") and rank > 0]:
            del of_parameter[name]  # what this rank finds in a file that rank 0 alone has written
    run.on(7, 8)
    at_8 = run.all()

    again = Run(case, 2, rank, group())
    state = WholeState(again.model, again.optimizer)
    with on_warnings("error"):
        state.expect(folder / "onebit")
        again.optimizer.load_state_dict(of_rank_0)
    assert same(again.all()[1], at_6)
    put(again, values)
    again.on(7, 8)
    assert same(again.all(), at_8)

    for how in ("once", "cancelled", "nothing there"):  # then what is given is loaded as it is
        again.on(9, 9)
        if how != "once":
            state.expect(folder / ("onebit" if how == "cancelled" else how))
        if how == "cancelled":
            state.cancel()
        again.optimizer.load_state_dict(run.optimizer.state_dict())
        assert same(again.all()[1], at_8[1]), how

    again.on(9, 9)
    before = again.all()
    state.expect(folder / ("onebit" if rank == 0 else "nowhere"))
    with pytest.raises(ValueError, match=r"rank 1: "):
        again.optimizer.load_state_dict(again.optimizer.state_dict())
    assert same(again.all(), before)


def on_others(rank: int, size: int, folder: Path) -> None:
    run, direct = Run(CASE, 2, rank, group()), Run(CASE, 2, rank, group())
    direct.load(folder / "onebit")
    WholeState(run.model, run.optimizer).expect(folder / "onebit")
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    put(run, direct.params)
    assert same(run.all(), direct.all())


@pytest.mark.parametrize("freeze_step", [50, 3])
def test_the_next_state_is_that_of_the_folder_and_no_other(freeze_step: int, tmp_path: Path) -> None:
    """On as many ranks; on others it is what `onebit.load` gives. A folder that one rank lacks is an error on both."""
    run_ranks(2, loaded_once, tmp_path, freeze_step)
    run_ranks(3, on_others, tmp_path)


# Loops


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


def optimizer_and_schedule(model: nn.Module, steps: int = LAST) -> tuple[onebit.OneBitAdam, LinearLR]:
    optimizer = onebit.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=FREEZE, block_size=64, chunks=1, reply=1)
    return optimizer, LinearLR(optimizer, 1.0, 0.1, total_iters=steps)


MISSED = {"action": "error", "message": "the state does not hold the residuals"}


def on_rank_0(rank: int, change: Callable[..., None], *args: Any) -> None:
    dist.barrier()
    if rank == 0:
        change(*args)
    dist.barrier()


def checked(
    rank: int, undisturbed: bytes, resumed: bytes, without: bytes, warned: list[str], said: list[str] | None = None
) -> bytes:
    """Ends of runs: resumed from a checkpoint of stage 2, and without the residuals of other ranks, as the loop alone
    writes it; what was warned of there and, where loops report, logged."""
    assert resumed == undisturbed != without
    assert rank == 0 or any("residuals" in text for text in warned)
    if said is not None:
        assert any("1 bit  " in text for text in said) == (rank == 0)  # the report
    return undisturbed


class ByHand:
    """A run as Accelerate's users write it."""

    def __init__(self, rank: int) -> None:
        from accelerate import Accelerator

        from onebit.integrations.accelerate import attach

        self.rank, self.accelerator, self.steps, self.attach = rank, Accelerator(cpu=True), 0, attach
        model = Tiny()
        prepared = self.accelerator.prepare(model, *optimizer_and_schedule(model, 2 * LAST))
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
        return bits(self.model.parameters())


def accelerate(rank: int, folder: str) -> bytes:
    """A run is saved; others go on from there, go back to it, and go on from what Accelerate alone would write."""
    undisturbed = ByHand(rank)
    undisturbed.on(SAVED)
    assert undisturbed.optimizer.optimizer.compressing
    undisturbed.accelerator.save_state(folder)
    with on_warnings(**MISSED):
        resumed, again = ByHand(rank).load(folder), ByHand(rank)
        again.on(INTERRUPTED)
        end = again.load(folder).end()
        assert resumed.end() == end
    model, optimizer = again.model, again.optimizer
    assert optimizer.optimizer.steps == LAST
    onebit.save(f"{folder}/own", model, optimizer)  # what `prepare` returns is known here too
    onebit.load(f"{folder}/own", model, optimizer)
    assert again.end() == end
    on_rank_0(rank, shutil.rmtree, f"{folder}/onebit")
    with on_warnings() as texts:
        without = ByHand(rank).load(folder)
    with pytest.raises(TypeError, match="prepare both first"):
        again.attach(again.accelerator, model, optimizer.optimizer)
    return checked(rank, undisturbed.end(), end, without.end(), texts)


def by_lightning(folder: str, resume: str | None = None, stops: bool = False) -> tuple[Any, Any]:
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
            optimizer, schedule = optimizer_and_schedule(self.model)
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


def without_residuals(saved: str, alone: str) -> None:
    """A checkpoint as Lightning alone would write it."""
    content = torch.load(saved, weights_only=True)
    for of_parameter in content["optimizer_states"][0]["state"].values():
        for name in [name for name in of_parameter if name.endswith("residual_of_rank_1")]:
            del of_parameter[name]
    torch.save(content, alone)


def warns_of_clipping() -> list[bool]:
    """Of Lightning's own, and where the module clips with the optimizer's own method."""
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


def lightning(rank: int, folder: str) -> bytes:
    with logged() as said:
        undisturbed, trainer = by_lightning(f"{folder}/undisturbed")
    assert warns_of_clipping() == [True, False]
    assert trainer.optimizers[0].compressing
    with pytest.raises(Interrupted):
        by_lightning(f"{folder}/interrupted", stops=True)
    saved, alone = f"{folder}/interrupted/step={SAVED}.ckpt", f"{folder}/alone.ckpt"
    with on_warnings(**MISSED):
        resumed, _ = by_lightning(f"{folder}/resumed", saved)
    on_rank_0(rank, without_residuals, saved, alone)
    with on_warnings() as texts:
        without, _ = by_lightning(f"{folder}/without", alone)
    ends = [bits(module.parameters()) for module in (undisturbed, resumed, without)]
    return checked(rank, *ends, texts, said)


def trainer_of(folder: str, stops: bool = False) -> Any:
    from transformers import TrainerCallback, TrainingArguments

    from onebit.integrations.transformers import OneBitTrainer

    class Interruption(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if stops and state.global_step == INTERRUPTED:
                raise Interrupted

    model = Tiny()
    arguments = TrainingArguments(
        folder, max_steps=LAST, per_device_train_batch_size=BATCH, save_steps=SAVED, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1, max_grad_norm=0.1, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = OneBitTrainer(model, arguments, train_dataset=Waves(), optimizers=optimizer_and_schedule(model))
    trainer.add_callback(Interruption())
    return trainer


def transformers(rank: int, folder: str) -> bytes:
    undisturbed, saved = trainer_of(f"{folder}/undisturbed"), f"{folder}/interrupted/checkpoint-{SAVED}"
    with logged() as said:
        undisturbed.train()
    assert undisturbed.optimizer.optimizer.compressing
    norms = [each["grad_norm"] for each in undisturbed.state.log_history if "grad_norm" in each]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, norms)
    assert len(norms) == LAST and min(norms) > 0.1 and everywhere[0] == everywhere[1]  # clipped by one norm
    with pytest.raises(Interrupted):
        trainer_of(f"{folder}/interrupted", stops=True).train()
    with on_warnings(**MISSED):
        resumed = trainer_of(f"{folder}/interrupted")
        resumed.train(resume_from_checkpoint=True)
    on_rank_0(rank, shutil.rmtree, f"{saved}/onebit")
    without = trainer_of(f"{folder}/without")
    with on_warnings() as texts:
        without.train(resume_from_checkpoint=saved)
    ends = [bits(trainer.model.parameters()) for trainer in (undisturbed, resumed, without)]
    return checked(rank, *ends, texts, said)


def needs(work: Callable[[int, str], bytes]) -> Any:
    missing = [name for name in {work.__name__, "accelerate"} if find_spec(name) is None]
    reason = f"needs {', '.join(missing)}: pip install 'onebit[integrations]'"
    return pytest.param(work, marks=pytest.mark.skipif(bool(missing), reason=reason))


@pytest.mark.parametrize("work", [needs(work) for work in (accelerate, lightning, transformers)])
@on_ranks(2, once=True)
def test_a_run_goes_on_bit_for_bit_from_the_loops_checkpoint(
    rank: int, size: int, work: Callable[[int, str], bytes], tmp_path: Path
) -> bytes:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    return work(rank, str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "freeze_step", "warns"),
    [("OneBitAdam", 50, True), ("OneBitAdam", "auto", True), ("OneBitLamb", 49, False), ("ZeroOneAdam", None, False)],
)
def test_a_run_that_ends_before_stage_2_is_warned_of(kind, freeze_step, warns):
    optimizer = build(kind, freeze_step=freeze_step)
    with on_warnings() as texts:
        warn_of_total(optimizer, 50)
    assert ["this run has 50 steps" in text for text in texts] == [True] * warns

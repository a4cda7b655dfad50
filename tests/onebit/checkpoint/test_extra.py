"""onebit.save(..., extra={...}): what a run has beside model and optimizer goes with it, and comes back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import onebit
from tests.checkpoints import Holder, Run, written_files
from tests.onebit.runs import Case, bits, kinds, same, snapshot, take
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 3})


class Training:
    """A run with a schedule, a scaler, random noise and a place in the data."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.params = case, rank, case.parameters()
        self.optimizer = case.build(self.params, group())
        self.model = Holder(self.params)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=30)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0 * (rank + 1))
        self.random = torch.Generator().manual_seed(rank)
        self.place = 100 * rank

    def on(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            with torch.no_grad():
                noise = torch.rand((), generator=self.random)
            take(self.case, self.rank, self.optimizer, self.params, step + int(noise * 5))
            self.schedule.step()
            self.place += 1

    def save(self, folder: str) -> None:
        extra = {
            "schedule": self.schedule,
            "scaler": self.scaler,
            "random": self.random.get_state(),
            "python": random.getstate(),
            "place": self.place,
            "nested": {"epoch": 3, "order": [1, 2, (3, None)], 7: "seven"},
        }
        onebit.save(folder, self.model, self.optimizer, extra=extra)

    def load(self, folder: str) -> dict[str, Any]:
        found = onebit.load(
            folder, self.model, self.optimizer, extra={"schedule": self.schedule, "scaler": self.scaler}
        )
        self.random.set_state(found["random"])
        self.place = found["place"]
        return found


def interrupted(rank: int, size: int, case: Case, folder: str) -> None:
    training = Training(case, rank)
    training.on(1, 6)
    training.save(folder)
    python = random.getstate()
    training.on(7, 10)

    again = Training(case.but(seed=1), rank)
    again.case = case
    again.on(1, 2)
    found = again.load(folder)
    assert found["nested"] == {"epoch": 3, "order": [1, 2, (3, None)], 7: "seven"}
    assert found["python"] == python and again.place == 100 * rank + 6
    assert again.scaler.get_scale() == 256.0 * (rank + 1)
    again.on(7, 10)
    assert bits(again.params) == bits(training.params)
    assert again.schedule.state_dict() == training.schedule.state_dict()
    assert same(snapshot(again.optimizer.state_dict()), snapshot(training.optimizer.state_dict()))


@kinds
@pytest.mark.parametrize("freeze_step", [50, 3])
def test_a_run_goes_on_bit_for_bit_with_each_ranks_own_extra(kind: str, freeze_step: int, tmp_path: Path) -> None:
    run_ranks(2, interrupted, Case(kind, options={"freeze_step": freeze_step}), str(tmp_path))


def only_saved(rank: int, size: int, folder: str) -> None:
    training = Training(CASE, rank)
    training.on(1, 5)
    training.save(folder)


def only_loaded(rank: int, size: int, folder: str) -> tuple[int, int]:
    training = Training(CASE, rank)
    if rank == 0:
        with pytest.warns(UserWarning, match="extra was saved by 2 ranks, here are 3"):
            training.load(folder)
    else:
        training.load(folder)
    return training.place, training.schedule.last_epoch


def test_on_another_number_of_ranks_each_has_that_of_a_rank(tmp_path: Path) -> None:
    run_ranks(2, only_saved, str(tmp_path))
    assert run_ranks(3, only_loaded, str(tmp_path)) == [(5, 5), (105, 5), (5, 5)]


class Picky:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("no such thing")


def wrong_extra(rank: int, size: int, folder: str) -> list[str]:
    training = Training(CASE, rank)
    training.on(1, 5)
    model, optimizer = training.model, training.optimizer
    found = []
    for extra in ({"it": object() if rank else 1}, {3: 1}, [1]):
        with pytest.raises((ValueError, TypeError)) as caught:
            onebit.save(folder, model, optimizer, extra=extra)  # type: ignore[arg-type]
        found.append(str(caught.value))
    assert not (Path(folder) / "checkpoint.json").exists()
    onebit.save(folder, model, optimizer, extra={"picky": Picky(rank), "epoch": 1})
    training.on(6, 7)
    before = bits(training.params), snapshot(optimizer.state_dict())
    for asked in ({"schedule": training.schedule} if rank else {}, {"epoch": 2}):
        with pytest.raises((ValueError, TypeError)) as caught:
            onebit.load(folder, model, optimizer, extra=asked)
        found.append(str(caught.value))
    assert before[0] == bits(training.params) and same(before[1], snapshot(optimizer.state_dict()))
    return found


def test_what_can_not_be_kept_or_given_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for texts in run_ranks(2, wrong_extra, str(tmp_path)):
        for text, word in zip(
            texts, ("rank 1 of 2: extra 'it'", "by names", "by names", "no extra 'schedule'", "no load_state_dict"),
            strict=True,
        ):  # fmt: skip
            assert word in text


def test_a_checkpoint_without_extra(tmp_path: Path) -> None:
    run = Run(CASE, 5)
    run.save(tmp_path)
    assert onebit.load(tmp_path, run.model, run.optimizer) == {}
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda t: 1.0)
    with pytest.raises(ValueError, match="it has none"):
        onebit.load(tmp_path, run.model, run.optimizer, extra={"schedule": schedule})
    for path in written_files(tmp_path):
        assert b"extra" not in path.read_bytes()

"""What tests of training loops share: a tiny model, its data, and ranks as torchrun starts them.

steps 1 .. 4      stage 1
steps 5 .. 10     stage 2; a checkpoint after step 6, the interruption after step 7
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import onebit
from tests.limits import HUNG
from tests.ranks import run_ranks_once

FREEZE, SAVED, INTERRUPTED, LAST = 4, 6, 7, 10
BATCH = 4


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
    data = Waves()
    first = (2 * step + rank) * BATCH
    batch = [data[i] for i in range(first, first + BATCH)]
    return {name: torch.stack([each[name] for each in batch]) for name in batch[0]}


def optimizer_of(model: nn.Module) -> onebit.OneBitAdam:
    return onebit.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=FREEZE, block_size=64, chunks=1, reply=1)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips where one is missing, without importing them here."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install 'onebit[integrations]'")


@dataclass
class Ends:
    """Of a rank: what its parameters are at the end of runs, what was warned of and, where loops report, logged."""

    undisturbed: bytes
    resumed: list[bytes]  # from a checkpoint of stage 2
    without: bytes  # from one without the residuals of other ranks, as the loop alone writes it
    warned: list[str]  # there
    said: list[str] | None = None


def check(work: Callable[[int, int, str], Ends], folder: Path) -> None:
    """`work` in two processes: runs go on bit for bit. Packages take long to import, on a busy machine one rank far
    longer than another."""
    found = run_ranks_once(2, work, (str(folder),), timeout=HUNG, group_timeout=120)
    assert len({end for one in found for end in (one.undisturbed, *one.resumed)}) == 1
    assert all(one.without != one.undisturbed for one in found)
    assert any("residuals" in text for text in found[1].warned)
    if found[0].said is not None:
        assert [any("1 bit  " in text for text in one.said) for one in found] == [True, False]  # the report


@contextmanager
def no_residuals_missed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the state does not hold the residuals")
        yield


@contextmanager
def warned() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


def as_under_torchrun(rank: int, size: int) -> None:
    """The environment that loops look at. For ranks that end afterwards."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip

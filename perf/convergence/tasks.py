"""The tasks of the convergence study: data, a model, a loss, and the settings every optimizer shares.

A task's data are tensors over items. Every epoch is a permutation of the items, drawn from the seed alone, so that a
step's global batch is the same for every optimizer and for every number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from onebit.cli.demo.model import Transformer, loss_of
from perf.convergence import data
from perf.convergence.models import ResNet8

Items = tuple[Tensor, ...]
LOSS = "validation loss"


@dataclass(frozen=True)
class Prepared:
    train: Items
    valid: Items
    about: str  # what the data are
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # to go on from
    config: str = ""  # of those


@dataclass(frozen=True)
class Task(ABC):
    """`lr` is by family of optimizers; `batch` is over all ranks."""

    name: str
    title: str
    papers: str  # what of theirs it stands for
    differs: str
    steps: int
    batch: int
    lr: Mapping[str, float]
    chosen: str  # how the rates were
    accuracy: bool = False
    sweeps: tuple[str, ...] = ()
    families: tuple[str, ...] = ("adam", "lamb")
    betas: tuple[float, float] = (0.9, 0.999)
    measure: str = LOSS  # what is lower where a run is better
    variants: tuple[str, ...] = ()  # of the main comparison; () for all of the families
    save_every: int = 0  # steps, after which a run goes on from what is saved; 0 for never

    @abstractmethod
    def prepare(self, given: Path | None) -> Prepared: ...

    @abstractmethod
    def model(self, prepared: Prepared) -> nn.Module: ...

    @abstractmethod
    def loss(self, model: nn.Module, items: Items) -> tuple[Tensor, Tensor]:
        """The mean loss, and the share that was right where the task has an accuracy."""

    def parts(self, model: nn.Module) -> list[nn.Module]:
        """What has an optimizer of its own."""
        return [model]

    def last_layer(self, part: nn.Module) -> list[nn.Parameter]:
        """The parameters of such a part that some variants leave uncompressed."""
        return []

    def step(self, model: nn.Module, optimizers: Sequence[Optimizer], items: Items) -> Tensor:
        """A training step on this rank's items; its loss."""
        (optimizer,) = optimizers
        loss, _ = self.loss(model, items)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def validate(
        self, model: nn.Module, items: Items, mean: Callable[[list[float]], list[float]]
    ) -> tuple[float, float]:
        """Loss and accuracy of all ranks' items. `mean`: of numbers, over ranks."""
        loss = hits = 0.0
        for part in zip(*(x.split(64) for x in items), strict=True):
            found = self.loss(model, part)
            loss, hits = loss + float(found[0]) * len(part[0]), hits + float(found[1]) * len(part[0])
        loss, hits, n = mean([loss, hits, float(len(items[0]))])
        return loss / n, hits / n

    def draw(self, items: Items, generator: torch.Generator) -> Items:
        """What a training step makes of its items, at random."""
        return items


@dataclass(frozen=True)
class LanguageModel(Task):
    """Causal, from scratch. `text` is "python" or "prose"."""

    text: str = "prose"
    vocabulary: int = 1024
    length: int = 64
    width: int = 128
    layers: int = 3
    held_out: int = 1024  # windows, at most

    def prepare(self, given: Path | None) -> Prepared:
        text = data.python_text() if self.text == "python" else data.prose(given)
        cut = torch.from_numpy(windows(data.tokenize([text], self.vocabulary), self.length).astype(np.int16))
        train, valid = data.spans(len(cut), every=20, length=64)
        valid = valid[:: -(-len(valid) // self.held_out)]
        about = (
            f"{len(text) / 1e6:.1f} million characters, {cut.numel() / 1e6:.1f} million tokens of a vocabulary of "
            f"{self.vocabulary}; validation on {len(valid):,} windows of {self.length}, from spans that are held out"
        )
        return Prepared((cut[train],), (cut[valid],), about)

    def model(self, prepared: Prepared) -> nn.Module:
        heads = self.width // 32
        return Transformer(self.vocabulary, self.width, self.layers, heads, self.length, bias=True, std=0.1)

    def loss(self, model: nn.Module, items: Items) -> tuple[Tensor, Tensor]:
        return loss_of(model, items[0].long()), torch.zeros(())


@dataclass(frozen=True)
class Images(Task):
    def prepare(self, given: Path | None) -> Prepared:
        (x, y), (test_x, test_y) = data.fashion(given)
        about = f"Fashion-MNIST: {len(x):,} images for training, {len(test_x):,} for validation (its test set)"
        return Prepared((x, y), (test_x, test_y), about)

    def model(self, prepared: Prepared) -> nn.Module:
        return ResNet8()

    def loss(self, model: nn.Module, items: Items) -> tuple[Tensor, Tensor]:
        images, labels = items[0], items[1].long()
        logits = model(images[:, None].float())
        return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """[n, length + 1]; each window's last token is the next one's first."""
    n = (len(tokens) - 1) // length
    heads = tokens[: n * length].reshape(n, length)
    return np.concatenate([heads, tokens[length : n * length + 1 : length, None]], 1)

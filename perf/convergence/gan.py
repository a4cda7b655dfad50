"""A DCGAN on Fashion-MNIST: two models in one process, each with an optimizer of its own.

The generator makes an image of noise and a class; the discriminator tells it from a real one of that class. How good
samples are is said by a classifier that was trained on the real images before, and never changes:

    distance    |m - n|^2 + tr(A + B - 2 (A B)^(1/2)), of m, A and n, B the means and covariances of the classifier's
                features of samples and of real images (Heusel et al. 2017, there with another classifier)
    accuracy    the share of samples that it takes for the class they were made of
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from perf.convergence import data
from perf.convergence.models import ResNet8
from perf.convergence.tasks import Items, Prepared, Task

NOISE, CLASSES = 32, 10
SAMPLES = 2048  # for a distance, over all ranks
CLASSIFIER_STEPS = 400  # of 128 images
REAL = "features of real images"


class Generator(nn.Sequential):
    """Noise and class, 7 x 7 x 64, 14 x 14 x 32, an image of -1 to 1."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(NOISE + CLASSES, 64 * 49),
            nn.Unflatten(1, (64, 7, 7)),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        return super().forward(torch.cat([noise, F.one_hot(labels, CLASSES).float()], 1))


class Discriminator(nn.Module):
    """A number an image: how much it looks like a real one of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1 + CLASSES, 32, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, 4, 2, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(64 * 49, 1),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        planes = F.one_hot(labels, CLASSES).float()[:, :, None, None].expand(-1, -1, 28, 28)
        return self.body(torch.cat([images, planes], 1)).squeeze(1)


class Gan(nn.Module):
    """Both, and the classifier, which is no part of either."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                nn.init.normal_(module.weight, std=0.02)
        classifier = ResNet8().eval()
        classifier.load_state_dict({k: v for k, v in prepared.weights.items() if k != REAL})
        self.judge = [classifier]  # in a list: train() and buffers() pass it over
        self.real = [prepared.weights[REAL]]


@dataclass(frozen=True)
class Samples(Task):
    def prepare(self, given: Path | None) -> Prepared:
        (x, y), (test_x, test_y) = data.fashion(given)
        classifier, right = _classifier(x, y, test_x, test_y)
        weights = {**classifier.state_dict(), REAL: torch.cat([features(classifier, pixels(part))
                                                                for part in test_x.split(500)])}  # fmt: skip
        about = (
            f"Fashion-MNIST: {len(x):,} images for training; {SAMPLES:,} samples are held against the {len(test_x):,} "
            f"of its test set, by a classifier that has {100 * right:.1f} % of these right (its weights: "
            f"{_fingerprint(classifier)})"
        )
        noise = torch.randn(SAMPLES, NOISE, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(SAMPLES) // 4 % CLASSES  # every fourth sample, too, has all classes
        return Prepared((x, y), (noise, labels), about, weights)

    def model(self, prepared: Prepared) -> nn.Module:
        return Gan(prepared)

    def parts(self, model: Any) -> list[nn.Module]:
        return [model.discriminator, model.generator]

    def last_layer(self, part: nn.Module) -> list[nn.Parameter]:
        """The discriminator's."""
        return list(part.body[-1].parameters()) if isinstance(part, Discriminator) else []

    def loss(self, model: Any, items: Items) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("two models have two losses: see step")

    def draw(self, items: Items, generator: torch.Generator) -> Items:
        return *items, torch.randn(len(items[0]), NOISE, generator=generator)

    def step(self, model: Any, optimizers: Sequence[Optimizer], items: Items) -> Tensor:
        """The discriminator's, then the generator's; the loss of both."""
        (images, labels, noise), (first, second) = (pixels(items[0]), items[1].long(), items[2]), optimizers
        made = model.generator(noise, labels)
        real, false = model.discriminator(images, labels), model.discriminator(made.detach(), labels)
        loss = F.softplus(-real).mean() + F.softplus(false).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        fooled = F.softplus(-model.discriminator(made, labels)).mean()
        second.zero_grad()
        fooled.backward()
        second.step()
        return (loss + fooled).detach()

    def validate(self, model: Any, items: Items, mean: Callable[[list[float]], list[float]]) -> tuple[float, float]:
        (noise, labels), classifier, found, hits = items, model.judge[0], [], 0
        for some, of in zip(noise.split(256), labels.split(256), strict=True):
            images = model.generator(some, of)
            found.append(features(classifier, images))
            hits += int((classifier.head(found[-1]).argmax(1) == of).sum())
        own = torch.cat(found).double()
        sums = [float(len(own)), float(hits), *own.sum(0).tolist(), *(own.T @ own).flatten().tolist()]
        (n, right, *rest), width = mean(sums), own.shape[1]
        center, squares = torch.tensor(rest[:width]).double() / n, torch.tensor(rest[width:]).double() / n
        covariance = squares.view(width, width) - torch.outer(center, center)
        real = model.real[0].double()
        return distance(center, covariance, real.mean(0), torch.cov(real.T, correction=0)), right / n


def pixels(images: Tensor) -> Tensor:
    """uint8 as -1 to 1."""
    return images[:, None].float().div(127.5).sub(1)


@torch.no_grad()
def features(classifier: ResNet8, images: Tensor) -> Tensor:
    """The classifier's features of images of -1 to 1."""
    return classifier.features((images + 1) * 127.5)


def distance(center: Tensor, covariance: Tensor, other: Tensor, others: Tensor) -> float:
    """The Fréchet distance of two normal distributions, in float64."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
    between = torch.linalg.eigvalsh(root @ others @ root).clamp(min=0).sqrt().sum()
    return float((center - other).square().sum() + covariance.trace() + others.trace() - 2 * between)


def _classifier(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> tuple[ResNet8, float]:
    """The same whenever it is trained, and its accuracy on the test set."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ResNet8()
        optimizer = AdamW(model.parameters(), lr=8e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, CLASSIFIER_STEPS, pct_start=0.1)
        order = torch.randperm(len(x))
        for step in range(CLASSIFIER_STEPS):
            picked = order[(128 * step + torch.arange(128)) % len(x)]
            loss = F.cross_entropy(model(x[picked][:, None].float()), y[picked].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    right = sum(
        int((model.head(features(model, pixels(part))).argmax(1) == of).sum())
        for part, of in zip(test_x.split(500), test_y.split(500), strict=True)
    )
    return model, right / len(test_x)


def _fingerprint(model: nn.Module) -> str:
    """Hash the model's weights: another machine rounds otherwise and trains another, whose distances are others."""
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()[:8]

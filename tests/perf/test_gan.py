"""The study's GAN: its measure, two optimizers in one process, and that ranks have parts of one batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perf.convergence import gan
from perf.convergence.models import ResNet8
from perf.convergence.plan import BETA1, LAST_LAYER, MAIN, TASKS, Run, plan
from perf.convergence.runs import build, share
from perf.convergence.tasks import Prepared
from tests.onebit.runs import bits

TASK: Any = TASKS["gan"]


def prepared() -> Prepared:
    torch.manual_seed(0)
    images, labels = torch.randint(256, (40, 28, 28), dtype=torch.uint8), torch.arange(40) % 10
    classifier = ResNet8().eval()
    weights = {**classifier.state_dict(), gan.REAL: gan.features(classifier, gan.pixels(images))}
    valid = torch.randn(48, gan.NOISE), torch.arange(48) // 4 % 10
    return Prepared((images, labels), valid, "noise", weights)


def covariance(width: int, seed: int) -> Tensor:
    x = torch.randn(width, width, generator=torch.Generator().manual_seed(seed)).double()
    return x @ x.T


def test_the_distance_of_two_normal_distributions() -> None:
    a, b, zero = covariance(6, 0), covariance(6, 1), torch.zeros(6).double()
    assert gan.distance(zero, a, zero, a) == pytest.approx(0, abs=1e-6 * float(a.trace()))
    shift = torch.arange(6).double()
    assert gan.distance(shift, a, zero, a) == pytest.approx(55, rel=1e-6)
    values = np.linalg.eigvals((a @ b).numpy())
    expected = float(a.trace() + b.trace()) - 2 * np.sqrt(values.real.clip(0)).sum()
    assert gan.distance(zero, a, zero, b) == pytest.approx(expected, rel=1e-6) == gan.distance(zero, b, zero, a)
    assert gan.distance(zero, 4 * torch.eye(6).double(), zero, torch.eye(6).double()) == pytest.approx(6)


def test_samples_are_held_against_real_images() -> None:
    """In one part or two: means over ranks are of all samples."""
    given = prepared()
    model = TASK.model(given).eval()
    with torch.no_grad():
        whole = TASK.validate(model, given.valid, lambda numbers: numbers)
        sums: list[list[float]] = []
        for rank in range(2):
            TASK.validate(model, share(given.valid, rank, 2), lambda numbers: sums.append(numbers) or numbers)
        both = TASK.validate(model, share(given.valid, 0, 2), lambda _: np.mean(sums, 0).tolist())
        own = gan.features(model.judge[0], model.generator(*given.valid)).double()
    assert both == pytest.approx(whole, rel=1e-6)
    real = given.weights[gan.REAL].double()
    moments = [f(x) for x in (own, real) for f in (lambda x: x.mean(0), lambda x: torch.cov(x.T, correction=0))]
    assert whole[0] == pytest.approx(gan.distance(*moments), rel=1e-4)  # features are fp32
    right = (model.judge[0].head(own.float()).argmax(1) == given.valid[1]).double().mean()
    assert whole[1] == pytest.approx(float(right))


@pytest.mark.parametrize(
    ("variant", "beta1"),
    [("adam", 0.5), ("onebit_adam", 0.5), ("direct_zero_one_unbiased_last_beta_25_adam", 0.25)],
)
def test_both_models_train_each_with_its_optimizer(variant: str, beta1: float) -> None:
    given, run = prepared(), Run.standard("gan", variant, 0)
    model = TASK.model(given).train()
    optimizers = [build(run, part) for part in TASK.parts(model)]
    owned = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
    assert owned == [{id(p) for p in part.parameters()} for part in (model.discriminator, model.generator)]
    assert all(group["betas"] == (beta1, 0.999) for o in optimizers for group in o.param_groups)
    apart = [sum(sum(state.numels) for state in o.current.uncompressed) for o in optimizers if "last" in variant]
    assert apart == ([64 * 49 + 1, 0] if "last" in variant else [])
    judge = bits(model.judge[0].state_dict().values())
    for _ in range(2):
        before = [bits(part.parameters()) for part in TASK.parts(model)]
        items = TASK.draw(given.train, torch.Generator().manual_seed(0))
        assert float(TASK.step(model, optimizers, items)) > 0
        assert all(bits(p.parameters()) != b for p, b in zip(TASK.parts(model), before, strict=True))
    assert bits(model.judge[0].state_dict().values()) == judge


@pytest.mark.parametrize("task", ["gan", "lm"])
def test_every_variant_of_the_plan_is_built_with_its_options(task: str) -> None:
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 1)}) if task == "gan" else torch.nn.Linear(4, 1)
    for run in plan([task], [MAIN], 1, 2):
        if run.variant in LAST_LAYER:
            continue
        (group, *_) = build(run, model).param_groups
        assert group["betas"][0] == BETA1.get(run.variant, TASKS[task].betas[0]), run.variant
        assert (group["lr"], group["weight_decay"]) == (run.lr, 0.01)


def test_noise_is_of_the_global_batch_and_samples_have_all_classes() -> None:
    items = TASK.draw(prepared().train, torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat([share(items, rank, 2)[2] for rank in range(2)]), items[2])
    assert not torch.equal(share(items, 0, 2)[2], share(items, 1, 2)[2])
    assert set(prepared().valid[1][::4].tolist()) == set(range(10))

"""The plan says what is run: the model, the settings that all optimizers share, and the order of the runs.

The learning rates are those that were best in 90 steps and more of a smaller model on the same text (4 layers of width
256, one rank): Adam's of two, LAMB's of three, factors of 2 apart. The 1-bit optimizers have those of their originals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from perf.convergence.plan import FREEZE, Run, family_of, has_stages

TITLES = {  # each with its defaults for more than two ranks, in the order in which they are run
    "adam": "Adam",
    "zero_one_unbiased_adam": "0/1 Adam",
    "unbiased_adam": "1-bit Adam",
    "lamb": "LAMB",
    "unbiased_lamb": "1-bit LAMB",
}


@dataclass(frozen=True)
class Shape:
    """Sizes the model; these are GPT-2 small's."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024  # tokens of a window
    vocabulary: int = 50_257


@dataclass(frozen=True)
class Setting:
    """Decides a result, together with the optimizer and the text."""

    name: str = "gpt2-small"
    shape: Shape = Shape()
    ranks: int = 8
    windows: int = 4  # of a rank and a step
    steps: int = 500
    every: int = 50  # steps from one point of the curve to the next
    held_out: int = 64  # windows of a point of the curve
    held_out_at_end: int = 512
    clip: float = 1.0
    lr: Mapping[str, float] = field(default_factory=lambda: {"adam": 6e-4, "lamb": 2e-2})  # by family of optimizers

    @property
    def tokens(self) -> int:
        """Count the tokens of a run, each as often as it comes."""
        return self.steps * self.ranks * self.windows * self.shape.length


GPT2_SMALL = Setting()
REHEARSAL = Setting("rehearsal", Shape(2, 32, 2, 32, 256), 2, 2, 10, 5, 4, 8, lr={"adam": 3e-3, "lamb": 2e-2})


def plan(setting: Setting, seeds: int) -> Iterator[Run]:
    """Yield every optimizer with a seed before any with the next."""
    for seed, variant in itertools.product(range(seeds), TITLES):
        family = family_of(variant)
        freeze = round(setting.steps * FREEZE[family]) if has_stages(variant) else None
        batch = setting.ranks * setting.windows
        yield Run(setting.name, variant, seed, setting.ranks, setting.steps, batch, setting.lr[family], freeze)


def config(run: Run, setting: Setting, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that decides the result of a run, as its record has it. text: what the tokens are."""
    shared = {name: value for name, value in asdict(setting).items() if name not in ("name", "lr", *run.config)}
    return {**run.config, **shared, "text": text["digest"]}


def title(run: Run) -> str:
    return f"{TITLES[run.variant]}, seed {run.seed}"

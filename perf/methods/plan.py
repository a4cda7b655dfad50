"""What is compared: methods, models, links, and the runs of which losses are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from perf.train_step.measure import Row, Run
from perf.train_step.variants import VARIANTS, Shape, timed_variants

MODELS = {"narrow": Shape(width=256, layers=8), "wide": Shape(width=512, layers=4)}
LINKS = ("1gbit", "300mbit+10ms", "100mbit+50ms", "55mbit")
HOSTS = (2, 4)
OURS = ("adamw-8", "adamw-4", "adam-2", "adam-2-bf16", "lamb-2", "zero-one", "zero-one-local", "zero-one-unbiased")
METHODS = (
    "fp32",
    "fp16",
    "bf16",
    "powersgd-1-soon",
    "powersgd-4-soon",
    "powersgd-16-soon",
    "powersgd-4",
    *OURS,
    "diloco",
    "torchft",
)
TRAINED_AS = {"torchft": "diloco"}  # the same steps, but for rounding
LOCAL = ("zero-one-local", "diloco", "torchft")  # methods whose ranks do not always have the same parameters
STEPS, FREEZE = 300, 75
CLIP = 1.0  # the norm of gradients, as is usual for language models; without overlap, since that can't be clipped
REPEATS = 5  # steps in a median
SEEDS = 3  # runs of each method
ADAM_LR, LAMB_LR = 1e-3, 5e-3
FACTORS = (1.0, 0.5, 2.0)  # of these rates: what every method chooses from


@dataclass(frozen=True)
class Trainings:
    """Runs of one learning rate."""

    lr: float
    runs: list[tuple[str, int]]  # variant and seed


def usual_lr(variant: str) -> float:
    return LAMB_LR if variant.startswith("lamb") else ADAM_LR


def all_timed() -> list[str]:
    """The variants of train_step whose steps make up those of the methods."""
    first = [name for method in METHODS for name in (VARIANTS[method].before, method)]
    return timed_variants(first)


def rows_to_measure(rows: Sequence[Row], link: str) -> list[str]:
    there = {row.variant for row in rows if row.rate == link and row.seconds}
    return [name for name in all_timed() if name not in there]


def tried(runs: Sequence[Run], variant: str) -> dict[float, float]:
    """The first seed's final losses, by learning rate."""
    own = TRAINED_AS.get(variant, variant)
    return {run.lr: run.loss for run in runs if run.variant == own and run.seed == 0}


def best_lr(runs: Sequence[Run], variant: str) -> float | None:
    found = tried(runs, variant)
    return min(found, key=lambda lr: found[lr]) if found else None


def chosen_runs(runs: Sequence[Run], variant: str) -> list[Run]:
    """All seeds at the learning rate that was best on the first."""
    lr, own = best_lr(runs, variant), TRAINED_AS.get(variant, variant)
    return [run for run in runs if run.variant == own and run.lr == lr]


def mean_loss(runs: Sequence[Run], variant: str) -> float | None:
    own = chosen_runs(runs, variant)
    return mean(run.loss for run in own) if own else None


def to_train(runs: Sequence[Run], methods: Sequence[str], seeds: int) -> Iterator[Trainings]:
    """What is left, a learning rate at a time: the usual one on the first seed, then others, then all seeds of the
    best. Ask again when these have run: the best may be another then.
    """
    there = {(run.variant, run.seed, run.lr) for run in runs}
    methods = [name for name in methods if name not in TRAINED_AS]
    lacking: dict[float, list[tuple[str, int]]]
    usual = [(name, 0, usual_lr(name)) for name in methods]
    others = [(name, 0, factor * usual_lr(name)) for factor in FACTORS for name in methods]
    best = [(n, seed, lr) for seed in range(seeds) for n in methods if (lr := best_lr(runs, n)) is not None]
    for stage in (usual, others, best):
        lacking = {}
        for name, seed, lr in stage:
            if (name, seed, lr) not in there:
                lacking.setdefault(lr, []).append((name, seed))
        if lacking:
            yield from (Trainings(lr, own) for lr, own in lacking.items())
            return

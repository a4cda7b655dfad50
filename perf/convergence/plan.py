"""What is run: the tasks' settings, and of each task a main comparison and sweeps over what the papers ask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from perf.convergence.bert import Masked, Sentiment
from perf.convergence.gan import Samples
from perf.convergence.tasks import Images, LanguageModel, Task

MAIN = "main"
MANY = 8  # ranks: of these one seed, as they share two cores


@dataclass(frozen=True)
class Variant:
    title: str  # in tables: what is not the default with two ranks
    options: dict[str, Any] | None = None  # of an optimizer of onebit, where it compresses
    gradients: dict[str, Any] | None = None  # of CompressedAllReduce, where it averages an optimizer of torch's
    beta1: float | None = None  # where it is not the task's: tried on the GAN alone, which has betas of its own


DIRECT = {"reply": "direct"}
UNBIASED, DIRECT_UNBIASED = {"reply": 1, "norm": "unbiased"}, {**DIRECT, "norm": "unbiased"}
UNLIMITED_DIRECT, OF_256 = {**DIRECT_UNBIASED, "update_limit": None}, {**DIRECT_UNBIASED, "block_size": 256}
PAPERS, DIRECT_L1 = {"reply": 1, "norm": "l1"}, {**DIRECT, "norm": "l1"}
NAIVE = {"bits": 1, "reply": 1}
EVERY = {
    "adam": Variant("Adam"),
    "direct_unbiased_adam": Variant("1-bit Adam", DIRECT_UNBIASED),
    "direct_zero_one_unbiased_adam": Variant("0/1 Adam", DIRECT_UNBIASED),
    "onebit_adam": Variant("1-bit Adam (paper's)", PAPERS),
    "direct_adam": Variant("1-bit Adam, norm l1", DIRECT_L1),
    "unbiased_adam": Variant("1-bit Adam, reply 1", UNBIASED),
    "zero_one_adam": Variant("0/1 Adam (paper's)", PAPERS),
    "direct_zero_one_adam": Variant("0/1 Adam, norm l1", DIRECT_L1),
    "direct_zero_one_1_adam": Variant("0/1 Adam, norm l1, kappa 1", {**DIRECT_L1, "var_update_scaler": 1}),
    "direct_zero_one_2_adam": Variant("0/1 Adam, norm l1, kappa 2", {**DIRECT_L1, "var_update_scaler": 2}),
    "direct_zero_one_l2_adam": Variant("0/1 Adam, norm l2", {**DIRECT, "norm": "l2"}),
    "direct_zero_one_unbiased_1_adam": Variant("0/1 Adam, kappa 1", {**DIRECT_UNBIASED, "var_update_scaler": 1}),
    "direct_zero_one_unbiased_2_adam": Variant("0/1 Adam, kappa 2", {**DIRECT_UNBIASED, "var_update_scaler": 2}),
    "direct_zero_one_unbiased_256_adam": Variant("0/1 Adam, blocks of 256", OF_256),
    "zero_one_unbiased_adam": Variant("0/1 Adam, reply 1", UNBIASED),
    "local_16_unbiased_adam": Variant(
        "0/1 Adam, exchanges up to 16 steps apart", {"local_step_clipper": 16, "norm": "unbiased"}
    ),
    "beta_25_adam": Variant("Adam, beta1 0.25", beta1=0.25),
    "beta_0_adam": Variant("Adam, beta1 0", beta1=0.0),
    "direct_zero_one_unbiased_beta_25_adam": Variant("0/1 Adam, beta1 0.25", DIRECT_UNBIASED, beta1=0.25),
    "direct_zero_one_unbiased_beta_0_adam": Variant("0/1 Adam, beta1 0", DIRECT_UNBIASED, beta1=0.0),
    "direct_zero_one_unbiased_256_beta_25_adam": Variant("0/1 Adam, blocks of 256, beta1 0.25", OF_256, beta1=0.25),
    "direct_zero_one_unbiased_last_beta_25_adam": Variant(
        "0/1 Adam, beta1 0.25, last layer uncompressed", DIRECT_UNBIASED, beta1=0.25
    ),
    "direct_unbiased_unlimited_adam": Variant("1-bit Adam, no limit", UNLIMITED_DIRECT),
    "direct_zero_one_unbiased_unlimited_adam": Variant("0/1 Adam, no limit", UNLIMITED_DIRECT),
    "direct_zero_one_unbiased_floor_adam": Variant(
        "0/1 Adam, variance floor 0.1", {**DIRECT_UNBIASED, "variance_floor": 0.1}
    ),
    "frozen_adam": Variant("1-bit Adam (32 bits)"),
    "naive_adam": Variant("Adam, naive after stage 1", gradients=NAIVE),
    "naive_adam_start": Variant("Adam, naive from the start", gradients=NAIVE),
    "bits_8_adam": Variant("Adam, 8-bit gradients", gradients={"bits": 8}),
    "bits_4_adam": Variant("Adam, 4-bit gradients", gradients={"bits": 4}),
    "lamb": Variant("LAMB"),
    "direct_unbiased_lamb": Variant("1-bit LAMB", DIRECT_UNBIASED),
    "onebit_lamb": Variant("1-bit LAMB (paper's)", PAPERS),
    "direct_lamb": Variant("1-bit LAMB, norm l1", DIRECT_L1),
    "unbiased_lamb": Variant("1-bit LAMB, reply 1", UNBIASED),
    "direct_unbiased_unlimited_lamb": Variant("1-bit LAMB, no limit", UNLIMITED_DIRECT),
    "lamb_basic": Variant("LAMB + basic 1-bit"),
    "sgd": Variant("SGD"),
    "bits_8_sgd": Variant("SGD, 8-bit gradients", gradients={"bits": 8}),
    "bits_4_sgd": Variant("SGD, 4-bit gradients", gradients={"bits": 4}),
    "bits_1_sgd": Variant("SGD, 1-bit gradients", gradients={"bits": 1}),
    "muon": Variant("Muon"),
    "bits_8_muon": Variant("Muon, 8-bit gradients", gradients={"bits": 8}),
    "bits_4_muon": Variant("Muon, 4-bit gradients", gradients={"bits": 4}),
}
FAMILIES = ("adam", "lamb", "sgd", "muon")  # each named like its uncompressed optimizer
VARIANTS = {name: each.title for name, each in EVERY.items()}
OPTIONS = {name: each.options for name, each in EVERY.items() if each.options is not None}
GRADIENTS = {name: each.gradients for name, each in EVERY.items() if each.gradients is not None}
BITS = {bits: tuple(f"bits_{bits}_{family}" for family in ("adam", "sgd", "muon")) for bits in (8, 4)}
ZERO_ONE = tuple(name for name in OPTIONS if VARIANTS[name].startswith("0/1"))
BETA1 = {name: each.beta1 for name, each in EVERY.items() if each.beta1 is not None}
LAST_LAYER = ("direct_zero_one_unbiased_last_beta_25_adam",)
EVENTS = ("x 100", "x 30")  # from the middle on; for a quarter of the steps after it
LOCAL = {"var_freeze_step": 1 / 5, "local_step_scaler": 1 / 15}  # of the steps, where there are local ones
SWEPT = ("adam", "onebit_adam", "lamb", "onebit_lamb")
REPLY, RANKS, FREEZES, RATES = "reply", "ranks", "freeze", "lr"
USUAL = "x 1"  # learning rate
MORE = 3  # ranks
DEFAULTS = {  # what the optimizers do by default: of 2 ranks, and of more
    2: ("direct_unbiased_adam", "direct_zero_one_unbiased_adam", "direct_unbiased_lamb"),
    MORE: ("unbiased_adam", "zero_one_unbiased_adam", "unbiased_lamb"),
}
ONEBIT_LAMB = DEFAULTS[2][2]
TRIED_IN_EVENTS = ("direct_unbiased_unlimited_lamb", "local_16_unbiased_adam")
FOUR_BITS = "bits_4_adam"  # over ranks, too
TRIED_AT_RATES = ("direct_zero_one_unbiased_floor_adam",)
SWEEPS = {
    REPLY: "replies of 1 bit or direct, over ranks",
    RANKS: "ranks, the same global batch",
    "event": "gradients that grow, not clipped",
    FREEZES: "share of the steps in stage 1",
    "batch": "global batch, the same steps and rate",
    RATES: "learning rate, times the task's",
    "save": "runs that are saved, and go on from what was saved",
}
FREEZE = {"adam": 0.2, "lamb": 0.3}  # share of the steps, by family that has stages

CHOSEN = "the baseline's best of four or five, factors of 2 apart, in 150 steps on one rank and another seed"

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        LanguageModel(
            "quick", "Causal language model on Python's documentation, small",
            "nothing", "a smoke test of a minute or two, too short for a verdict",
            steps=300, batch=16, lr={"adam": 1e-2, "lamb": 5e-2}, chosen="set by hand", text="python", vocabulary=256,
            width=64, layers=1, length=32, held_out=512,
        ),
        LanguageModel(
            "lm", "Causal language model",
            "BERT pre-training (1-bit Adam, section 7.1; 1-bit LAMB, section 6 and A.7)",
            "causal, from scratch, on essays and novels; theirs had 340 M parameters, 152,000 steps of 4,096 (Adam) or "
            "5,993 of 65,536 (LAMB), stage 1 in 15 % and 17 % of them, and one scale for all elements",
            steps=600, batch=32, lr={"adam": 4e-3, "lamb": 2e-2, "muon": 1.6e-2}, chosen=CHOSEN,
            sweeps=("reply", "ranks", "event", "freeze", "batch", "lr", "save"), families=("adam", "lamb", "muon"),
        ),
        LanguageModel(
            "lm-long", "A larger language model in 10,000 steps",
            "runs of many steps, of which few are in full precision", "one seed",
            steps=10_000, batch=16, lr={"adam": 1e-3}, chosen="set before any run", families=("adam",),
            variants=("adam", *DEFAULTS[2][:2]), save_every=1000, width=256, layers=4,
        ),
        LanguageModel(
            "words", "A language model of more words",
            "vocabularies of 30,000 words and more", "a vocabulary of 8,192, with a quarter as many tokens a step",
            steps=300, batch=32, lr={"adam": 2e-3}, chosen="set before any run", families=("adam",),
            variants=("adam", *DEFAULTS[2][:2]), vocabulary=8192,
        ),
        Images(
            "images", "ResNet-8",
            "ResNet-18 on CIFAR-10 (1-bit Adam, section 7.2) and ResNet-50 on CIFAR-100 (1-bit LAMB, A.8)",
            "not quite one epoch; theirs had colours, 11 and 24 million parameters, 200 and 250 epochs in batches of "
            "1,024, and stage 1 in 6.5 % and 8 % of the steps; for validation the statistics of batch norms are "
            "averaged over ranks",
            steps=400, batch=128, lr={"adam": 8e-3, "lamb": 4e-2, "sgd": 0.1}, chosen=CHOSEN, accuracy=True,
            sweeps=("reply", "ranks", "event", "freeze"), families=("adam", "lamb", "sgd"),
        ),
        Masked(
            "mlm", "BERT, masked words",
            "BERT pre-training (1-bit Adam, section 7.1; 1-bit LAMB, section 6)",
            "three layers of a checkpoint that was tuned for sentence embeddings, a vocabulary cut to its most "
            "frequent; no next-sentence objective, no dropout",
            steps=300, batch=16, lr={"adam": 5e-4, "lamb": 5e-3},
            chosen="Adam's set before any run; LAMB's the best of four, factors of 2 apart, in 100 steps of 32 on one "
            "rank and another seed",
            sweeps=("reply", "event", "freeze", "lr"),
        ),
        Samples(
            "gan", "DCGAN, distance of samples",
            "a DCGAN (1-bit Adam, section 7)",
            "grey images of 28 x 28, with their classes; two thirds of an epoch; a small classifier's features, whose "
            "Frechet distances can't be compared with others'",
            steps=600, batch=64, lr={"adam": 1e-3}, chosen="set before any run of this study, as were the measures",
            accuracy=True, families=("adam",), betas=(0.5, 0.999), measure="distance of samples",
        ),
        Sentiment(
            "sentiment", "BERT, fine-tuned",
            "fine-tuning on GLUE and SQuAD, with Adam as there (1-bit Adam, section 7.1; 1-bit LAMB, section 6)",
            "three layers of a small model, one small set, not quite one epoch, no dropout",
            steps=200, batch=32, lr={"adam": 1e-4, "lamb": 1e-3}, chosen="set before any run of this study",
            accuracy=True, families=("adam",), length=48,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """All that decides a run's result, the data apart."""

    task: str
    variant: str
    seed: int
    ranks: int
    steps: int
    batch: int  # over all ranks
    lr: float
    freeze: int | Literal["auto"] | None  # the last step of stage 1, where there is a second
    event: str = ""  # what becomes of gradients, not clipped
    save_every: int = 0  # steps, after which the run goes on from what is saved; 0 for never

    @classmethod
    def standard(cls, task: str, variant: str, seed: int) -> Run:
        t, family = TASKS[task], family_of(variant)
        freeze = round(t.steps * FREEZE[family]) if has_stages(variant) else None
        return cls(task, variant, seed, 2, t.steps, t.batch, t.lr[family], freeze, save_every=t.save_every)

    @property
    def name(self) -> str:
        """The settings in which it differs from its task's standard run."""
        usual = asdict(Run.standard(self.task, self.variant, self.seed))
        differs = [f"{key}={value}" for key, value in asdict(self).items() if value != usual[key]]
        return "-".join([self.variant, *differs, f"seed={self.seed}"])

    @property
    def config(self) -> dict[str, Any]:
        """All fields; no event and no saves are no entries."""
        none = (("event", ""), ("save_every", 0))
        return {key: value for key, value in asdict(self).items() if (key, value) not in none}

    def at(self, point: Mapping[str, Any]) -> Run:
        """Return the run with a sweep's point set. Rates are factors; a freeze is a share of the steps."""
        set_to = dict(point)
        if "lr" in point:
            set_to["lr"] = self.lr * point["lr"]
        if isinstance(point.get("freeze"), float):
            set_to["freeze"] = round(self.steps * point["freeze"])
        if self.freeze is None:
            set_to.pop("freeze", None)
        return replace(self, **set_to)


def family_of(variant: str) -> str:
    return next(family for family in FAMILIES if family in variant)


def has_stages(variant: str) -> bool:
    return variant == "naive_adam" or variant not in (*FAMILIES, *ZERO_ONE, *BETA1, *GRADIENTS)


def points(task: Task, sweep: str) -> dict[str, dict[str, Any]]:
    """What a sweep sets, by what tables call it; {} is the main comparison's."""
    match sweep:
        case "main":
            return {"": {}}
        case "reply":
            return {str(n): {"ranks": n} for n in (2, 4, 8)}
        case "ranks":
            return {str(n): {"ranks": n} for n in ((2, 4, 8, 16, 32) if task.name == "lm" else (2, 8))}
        case "event":
            return {"none": {}, **{event: {"event": event} for event in EVENTS}}
        case "save":
            return {"none": {}, "every 50 steps": {"save_every": 50}}
        case "batch":
            return {str(b): {"batch": b} for b in (task.batch // 2, task.batch, 2 * task.batch)}
        case "freeze":
            return {"10 %": {"freeze": 0.1}, "standard": {}, "50 %": {"freeze": 0.5}, "auto": {"freeze": "auto"}}
        case "lr":
            return {"x 0.5": {"lr": 0.5}, USUAL: {}, "x 2": {"lr": 2.0}, "x 4": {"lr": 4.0}}
    raise ValueError(f"sweep {sweep!r}: choose among {(MAIN, *SWEEPS)}")


def plan(
    tasks: Sequence[str], sweeps: Sequence[str], seeds: int, variants: Sequence[str] = tuple(VARIANTS)
) -> Iterator[Run]:
    """Every run once: the tasks' main comparisons first, and all of a seed before the next."""
    seen = set()
    for sweep in sweeps:
        for seed, task in itertools.product(range(seeds), tasks):
            if sweep in (MAIN, *TASKS[task].sweeps):
                for variant, label in cases(TASKS[task], sweep):
                    run = Run.standard(task, variant, seed).at(points(TASKS[task], sweep)[label])
                    once = sweep == REPLY and run.ranks >= MANY
                    if variant in variants and run not in seen and (seed == 0 or not once):
                        seen.add(run)
                        yield run


def cases(task: Task, sweep: str) -> list[tuple[str, str]]:
    """What is run: a variant and the label of a point."""
    labels, baselines = list(points(task, sweep)), [family for family in task.families if family in FREEZE]
    match sweep:
        case "main":
            found = [(v, "") for v in task.variants or VARIANTS if v not in BETA1 or task.betas != Task.betas]
        case "reply":
            found = [(v, label) for f in baselines for v in (f, f"onebit_{f}", f"direct_{f}") for label in labels]
        case "save":
            found = [*((v, labels[0]) for v in baselines)]
            found += [(v, label) for label in labels for v in DEFAULTS[2]]
        case "ranks":  # the baseline does not depend on their number
            found = [*((v, labels[0]) for v in baselines)]
            found += [(v, label) for label in labels for v in (*DEFAULTS[2 if label == "2" else MORE], FOUR_BITS)]
        case "event":
            found = [(v, label) for label in labels for v in (*baselines, *DEFAULTS[2], *TRIED_IN_EVENTS)]
        case "lr":
            found = [(v, label) for label in labels for v in (*baselines, *DEFAULTS[2], *TRIED_AT_RATES)]
        case "freeze":
            found = [(v, label) for v in (*SWEPT, ONEBIT_LAMB) for label in labels]
        case _:
            found = [(v, label) for v in SWEPT for label in labels]
    return [(v, label) for v, label in found if family_of(v) in task.families]

"""One run of the convergence study: an optimizer trains a task's model on a virtual rank."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from onebit import FreezeRule, OneBitAdam, OneBitLamb, OneBitOptimizer, ZeroOneAdam
from onebit.collectives.averaging import average_
from onebit.collectives.transport import Transport
from onebit.kernels.data.layout import WORD
from perf.convergence.ablations import (
    AdamOnFewBits,
    FrozenAdam,
    LambBasic1Bit,
    Muon,
    MuonOnFewBits,
    OnFewBits,
    SgdOnFewBits,
)
from perf.convergence.plan import (
    BETA1,
    GRADIENTS,
    LAST_LAYER,
    LOCAL,
    OPTIONS,
    TASKS,
    VARIANTS,
    ZERO_ONE,
    Run,
    family_of,
)
from perf.convergence.tasks import Items, Prepared, Task
from perf.convergence.virtual import VirtualRank

Show = Callable[[int, float], None]  # steps done, training loss
WEIGHT_DECAY = 0.01
SGD = {"momentum": 0.9, "weight_decay": 5e-4}
LR_WARMUP = 0.1  # of the steps
VALIDATIONS, RECORDS = 10, 50  # a run
MOST_APART = 250  # steps between validations
BUILDING = threading.Lock()  # torch changes a class when its first optimizer is built
OURS = {"adam": OneBitAdam, "lamb": OneBitLamb}
TORCHS: dict[str, Callable[..., torch.optim.Optimizer]]
TORCHS = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD, "muon": Muon}
ON_FEW_BITS: dict[str, Callable[..., OnFewBits]]
ON_FEW_BITS = {"adam": AdamOnFewBits, "sgd": SgdOnFewBits, "muon": MuonOnFewBits}


def lr_at(run: Run, step: int) -> float:
    """Linear warmup, then linear to 0; step counts from 1."""
    warmup = max(1, round(LR_WARMUP * run.steps))
    return run.lr * min(step / warmup, (run.steps - step + 1) / (run.steps - warmup + 1))


def event_factor(run: Run, step: int) -> float:
    """What gradients are multiplied by; step counts from 1."""
    match run.event:
        case "x 100":
            return 100.0 if 2 * step > run.steps else 1.0
        case "x 30":
            return 30.0 if run.steps < 2 * step <= 1.5 * run.steps else 1.0
    return 1.0


def enlarge_gradients(optimizer: torch.optim.Optimizer, factor: float) -> None:
    torch._foreach_mul_([p.grad for group in optimizer.param_groups for p in group["params"]], factor)


def build(
    run: Run,
    model: nn.Module,
    transport: Transport,
    betas: tuple[float, float] = Task.betas,
    apart: Sequence[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Build an optimizer for a model outside DDP: it averages gradients itself as long as it does not compress. apart:
    what is never compressed."""
    params = list(model.parameters())
    betas = (BETA1.get(run.variant, betas[0]), betas[1])
    plainly: dict[str, Any] = {"lr": run.lr, "weight_decay": WEIGHT_DECAY, "betas": betas}
    common = {**plainly, "process_group": transport}
    freeze_step = FreezeRule(window=max(1, run.steps // 20)) if run.freeze == "auto" else run.freeze
    staged = {**common, "freeze_step": freeze_step, "chunks": 1}
    family = family_of(run.variant)
    groups: list[Any] = groups_of_muon(model) if family == "muon" else params
    of_torch = {"lr": run.lr, **SGD} if family == "sgd" else plainly
    match run.variant:
        case "adam" | "beta_25_adam" | "beta_0_adam" | "sgd" | "muon":
            plain = TORCHS[family](groups, **of_torch)
            plain.register_step_pre_hook(lambda *_: average_([p.grad for p in params if p.grad is not None], transport))
            return plain
        case variant if variant in ZERO_ONE:
            options = OPTIONS[variant]
            if "local_step_clipper" in options:
                options = options | {name: round(share * run.steps) for name, share in LOCAL.items()}
            own = {id(p) for p in apart}
            groups = [{"params": [p for p in params if id(p) not in own]}, {"params": [*apart], "compress": False}]
            return ZeroOneAdam(groups, **common, chunks=1, **options)
        case variant if variant in OPTIONS:
            return OURS[family](params, **staged, **OPTIONS[variant])
        case "frozen_adam":
            assert isinstance(run.freeze, int)
            return FrozenAdam(params, freeze=run.freeze, **common)
        case variant if variant in GRADIENTS:
            warmup, options = int(run.freeze or 0), GRADIENTS[variant]
            return ON_FEW_BITS[family](groups, warmup=warmup, process_group=transport, **of_torch, **options)
        case "lamb":
            return OneBitLamb(params, **{**staged, "freeze_step": run.steps + 1})
        case "lamb_basic":
            return LambBasic1Bit(params, **staged, reply=1, norm="l1")
    raise ValueError(f"variant {run.variant!r}: choose among {VARIANTS}")


def groups_of_muon(model: nn.Module) -> list[dict[str, Any]]:
    """Group parameters: AdamW's, and Muon's, which are the matrices that are no embeddings."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {p: p.ndim == 2 and p not in tables for p in model.parameters()}
    return [{"params": [p for p, is_matrix in matrices.items() if is_matrix == of_muon]} for of_muon in (False, True)]


def build_part(run: Run, task: Task, part: nn.Module, transport: Transport) -> torch.optim.Optimizer:
    """Build an optimizer as the task has it."""
    return build(run, part, transport, task.betas, task.last_layer(part) if run.variant in LAST_LAYER else ())


def sends(optimizer: torch.optim.Optimizer) -> Literal["uncompressed", "compressed", "nothing"]:
    """What the last step has sent."""
    if isinstance(optimizer, OnFewBits):
        return "compressed" if optimizer.steps_done > optimizer.warmup else "uncompressed"
    if not isinstance(optimizer, OneBitOptimizer) or not optimizer.compressing:
        return "uncompressed"
    kinds = {"full": "uncompressed", "local": "nothing"}
    return kinds.get(optimizer.setup.algorithm.kind(optimizer.steps), "compressed")  # type: ignore[return-value]


def batch_of(items: Items, run: Run, step: int) -> tuple[Items, torch.Generator]:
    """The global batch of a step, counted from 0: the next ones of this epoch's permutation."""
    a_epoch = len(items[0]) // run.batch
    epoch, place = divmod(step, a_epoch)
    order = torch.randperm(len(items[0]), generator=torch.Generator().manual_seed(1000 * run.seed + epoch))
    picked = order[place * run.batch : (place + 1) * run.batch]
    return tuple(x[picked] for x in items), torch.Generator().manual_seed(10**6 * (run.seed + 1) + step)


def share(items: Items, rank: int, size: int) -> Items:
    return tuple(x.tensor_split(size)[rank] for x in items)


def mean_over_ranks(values: list[float], transport: Transport) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    transport.all_sum(found, "the mean of numbers")
    return found.div_(transport.size).tolist()


def validate(task: Task, model: nn.Module, valid: Items, transport: Transport) -> tuple[float, float]:
    """Loss and accuracy over all of `valid`; statistics of batch norms are the mean over ranks."""
    average_([b for b in model.buffers() if b.is_floating_point()], transport)
    model.eval()
    with torch.no_grad():
        own = share(valid, transport.rank, transport.size)
        found = task.validate(model, own, lambda values: mean_over_ranks(values, transport))
    model.train()
    return found


@dataclass
class SoFar:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0
    uncompressed: int = 0  # steps
    since: list[float] = field(default_factory=list)  # losses of steps that no curve has
    train: list[tuple[int, float]] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)
    ratio: list[tuple[float, ...]] = field(default_factory=list)
    sent: list[tuple[int, int, float]] = field(default_factory=list)  # step, uncompressed steps, bytes of the others


def train(
    run: Run, prepared: Prepared, model: nn.Module, transport: VirtualRank, show: Show, kept: Path
) -> dict[str, Any]:
    """The record of a run. Each `save_every` steps it is saved in `kept`, and goes on with new optimizers that load
    what is there; so does a run that was interrupted."""
    task, so_far = TASKS[run.task], SoFar()
    while so_far.step < run.steps:
        start = time.perf_counter()
        with BUILDING:
            optimizers = [build_part(run, task, part, transport) for part in task.parts(model)]
        if (saved := load(run, kept)) is not None:
            so_far = SoFar(**saved["so_far"])
            model.load_state_dict(saved["model"])
            for each, state in zip(optimizers, saved["optimizers"], strict=True):
                each.load_state_dict(state)
        stop = min(run.steps, so_far.step + (run.save_every or run.steps))
        train_on(run, stop, prepared, model, optimizers, transport, show, so_far)
        so_far.seconds += time.perf_counter() - start
        if stop < run.steps:
            save(run, kept, model, optimizers, transport, so_far)
    final_loss, accuracy = validate(task, model, prepared.valid, transport)
    return {
        "data": prepared.about,
        "loss": final_loss,
        "accuracy": accuracy if task.accuracy else None,
        "train": so_far.train,
        "valid": so_far.valid,
        "ratio": so_far.ratio,
        "sent": so_far.sent,
        "seconds": so_far.seconds,
        **volume(run, task.parts(model), optimizers, so_far.uncompressed, transport),
    }


def train_on(
    run: Run,
    stop: int,
    prepared: Prepared,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    transport: Transport,
    show: Show,
    so_far: SoFar,
) -> None:
    """Train up to step `stop`, after which all ranks have the same state."""
    task, optimizer = TASKS[run.task], optimizers[0]
    ours = [each for each in optimizers if isinstance(each, OneBitOptimizer)]
    for each in optimizers if run.event else ():
        each.register_step_pre_hook(lambda each, *_: enlarge_gradients(each, event_factor(run, step)))
    some = tuple(x[::4] for x in prepared.valid)  # for the curve; the final loss is of all
    for step in range(so_far.step + 1, stop + 1):
        items, generator = batch_of(prepared.train, run, step - 1)
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = lr_at(run, step)
        loss = task.step(model, optimizers, share(task.draw(items, generator), transport.rank, transport.size))
        so_far.uncompressed += sends(optimizer) == "uncompressed"
        so_far.since.append(loss.item())
        if step % max(1, run.steps // RECORDS) == 0:
            so_far.train.append((step, mean_over_ranks([sum(so_far.since) / len(so_far.since)], transport)[0]))
            so_far.since.clear()
            if transport.rank == 0:
                show(*so_far.train[-1])
        if step % max(1, min(run.steps // VALIDATIONS, MOST_APART)) == 0:
            with ExitStack() as at_syncs:  # where all ranks have the same parameters
                for each in ours:
                    at_syncs.enter_context(each.at_last_sync())
                so_far.valid.append((step, validate(task, model, some, transport)[0]))
            sent = compressed_bytes(optimizers, step - so_far.uncompressed, transport) if run.ranks > 1 else 0.0
            so_far.sent.append((step, so_far.uncompressed, sent))
            if isinstance(optimizer, OneBitLamb) and optimizer.compressing:
                so_far.ratio.append((step, *ratios(optimizer)))
    so_far.step = stop
    for each in ours:
        each.synchronize()


def save(
    run: Run,
    kept: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    transport: VirtualRank,
    so_far: SoFar,
) -> None:
    """Rank 0 writes for all: their states are the same."""
    if transport.rank == 0:
        kept.parent.mkdir(parents=True, exist_ok=True)
        states = [each.state_dict() for each in optimizers]
        found = {"config": run.config, "so_far": vars(so_far), "model": model.state_dict(), "optimizers": states}
        torch.save(found, partial := kept.with_suffix(".part"))
        partial.replace(kept)
    transport.wait_for_all()


def load(run: Run, kept: Path) -> Any:
    """What `save` has written, where it is of these settings."""
    if not run.save_every or not kept.exists():
        return None
    saved = torch.load(kept, weights_only=True)
    return saved if saved["config"] == run.config else None


def ratios(optimizer: OneBitLamb) -> list[float]:
    """What 1-bit LAMB scales its coefficients by: over parameters, the 10th, 50th and 90th percentile."""
    found = torch.tensor([of["ratio"] for of in optimizer.diagnostics().values()])
    return found.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()


def volume(
    run: Run,
    parts: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    uncompressed: int,
    transport: Transport,
) -> dict[str, Any]:
    """Elements, and those that blocks of their own make of them; bytes that a rank has sent in compressed steps."""
    numels = [p.numel() for part in parts for p in part.parameters()]
    sent = compressed_bytes(optimizers, run.steps - uncompressed, transport) if run.ranks > 1 else 0.0
    return {
        "elements": sum(numels),
        "padded": sum(math.ceil(n / WORD) * WORD for n in numels),
        "padded_to": WORD,
        "uncompressed_steps": uncompressed,
        "compressed_bytes": sent,
        "skipped_steps": int(sum(getattr(optimizer, "skipped_steps", 0) for optimizer in optimizers)),
    }


def compressed_bytes(optimizers: Sequence[torch.optim.Optimizer], steps: int, transport: Transport) -> float:
    """What a rank has sent in compressed steps, of which there were so many: the mean over ranks."""
    ours = [optimizer for optimizer in optimizers if isinstance(optimizer, OneBitOptimizer)]
    apart = sum(sum(state.numels) for optimizer in ours for state in optimizer.run.state.uncompressed)
    own = float(sum(getattr(optimizer, "wire_bytes", 0) for optimizer in optimizers))
    return mean_over_ranks([own + steps * full_step_bytes(apart, transport.size)], transport)[0]


def full_step_bytes(elements: int, ranks: int, bits: int = 32) -> float:
    """What a rank sends where numbers of so many bits are averaged by a ring all-reduce."""
    return elements * bits / 8 * 2 * (ranks - 1) / ranks

"""One run of the convergence study: an optimizer trains a task's model on a virtual rank."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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

Show = Callable[[int, float], None]  # steps done, training loss
WEIGHT_DECAY = 0.01
SGD = {"momentum": 0.9, "weight_decay": 5e-4}
LR_WARMUP = 0.1  # of the steps
VALIDATIONS, RECORDS = 10, 50  # a run
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


def train(run: Run, prepared: Prepared, model: nn.Module, transport: Transport, show: Show) -> dict[str, Any]:
    """The record of a run."""
    task = TASKS[run.task]
    with BUILDING:
        optimizers = [build_part(run, task, part, transport) for part in task.parts(model)]
    optimizer = optimizers[0]
    for each in optimizers if run.event else ():
        each.register_step_pre_hook(lambda each, *_: enlarge_gradients(each, event_factor(run, step)))
    some = tuple(x[::4] for x in prepared.valid)  # for the curve; the final loss is of all
    train_curve, valid_curve, ratio_curve = [], [], []
    start, since, counted = time.perf_counter(), [], Counter[str]()
    for step in range(1, run.steps + 1):
        items, generator = batch_of(prepared.train, run, step - 1)
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = lr_at(run, step)
        loss = task.step(model, optimizers, share(task.draw(items, generator), transport.rank, transport.size))
        counted[sends(optimizer)] += 1
        if run.save_every and step % run.save_every == 0:
            for each in optimizers:
                if isinstance(each, OneBitOptimizer):
                    each.synchronize()
        since.append(loss.item())
        if step % max(1, run.steps // RECORDS) == 0:
            train_curve.append((step, mean_over_ranks([sum(since) / len(since)], transport)[0]))
            since = []
            if transport.rank == 0:
                show(*train_curve[-1])
        if step % max(1, run.steps // VALIDATIONS) == 0:
            with ExitStack() as at_syncs:  # where all ranks have the same parameters
                for each in optimizers:
                    if isinstance(each, OneBitOptimizer):
                        at_syncs.enter_context(each.at_last_sync())
                valid_curve.append((step, validate(task, model, some, transport)[0]))
            if isinstance(optimizer, OneBitLamb) and optimizer.compressing:
                ratio_curve.append((step, *ratios(optimizer)))
    for each in optimizers:
        if isinstance(each, OneBitOptimizer):
            each.synchronize()
    final_loss, accuracy = validate(task, model, prepared.valid, transport)
    return {
        "data": prepared.about,
        "loss": final_loss,
        "accuracy": accuracy if task.accuracy else None,
        "train": train_curve,
        "valid": valid_curve,
        "ratio": ratio_curve,
        "seconds": time.perf_counter() - start,
        **volume(run, task.parts(model), optimizers, counted["uncompressed"], transport),
    }


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

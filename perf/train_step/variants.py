"""What the training step is measured and trained with: a model, and the ways of averaging its gradients.

PowerSGD is used as torch documents it: error feedback and warm start on, plain all-reduce for as many steps as 1-bit
Adam's stage 1 takes, the default compression rate below which a tensor is sent as it is. Its hook starts a bucket's
second collective when the first has ended, so that with Gloo, whose threads end buckets in any order, ranks would send
them in different orders and hang: there the model is one bucket.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from onebit import OneBitAdam, OneBitLamb, ZeroOneAdam, attach, compress_gradients
from onebit.cli.demo.model import Text, Transformer, loss_of
from onebit.collectives.transport import transport_for
from onebit.collectives.waits import Waits
from onebit.kernels.data.wire import Bits
from onebit.optim.schedule import SyncSchedule, VarianceSchedule
from onebit.optim.zero_one import ZeroOne
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel import compression
from onebit.parallel.hooks import leave_as_is
from perf.learn.model import gpt2
from perf.learn.plan import GPT2_SMALL, REHEARSAL
from perf.learn.plan import Shape as Gpt2Shape
from perf.train_step.diloco import DiLoCo, LocalSGD
from perf.train_step.torchft import TorchftDiLoCo, missing

BETAS = (0.9, 0.999)  # torch's and the papers'
NEVER = 10**9  # a freeze step that no run reaches
WEIGHT_DECAY = 0.01
ONE_BUCKET_MB = 2**20
Kinds = Callable[[int, int], list[str]]
Model = DistributedDataParallel


@dataclass(frozen=True)
class Shape:
    """The shape of the model and of a rank's batch. 6.3 M elements by default: sending takes longer than a link's
    burst."""

    width: int = 256
    layers: int = 8
    batch: int = 4  # windows a rank
    gpt2: Gpt2Shape | None = None  # in place of width and layers: bf16 autocast, random tokens, for times alone

    def windows(self, text: Text, source: torch.Generator) -> Tensor:
        if self.gpt2 is not None:
            return torch.randint(self.gpt2.vocabulary, (self.batch, self.gpt2.length + 1), generator=source)
        return text.batch(self.batch, source)

    def loss(self, model: nn.Module, windows: Tensor) -> Tensor:
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self.gpt2 is not None):
            return loss_of(model, windows)

    def plain(self, text: Text, device: torch.device, seed: int = 0) -> Transformer:
        torch.manual_seed(seed)
        if self.gpt2 is not None:
            return gpt2(self.gpt2).to(device)
        return Transformer(text.letters, self.width, self.layers, heads=self.width // 32).to(device)

    def model(self, text: Text, device: torch.device, seed: int = 0, one_bucket: bool = False) -> Model:
        model = self.plain(text, device, seed)
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=ONE_BUCKET_MB if one_bucket else None)


TEXT = "text"  # the model of width and layers, a token a character
GPT2S = {"gpt2": GPT2_SMALL.shape, "gpt2-tiny": REHEARSAL.shape}


@dataclass(frozen=True)
class Trainee:
    model: Model
    optimizer: torch.optim.Optimizer
    compressing: Callable[[], bool]

    @property
    def kind(self) -> str:
        """The kind of the coming step, if an optimizer takes steps of several; those of AdamW are "dense"."""
        optimizer = self.optimizer
        if isinstance(optimizer, ZeroOneAdam):
            return optimizer.schedule.kind if optimizer.compressing else "dense"
        return optimizer.kind if isinstance(optimizer, LocalSGD) else "dense"

    @property
    def waits(self) -> Waits:
        """The count of the coming step's waits for messages; an optimizer of onebit counts them itself."""
        return self.optimizer.pay_off.waits if isinstance(self.optimizer, OneBitOptimizer) else Waits()

    def clip(self, norm: float) -> None:
        """The gradients of the coming step."""
        if isinstance(self.optimizer, OneBitOptimizer):
            self.optimizer.clip_grad_norm_(norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def synchronize(self) -> None:
        """All ranks have the same parameters."""
        if isinstance(self.optimizer, (OneBitOptimizer, LocalSGD)):
            self.optimizer.synchronize()

    def at_last_sync(self) -> AbstractContextManager[None]:
        """Put parameters meanwhile to what they were the last time that ranks had the same."""
        return (
            self.optimizer.at_last_sync() if isinstance(self.optimizer, (OneBitOptimizer, LocalSGD)) else nullcontext()
        )


@dataclass(frozen=True)
class Variant:
    """An optimizer and what carries its gradients or its momentum."""

    title: str
    optimizer: type[torch.optim.Optimizer]
    hook: Callable[..., Any] | None = None  # of DDP
    sends: torch.dtype = torch.float32  # what its all-reduce has to add
    rank: int = 0  # of PowerSGD's matrices
    sooner: int = 1  # PowerSGD begins so many times as soon as others freeze
    stage: int = 1
    bits: Bits | None = None  # of compressed gradients, after the first steps
    before: str = "fp32"  # the variant that it is like until it compresses
    options: Mapping[str, Any] = field(default_factory=dict)  # of an optimizer of onebit, or of DiLoCo
    times: str | None = None  # only steps of this kind
    parts: Mapping[str, str] = field(default_factory=dict)  # where a run's steps differ: by kind, the variant timed
    kinds: Kinds | None = None  # of the first so many steps of a run, with this freeze

    @property
    def compresses(self) -> bool:
        return self.rank > 0 or self.stage == 2 or self.bits is not None

    @property
    def impossible(self) -> str | None:
        """Why it can't be built here, if so."""
        return missing() if issubclass(self.optimizer, TorchftDiLoCo) else None

    @property
    def one_bucket(self) -> bool:
        """Return whether all gradients must be in one bucket."""
        return self.rank > 0 and dist.get_backend() == "gloo"

    def last_full(self, freeze: int) -> int:
        """The step before PowerSGD begins, its third at the earliest, or compressed gradients."""
        return compression.UNCOMPRESSED if self.bits is not None else max(2, freeze // self.sooner)

    def build(self, model: Model, lr: float, freeze: int) -> Trainee:
        """`freeze`: the last step in which gradients are averaged as they are."""
        common: dict[str, Any] = {"lr": lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
        if issubclass(self.optimizer, OneBitOptimizer):
            last = freeze if self.stage == 2 else NEVER
            if issubclass(self.optimizer, ZeroOneAdam):
                own: dict[str, Any] = {
                    name: value(freeze) if callable(value) else value for name, value in self.options.items()
                }
            else:
                own = {"freeze_step": last, **self.options}
            onebits = self.optimizer(model.parameters(), **common, **own)
            attach(model, onebits)
            return Trainee(model, onebits, lambda: onebits.compressing)
        if issubclass(self.optimizer, LocalSGD):
            model.register_comm_hook(None, lambda _, bucket: leave_as_is(bucket))
            alone = self.optimizer(model.parameters(), transport_for(), **common, fused=True, **self.options)  # type: ignore[arg-type]
            return Trainee(model, alone, lambda: False)
        optimizer = self.optimizer(model.parameters(), **common, fused=True)  # type: ignore[call-arg]
        if self.rank:
            state = PowerSGDState(None, self.rank, self.last_full(freeze))
            model.register_comm_hook(state, powerSGD_hook)
            return Trainee(model, optimizer, lambda: bool(state.error_dict))
        if self.bits is not None:
            ours = compress_gradients(model, self.bits)
            return Trainee(model, optimizer, lambda: ours.compressing)
        if self.hook:
            model.register_comm_hook(None, self.hook)
        return Trainee(model, optimizer, lambda: False)


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """torch's own; DDP refuses that by name on any backend but NCCL, though Gloo adds bf16."""
    return default_hooks.bf16_compress_hook(group, bucket)


POWERSGD_SOONER = 7  # PowerSGD needs no variance to freeze: after a seventh of the steps that 1-bit Adam waits
RANKS = (1, 4, 16)  # of PowerSGD's matrices
ADAMW, HALF, BRAIN = torch.optim.AdamW, torch.float16, torch.bfloat16
IN_BF16 = {"gradient_dtype": BRAIN}
L1 = {"norm": "l1"}  # as the records have it
MEAN_SIZE, UNBIASED = {**IN_BF16, **L1}, {**IN_BF16, "norm": "unbiased"}
SOON = {**MEAN_SIZE, "var_update_scaler": 4}  # steps of both kinds: eight full ones from 7 to 29
SOON_LOCAL = {
    **MEAN_SIZE, "var_update_scaler": 1, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 3,
}  # fmt: skip
LOCAL = {"var_freeze_step": lambda freeze: freeze, "local_step_scaler": lambda freeze: max(1, freeze // 3)}
ZERO_ONE = {
    "dense": "zero-one-full", "full": "zero-one-full", "1 bit": "zero-one-bit", "local": "zero-one-alone",
    "sync": "zero-one-sync",
}  # fmt: skip


def zero_one_kinds(steps: int, freeze: int) -> list[str]:
    return [ZeroOne(VarianceSchedule(4), None).kind(step) for step in range(1, steps + 1)]


def local_kinds(steps: int, freeze: int) -> list[str]:
    algorithm = ZeroOne(VarianceSchedule(4, freeze), SyncSchedule(freeze, max(1, freeze // 3), 16))
    return [algorithm.kind(step) for step in range(1, steps + 1)]


def diloco(title: str, optimizer: type[LocalSGD], outer: str) -> Variant:
    def kinds(steps: int, freeze: int) -> list[str]:
        return ["local" if step % 16 else "sync" for step in range(1, steps + 1)]

    parts = {"local": "diloco-alone", "sync": outer}
    return Variant(f"{title}, every 16 steps", optimizer, parts=parts, kinds=kinds)


def powersgd_soon(rank: int) -> Variant:
    """Its steps are timed as those of the variant that begins later."""

    def kinds(steps: int, freeze: int) -> list[str]:
        full = variant.last_full(freeze)
        return ["full" if step <= full else "low rank" for step in range(1, steps + 1)]

    parts = {"full": "fp32", "low rank": f"powersgd-{rank}"}
    variant = Variant(
        f"PowerSGD, rank {rank}, soon", ADAMW, rank=rank, sooner=POWERSGD_SOONER, parts=parts, kinds=kinds
    )
    return variant


def few_bits(bits: Bits) -> Variant:
    """torch's AdamW with compressed gradients, after the first steps of a run."""

    def kinds(steps: int, freeze: int) -> list[str]:
        return ["full" if step <= compression.UNCOMPRESSED else "few bits" for step in range(1, steps + 1)]

    parts = {"full": "fp32", "few bits": f"adamw-{bits}"}
    return Variant(f"AdamW, {bits} bits", ADAMW, bits=bits, parts=parts, kinds=kinds)


def one_bit_adam(title: str, before: str = "adam-1", **options: Any) -> Variant:
    """Stage 2."""
    sends = options.get("gradient_dtype", torch.float32)
    return Variant(f"1-bit Adam{title}", OneBitAdam, sends=sends, stage=2, before=before, options={**L1, **options})


def zero_one_adam(
    title: str, options: Mapping[str, Any], times: str | None = None, kinds: Kinds | None = None
) -> Variant:
    parts = ZERO_ONE if kinds else {}
    own = {"sends": BRAIN, "stage": 2, "options": options, "times": times, "parts": parts, "kinds": kinds}
    return Variant(f"0/1 Adam, bf16{title}", ZeroOneAdam, **own)


VARIANTS: dict[str, Variant] = {
    "fp32": Variant("fp32", ADAMW),
    "fp16": Variant("fp16", ADAMW, default_hooks.fp16_compress_hook, HALF),
    "bf16": Variant("bf16", ADAMW, bf16_hook, BRAIN),
    "adamw-8": few_bits(8),
    "adamw-4": few_bits(4),
    **{f"powersgd-{rank}": Variant(f"PowerSGD, rank {rank}", ADAMW, rank=rank) for rank in RANKS},
    **{f"powersgd-{rank}-soon": powersgd_soon(rank) for rank in RANKS},
    "adam-1": Variant("1-bit Adam, stage 1", OneBitAdam, options=L1),
    "adam-2": one_bit_adam(", stage 2"),
    "adam-2-reply-1": one_bit_adam(", stage 2, `reply=1`", reply=1),
    "adam-2-overlap": one_bit_adam(", stage 2, overlap", overlap=True),
    "adam-1-bf16": Variant("1-bit Adam, bf16, stage 1", OneBitAdam, sends=BRAIN, options=MEAN_SIZE),
    "adam-2-bf16": one_bit_adam(", bf16, stage 2", "adam-1-bf16", **IN_BF16),
    "lamb-1": Variant("1-bit LAMB, stage 1", OneBitLamb, options=L1),
    "lamb-2": Variant("1-bit LAMB, stage 2", OneBitLamb, stage=2, before="lamb-1", options=L1),
    "zero-one-full": zero_one_adam(", full step", SOON, "full"),
    "zero-one-bit": zero_one_adam(", 1 bit", SOON, "1 bit"),
    "zero-one-alone": zero_one_adam(", local step", SOON_LOCAL, "local"),
    "zero-one-sync": zero_one_adam(", sync", SOON_LOCAL, "sync"),
    "zero-one": zero_one_adam("", MEAN_SIZE, kinds=zero_one_kinds),
    "zero-one-local": zero_one_adam(", local steps", {**LOCAL, **MEAN_SIZE}, kinds=local_kinds),
    # timed as with mean sizes: messages are as long
    "zero-one-unbiased": zero_one_adam(", norm unbiased", UNBIASED, kinds=zero_one_kinds),
    "diloco-alone": Variant("DiLoCo-like, local step", DiLoCo, options={"every": 3}, times="local"),
    "diloco-sync": Variant("DiLoCo-like, outer step", DiLoCo, options={"every": 3}, times="sync"),
    "diloco": diloco("DiLoCo-like", DiLoCo, "diloco-sync"),
    "torchft-sync": Variant("DiLoCo, torchft's, outer step", TorchftDiLoCo, options={"every": 3}, times="sync"),
    "torchft": diloco("DiLoCo, torchft's", TorchftDiLoCo, "torchft-sync"),
}
UNCOMPRESSED, BASELINE, OURS, SPACED = "fp32", "fp16", "adam-2", "zero-one"
POWERSGD = ("powersgd-1", "powersgd-4")  # whose last loss ours are to reach sooner
OF_OTHERS = (
    "adam-1",
    "adam-1-bf16",
    "adam-2-overlap",
    "lamb-1",
    "torchft",
)  # stages, and what has the losses of others
TRAINED = tuple(name for name, variant in VARIANTS.items() if not variant.times and name not in OF_OTHERS)
TRAIN_AS = {"adam-2-overlap": OURS}  # the same numbers bit for bit, in another time


def timed_variants(names: Sequence[str]) -> list[str]:
    """Each once; those whose steps differ by what their steps are timed as."""
    return list(dict.fromkeys(part for name in names for part in (VARIANTS[name].parts.values() or [name])))

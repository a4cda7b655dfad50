"""What the training step is measured and trained with: a model, and the ways of averaging its gradients.

PowerSGD is used as torch documents it: error feedback and warm start on, plain all-reduce for as many steps as 1-bit
Adam's stage 1 takes, the default compression rate below which a tensor is sent as it is. Its hook starts a bucket's
second collective when the first has ended, so that with Gloo, whose threads end buckets in any order, ranks would send
them in different orders and hang: there the model is one bucket.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from onebit import OneBitAdam, OneBitLamb, attach
from onebit.cli.demo.model import Text, Transformer
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import Transport, Work
from onebit.optim.optimizer import OneBitOptimizer

BETAS = (0.9, 0.999)  # torch's and the papers'
NEVER = 10**9  # a freeze step that no run reaches
WEIGHT_DECAY = 0.01
ONE_BUCKET_MB = 2**20
Mark = Callable[[], Any]
Model = DistributedDataParallel


@dataclass(frozen=True)
class Shape:
    """Of the model and of a rank's batch. 6.3 M elements by default: sending takes longer than a link's burst."""

    width: int = 256
    layers: int = 8
    batch: int = 4  # windows a rank

    def model(self, text: Text, device: torch.device, seed: int = 0, one_bucket: bool = False) -> Model:
        torch.manual_seed(seed)
        model = Transformer(text.letters, self.width, self.layers, heads=self.width // 32).to(device)
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=ONE_BUCKET_MB if one_bucket else None)


@dataclass(frozen=True)
class Trainee:
    model: Model
    optimizer: torch.optim.Optimizer
    compressing: Callable[[], bool]


@dataclass(frozen=True)
class Variant:
    """An optimizer and what carries its gradients or its momentum."""

    title: str
    optimizer: type[torch.optim.Optimizer]
    hook: Callable[..., Any] | None = None  # of DDP
    sends: torch.dtype = torch.float32  # what its all-reduce has to add
    rank: int = 0  # of PowerSGD's matrices
    stage: int = 1
    before: str = "fp32"  # the variant that it is like until it compresses
    options: Mapping[str, Any] = field(default_factory=dict)  # of an optimizer of onebit

    @property
    def compresses(self) -> bool:
        return self.rank > 0 or self.stage == 2

    @property
    def one_bucket(self) -> bool:
        """Whether all gradients must be in one."""
        return self.rank > 0 and dist.get_backend() == "gloo"

    def build(self, model: Model, lr: float, freeze: int, transport: Transport) -> Trainee:
        """`freeze`: the last step in which gradients are averaged as they are."""
        common: dict[str, Any] = {"lr": lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
        if issubclass(self.optimizer, OneBitOptimizer):
            last = freeze if self.stage == 2 else NEVER
            own = {"freeze_step": last, "process_group": transport, **self.options}
            ours = self.optimizer(model.parameters(), **common, **own)
            attach(model, ours)
            return Trainee(model, ours, lambda: ours.compressing)
        optimizer = self.optimizer(model.parameters(), **common, fused=True)  # type: ignore[call-arg]
        if self.rank:
            state = PowerSGDState(None, self.rank, max(2, freeze))
            model.register_comm_hook(state, powerSGD_hook)
            return Trainee(model, optimizer, lambda: bool(state.error_dict))
        if self.hook:
            model.register_comm_hook(None, self.hook)
        return Trainee(model, optimizer, lambda: False)


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """torch's own; DDP refuses that by name on any backend but NCCL, though Gloo adds bf16."""
    return default_hooks.bf16_compress_hook(group, bucket)


ADAMW, HALF, BRAIN = torch.optim.AdamW, torch.float16, torch.bfloat16
IN_BF16 = {"gradient_dtype": BRAIN}
VARIANTS = {
    "fp32": Variant("fp32", ADAMW),
    "fp16": Variant("fp16", ADAMW, default_hooks.fp16_compress_hook, HALF),
    "bf16": Variant("bf16", ADAMW, bf16_hook, BRAIN),
    "powersgd-1": Variant("PowerSGD, rank 1", ADAMW, rank=1),
    "powersgd-4": Variant("PowerSGD, rank 4", ADAMW, rank=4),
    "adam-1": Variant("1-bit Adam, stage 1", OneBitAdam),
    "adam-2": Variant("1-bit Adam, stage 2", OneBitAdam, stage=2, before="adam-1"),
    "adam-2-reply-1": Variant(
        "1-bit Adam, stage 2, `reply=1`", OneBitAdam, stage=2, before="adam-1", options={"reply": 1}
    ),
    "adam-2-overlap": Variant(
        "1-bit Adam, stage 2, overlap", OneBitAdam, stage=2, before="adam-1", options={"overlap": True}
    ),
    "adam-1-bf16": Variant("1-bit Adam, bf16, stage 1", OneBitAdam, sends=BRAIN, options=IN_BF16),
    "adam-2-bf16": Variant(
        "1-bit Adam, bf16, stage 2", OneBitAdam, sends=BRAIN, stage=2, before="adam-1-bf16", options=IN_BF16
    ),
    "lamb-1": Variant("1-bit LAMB, stage 1", OneBitLamb),
    "lamb-2": Variant("1-bit LAMB, stage 2", OneBitLamb, stage=2, before="lamb-1"),
}
UNCOMPRESSED, BASELINE, OURS = "fp32", "fp16", "adam-2"
POWERSGD = ("powersgd-1", "powersgd-4")
TRAINED = (UNCOMPRESSED, *POWERSGD, OURS, "adam-2-reply-1", "adam-2-bf16")  # whose losses are compared
TRAIN_AS = {"adam-2-overlap": OURS}  # the same numbers bit for bit, in another time


class TimedTransport:
    """A transport that marks the start and the end of each wait."""

    def __init__(self, mark: Mark, inner: Transport | None = None) -> None:
        self.inner, self._mark = transport_for(inner), mark
        self.rank, self.size, self.name = self.inner.rank, self.inner.size, self.inner.name
        self.waits: list[tuple[Any, Any]] = []

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return TimedWork(self, self.inner.all_to_all(out, sent, phase))

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return TimedWork(self, self.inner.all_gather(out, sent, phase))

    def all_sum(self, values: Tensor, phase: str) -> Work:
        return TimedWork(self, self.inner.all_sum(values, phase))

    def all_max(self, values: Tensor, phase: str) -> None:
        self.time(lambda: self.inner.all_max(values, phase))

    def split(self, color: int) -> Transport:
        return TimedTransport(self._mark, self.inner.split(color))

    def places(self, of: Transport) -> list[int]:
        return self.inner.places(of)

    def duplicate(self) -> Transport:
        """Its waits count as this one's: `step` waits for the thread that waits."""
        other = TimedTransport(self._mark, self.inner.duplicate())
        other.waits = self.waits
        return other

    def time(self, wait: Callable[[], None]) -> None:
        before = self._mark()
        wait()
        self.waits.append((before, self._mark()))


@dataclass(frozen=True)
class TimedWork:
    transport: TimedTransport
    work: Work

    def wait(self) -> None:
        self.transport.time(self.work.wait)

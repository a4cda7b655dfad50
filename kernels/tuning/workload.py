"""Arguments to run every pass on, and the bytes that each one moves: for the tuner, benchmarks and tests.

The values are random and stay of their size however often a pass runs, so that neither zeros, denormals nor
infinities flatter a measurement. Buffers are made when a pass first needs them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from onebit.kernels import Passes
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import BLOCK_SIZE, Layout, Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, Messages, Norm, Scale

BIT = 1 / 8  # bytes
HYPER = Hyper.at_step(1000, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


@dataclass(frozen=True)
class Pass:
    """One pass with its arguments bound, and the algorithmic bytes that one run of it reads and writes."""

    name: str
    run: Callable[[], None]
    bytes: int


def bytes_per_element(
    name: str, itemsize: int, *, master: bool, packed: bool, ranks: int, masked: bool = False
) -> float:
    """Bytes that a pass moves for one element; scales (1/64 bit with blocks of 2048) are left out.

    `itemsize` is that of parameters and gradients. `packed`: momentum is kept as messages, not in fp32. `masked`: the
    passes that take it get a mask of live coordinates.
    """
    momentum, live = BIT if packed else 4, BIT if masked else 0
    parameter = 4 + 4 + itemsize if master else 2 * itemsize
    match name:
        case "compress":
            return itemsize + 4 + momentum + 4 + BIT + live
        case "average":
            return ranks * BIT + 4 + 4 + BIT + live
        case "decode":
            return BIT + itemsize
        case "scan":
            return itemsize
        case "adam_warmup":
            return itemsize + 4 * 4 + parameter
        case "adam_update" | "lamb_update":
            return BIT + 4 + parameter
        case "lamb_warmup":  # read for the norms, and again for the update
            return itemsize + 4 * 4 + (4 if master else itemsize) + 2 * 4 + parameter
        case "lamb_statistics":
            return BIT + momentum + 3 * 4 + live
    raise ValueError(f"no pass is called {name!r}: the passes are {', '.join(PASSES)}")


PASSES = (
    "scan", "compress", "average", "decode", "adam_warmup", "adam_update",
    "lamb_warmup", "lamb_statistics", "lamb_update",
)  # fmt: skip


class Workload:
    """A model of `numels` elements a parameter, in the middle of training over `ranks` ranks.

    `average` works on one shard, 1/ranks of the blocks; the other passes on all of them. `masked`: some coordinates
    are dead. `scaled`: messages hold a gamma of its own times each parameter's momentum.
    """

    def __init__(
        self,
        numels: int | Sequence[int],
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.float32,
        scale: Scale = "block",
        norm: Norm = "l1",
        ranks: int = 8,
        packed: bool = True,
        master: bool | None = None,
        masked: bool = False,
        scaled: bool = False,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        sizes = [numels] if isinstance(numels, int) else list(numels)
        self.device, self.dtype, self.packed = torch.device(device), dtype, packed
        self.masked, self.scaled = masked, scaled
        self.with_master = dtype != torch.float32 if master is None else master
        self.layout = Layout(sizes, block_size=block_size, ranks=ranks)
        self.format = Format.of(self.layout, scale, norm)
        self.span, self.shard = self.layout.all(), self.layout.shard(0, 0)

    def passes(self, backend: ModuleType | Passes) -> dict[str, Pass]:
        """Every pass of a backend (`cpu`, `gpu` or `reference`), in the order of a step."""
        w = self
        runs: dict[str, Callable[[], None]] = {
            "scan": lambda: backend.scan(w.span, w.grads, w.hyper, w.flags, w.squares),
            "compress": lambda: backend.compress(
                w.span, w.grads, w.momentum, w.residual, w.hyper, w.flags, w.sent, live=w.live, gamma=w.gamma
            ),
            "average": lambda: backend.average(
                w.shard, w.received, w.server_residual, w.reply, live=w.live_of_shard
            ),
            "decode": lambda: backend.decode(w.span, w.replies, w.decoded),
            "adam_warmup": lambda: backend.adam_warmup(
                w.span, w.params, w.grads, w.exp_avg, w.exp_avg_sq, w.master, w.hyper, w.flags
            ),
            "adam_update": lambda: backend.adam_update(w.span, w.params, w.d, w.replies, w.master, w.hyper),
            "lamb_warmup": lambda: backend.lamb_warmup(
                w.span, w.params, w.grads, w.exp_avg, w.exp_avg_sq, w.master, w.hyper, w.flags,
                w.warmup_state,
                coeff_beta=0.9, min_coeff=0.01, max_coeff=0.3,
            ),
            "lamb_statistics": lambda: backend.lamb_statistics(
                w.span, w.replies, w.momentum, w.d, w.exp_avg_sq, w.hyper, w.statistics_state,
                factor_min=0.5, factor_max=4.0, factor_threshold=0.1, live=w.live, gamma=w.gamma,
            ),
            "lamb_update": lambda: backend.adam_update(
                w.span, w.params, w.d, w.replies, w.master, w.hyper, w.statistics_state.coefficient
            ),
        }  # fmt: skip
        return {name: Pass(name, run, self._bytes(name)) for name, run in runs.items()}

    def outputs(self) -> dict[str, Tensor]:
        """Every tensor that some pass writes; of flat state the valid elements."""
        found = {
            "flags": self.flags,
            "squares": self.squares,
            "exp_avg": self._valid(self.exp_avg, self.span),
            "exp_avg_sq": self._valid(self.exp_avg_sq, self.span),
            "residual": self._valid(self.residual.value, self.span),
            "server_residual": self._valid(self.server_residual.value, self.shard),
            "average.coefficient": self.warmup_state.coefficient,
            "average.average": self.warmup_state.average,
            "statistics.coefficient": self.statistics_state.coefficient,
            "statistics.ratio": self.statistics_state.ratio,
        }
        for name, pointers in (("parameter", self.params), ("decoded", self.decoded)):
            found |= {f"{name}.{i}": t for i, t in enumerate(pointers.tensors) if t is not None}
        for name, messages in (("sent", self.sent), ("reply", self.reply)):
            found |= {
                f"{name}.header": messages.header,
                f"{name}.bits": messages.bits,
                f"{name}.scales": messages.scales,
            }
        if self.master is not None:
            found["master"] = self._valid(self.master, self.span)
        return found

    def _bytes(self, name: str) -> int:
        each = bytes_per_element(
            name,
            self.dtype.itemsize,
            master=self.with_master,
            packed=self.packed,
            ranks=self.layout.ranks,
            masked=self.masked,
        )
        span = self.shard if name == "average" else self.span
        return round(each * int(span.counts().sum()))

    @cached_property
    def hyper(self) -> Tensor:
        return hyper_table([HYPER], self.device)

    @cached_property
    def flags(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    @cached_property
    def squares(self) -> Tensor:
        return torch.full((self.layout.blocks,), float("nan"), device=self.device)

    @cached_property
    def live(self) -> Tensor | None:
        return self._mask("live", self.span) if self.masked else None

    @cached_property
    def live_of_shard(self) -> Tensor | None:
        return self._mask("live", self.shard) if self.masked else None

    @cached_property
    def gamma(self) -> Tensor | None:
        if not self.scaled:
            return None
        return torch.rand(self.layout.parameters, generator=self._generator("gamma"), device=self.device).add_(0.5)

    @cached_property
    def params(self) -> Pointers:
        return self._pointers("parameter")

    @cached_property
    def grads(self) -> Pointers:
        return self._pointers("gradient")

    @cached_property
    def decoded(self) -> Pointers:
        return self._pointers("tensor")

    @cached_property
    def exp_avg(self) -> Tensor:
        return self._flat("exp_avg", self.span).mul_(0.1)

    @cached_property
    def exp_avg_sq(self) -> Tensor:
        return self._flat("exp_avg_sq", self.span).square_()

    @cached_property
    def d(self) -> Tensor:
        """1 / (sqrt(v_T) + eps), the gradients' root mean square being 1."""
        return self._flat("d", self.span).mul_(0.1).add_(1).clamp_(min=0.1)

    @cached_property
    def master(self) -> Tensor | None:
        return self._flat("master", self.span) if self.with_master else None

    @cached_property
    def momentum(self) -> Tensor | Messages:
        return self._messages("momentum", self.span) if self.packed else self._flat("momentum", self.span).mul_(0.1)

    @cached_property
    def replies(self) -> Messages:
        return self._messages("replies", self.span)

    @cached_property
    def received(self) -> Messages:
        return self._messages("received", self.shard)

    @cached_property
    def sent(self) -> Messages:
        return self._unwritten(self.layout.ranks)

    @cached_property
    def reply(self) -> Messages:
        return self._unwritten(1)

    @cached_property
    def residual(self) -> Residual:
        return self._residual("residual", self.span)

    @cached_property
    def server_residual(self) -> Residual:
        return self._residual("server_residual", self.shard)

    @cached_property
    def warmup_state(self) -> LambState:
        return LambState.initial(self.layout, self.device)

    @cached_property
    def statistics_state(self) -> LambState:
        state = LambState.initial(self.layout, self.device)
        state.average.fill_(0.1)
        return state

    def _unwritten(self, rows: int) -> Messages:
        """Messages whose every scale is NaN."""
        messages = self.format.empty(rows, self.device)
        messages.buffer.fill_(255)
        return messages

    def _valid(self, flat: Tensor, span: Span) -> Tensor:
        counts = torch.from_numpy(span.counts()).to(self.device)
        mask = torch.arange(self.layout.block_size, device=self.device) < counts[:, None]
        return flat.view(span.count, -1)[mask]

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))

    def _pointers(self, what: str) -> Pointers:
        source = self._generator(what)
        tensors = [
            torch.randn(n, generator=source, device=self.device).to(self.dtype) for n in self.layout.numel.tolist()
        ]
        return Pointers.to(self.layout, tensors, what)

    def _flat(self, name: str, span: Span) -> Tensor:
        return torch.randn(span.elements, generator=self._generator(name), device=self.device)

    def _mask(self, name: str, span: Span) -> Tensor:
        packed = torch.empty(span.elements // 8, dtype=torch.uint8, device=self.device)
        return packed.random_(0, 256, generator=self._generator(name))

    def _residual(self, name: str, span: Span) -> Residual:
        residual = Residual.zeros(span, self.format, self.device)
        residual.value.copy_(self._flat(name, span).mul_(0.1))
        if residual.scale is not None:
            residual.scale.fill_(0.1)
        return residual

    def _messages(self, name: str, span: Span) -> Messages:
        """One message a rank, as `span` (the whole layout, or the shard that all of them are for) is cut."""
        source, messages = self._generator(name), self.format.empty(self.layout.ranks, self.device)
        messages.buffer.random_(0, 256, generator=source)
        messages.header.copy_(torch.tensor(self.format.header, dtype=torch.int32))
        messages.scales.copy_(
            torch.rand(messages.scales.shape, generator=source, device=self.device).add_(0.5).mul_(0.1)
        )
        counts = np.resize(span.counts(), (messages.rows, self.format.shard_blocks))
        for row, block in zip(*np.nonzero(counts < self.layout.block_size), strict=True):
            valid = np.arange(self.layout.block_size) < counts[row, block]
            keep = torch.from_numpy(np.packbits(valid, bitorder="little"))
            messages.bits[row, block] &= keep.to(self.device)
        return messages

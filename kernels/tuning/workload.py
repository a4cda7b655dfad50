"""Arguments to run every pass on, with the bytes that each one moves: for the tuner, benchmarks and tests.

The values are random and stay of their size however often a pass runs, so that neither zeros, denormals nor
infinities flatter a measurement.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.backends import Backend
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import BLOCK_SIZE, Layout, Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Bits, Format, Messages, Norm, Scale
from onebit.kernels.passes import PASSES, Floors, Gradients, Parameters, Pass, Storage

OPTIONS = {
    "coeff_beta": 0.9, "min_coeff": 0.01, "max_coeff": 0.3, "between": None,
    "factor_min": 0.5, "factor_max": 4.0, "factor_threshold": 0.1,
}  # fmt: skip
OF_SHARD = ("average", "average_codes")  # passes that work on one shard
# Fields, of a pass or of any, that Workload calls by another name.
CALLED = {
    ("quantize", "residual"): "code_residual", ("quantize", "out"): "sent_codes",
    ("average_codes", "residual"): "server_code_residual", ("average_codes", "received"): "received_codes",
    ("average_codes", "out"): "reply_codes", ("dequantize", "replies"): "codes", ("dequantize", "out"): "decoded",
    ("average", "residual"): "server_residual", ("average", "out"): "reply", ("average", "live"): "live_of_shard",
    ("decode", "out"): "decoded", ("lamb_warmup", "state"): "warmup_state", ("zero_one_full", "live"): "written_live",
    ("", "out"): "sent", ("", "previous"): "momentum", ("", "state"): "statistics_state",
}  # fmt: skip
HYPER = Hyper.at_step(1000, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


@dataclass(frozen=True)
class Bound:
    """One pass with its arguments bound, and the algorithmic bytes that one run of it reads and writes."""

    name: str
    run: Callable[[], None]
    bytes: int


class Workload:
    """A model of `numels` elements a parameter, in the middle of training over `ranks` ranks.

    `average` works on one shard, 1/ranks of the blocks; the other passes on all of them. `masked`: a live mask leaves
    some elements out. `senders`: the messages that momentum and replies have of each block. `scaled`: messages hold
    each parameter's momentum times a gamma of its own. `kept`: residuals are also written as they were. `bare`: passes
    get nothing that they can do without. `summed`: adam_warmup adds up v too, and LAMB's ratios are of denominators.
    Each buffer of MADE is an attribute, and is made when it is first asked for.
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
        senders: int = 1,
        packed: bool = True,
        master: bool | None = None,
        masked: bool = False,
        scaled: bool = False,
        kept: bool = False,
        bare: bool = False,
        summed: bool = False,
        block_size: int = BLOCK_SIZE,
        bits: Bits = 4,
    ) -> None:
        sizes = [numels] if isinstance(numels, int) else list(numels)
        self.device, self.dtype = torch.device(device), dtype
        self.scaled, self.bare, self.summed = scaled, bare, summed
        self.layout = Layout(sizes, block_size=block_size, ranks=ranks)
        self.format = Format(self.layout, scale, norm)
        self.code_format = Format(self.layout, bits=bits)
        self.reply_format = self.format if senders > 1 else self.format.of_means()
        self.span, self.shard = self.layout.all(), self.layout.shard(0, 0)
        # a small model is the same on every device, so that backends can be compared
        self.drawn_on = torch.device("cpu") if self.layout.elements < 2**20 else self.device
        master = dtype != torch.float32 if master is None else master
        self.storage = Storage(
            dtype.itemsize, master=master, packed=packed, ranks=ranks, masked=masked, senders=senders, kept=kept,
            bits=bits,
        )  # fmt: skip
        self.buffers: dict[str, Any] = {}  # those that a pass has needed so far

    def __getattr__(self, name: str) -> Any:
        if name not in MADE:
            raise AttributeError(name)
        if name not in self.buffers:
            self.buffers[name] = MADE[name](self)
        return self.buffers[name]

    def passes(self, backend: Backend) -> dict[str, Bound]:
        """Every pass of a backend (`cpu` or `gpu`), in the order of a step."""

        def of(name: str) -> Bound:
            return Bound(name, lambda: backend.run(self._arguments(name)), self._bytes(name))

        return {name: of(name) for name in PASSES}

    def _arguments(self, name: str) -> Pass:
        made = PASSES[name]
        return made(**{field.name: self._argument(name, field.name) for field in fields(made)})

    def _argument(self, name: str, field: str) -> Any:
        """One of a pass: the buffer with the name of the field, where the pass has no other."""
        match name, field:
            case _, "span":
                return self._span_of(name)
            case _, "x":
                return Parameters(self.params, self.master)
            case _, "g":
                return Gradients(self.grads, self.hyper, self.flags)
            case ("scan", "squares") | ("compress", "momentum") if self.bare:
                return None
            case ("zero_one_full" | "zero_one_local", "residual"):  # None where the span is another rank's slice
                return None if self.bare else self.folded
            case ("adam_warmup", "sums") if not self.summed:
                return None
            case _, "coefficient":
                return self.statistics_state.coefficient if name == "lamb_update" else None
            case _, "ratio":
                return "denominator" if self.summed else "variance"
        if field in OPTIONS:
            return OPTIONS[field]
        return getattr(self, CALLED.get((name, field), CALLED.get(("", field), field)))

    def _bytes(self, name: str) -> int:
        each = PASSES[name].moves(self.storage)
        span = self._span_of(name)
        return round(each * int(span.counts().sum()))

    def _span_of(self, name: str) -> Span:
        return self.shard if name in OF_SHARD else self.span

    def unwritten(self, form: Format, rows: int) -> Messages:
        """Messages whose every scale is NaN."""
        messages = form.empty(rows, self.device)
        messages.buffer.fill_(255)
        return messages

    def of_blocks(self) -> Tensor:
        return torch.full((self.layout.blocks,), float("nan"), device=self.device)

    def of_parameters(self, value: float) -> Tensor:
        return torch.full((self.layout.parameters,), value, device=self.device)

    def random(self, name: str, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator(name), device=self.drawn_on)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.drawn_on).manual_seed(zlib.crc32(name.encode()))

    def pointers(self, what: str) -> Pointers:
        source = self._generator(what)
        tensors = [
            torch.randn(n, generator=source, device=self.drawn_on).to(self.device, self.dtype)
            for n in self.layout.numel.tolist()
        ]
        return Pointers.to(self.layout, tensors, what)

    def flat(self, name: str, span: Span) -> Tensor:
        return torch.randn(span.elements, generator=self._generator(name), device=self.drawn_on).to(self.device)

    def mask(self, span: Span) -> Tensor:
        packed = torch.empty(span.elements // 8, dtype=torch.uint8, device=self.drawn_on)
        return packed.random_(0, 256, generator=self._generator("live")).to(self.device)

    def made_residual(self, name: str, span: Span, form: Format) -> Residual:
        residual = Residual.zeros(span, form, self.device)
        residual.value.copy_(self.flat(name, span).mul_(0.1))
        if residual.scale is not None:
            residual.scale.fill_(0.1)
        before = torch.full_like(residual.value, float("nan")) if self.storage.kept else None
        return replace(residual, before=before)

    def messages(self, name: str, span: Span, form: Format, senders: int = 1) -> Messages:
        """One message a rank, as `span` (the whole layout, or the shard that all of them are for) is cut."""
        source = self._generator(name)
        messages = form.empty(self.layout.ranks * senders, self.device, senders)
        drawn = torch.empty_like(messages.buffer, device=self.drawn_on)
        messages.buffer.copy_(drawn.random_(0, 256, generator=source))
        messages.header.copy_(torch.tensor(form.header, dtype=torch.int32))
        shards = self.span.shards() if span is self.span else [self.shard] * self.layout.ranks
        for row in range(messages.rows):
            shard = shards[row // senders]
            scales = messages.scales(row, shard)
            scales.copy_(torch.rand(scales.shape, generator=source, device=self.drawn_on).add_(0.5).mul_(0.1))
            messages.bits(row, shard).bitwise_and_(self._valid_bits(shard, form.bits))
        return messages

    def _valid_bits(self, span: Span, each: int) -> Tensor:
        """1 for the bits of valid elements, each of which has so many."""
        places = np.broadcast_to(np.arange(self.layout.block_size), (span.count, self.layout.block_size))
        counts, room = span.counts()[:, None], places < span.lengths()[:, None]
        valid = np.repeat((places < counts)[room], each)
        return torch.from_numpy(np.packbits(valid, bitorder="little")).to(self.device)


# The buffers of a workload. decay: far enough from 1 that the same reply, again and again, adds up to no more than ten
# of it. folded: what full steps between compressed ones, and local steps, add to. d: 1 / (sqrt(v_T) + eps), the
# gradients' root mean square being 1.
MADE: dict[str, Callable[[Workload], Any]] = {
    "hyper": lambda w: hyper_table([HYPER], w.device),
    "flags": lambda w: torch.zeros(1, dtype=torch.int32, device=w.device),
    "params": lambda w: w.pointers("parameter"),
    "grads": lambda w: w.pointers("gradient"),
    "decoded": lambda w: w.pointers("tensor"),
    "exp_avg": lambda w: w.flat("exp_avg", w.span).mul_(0.1),
    "exp_avg_sq": lambda w: w.flat("exp_avg_sq", w.span).square_(),
    "d": lambda w: w.flat("d", w.span).mul_(0.1).add_(1).clamp_(min=0.1),
    "anchor": lambda w: w.flat("anchor", w.span),
    "master": lambda w: w.flat("master", w.span) if w.storage.master else None,
    "momentum": lambda w: (
        w.messages("momentum", w.span, w.reply_format, w.storage.senders)
        if w.storage.packed
        else w.flat("momentum", w.span).mul_(0.1)
    ),
    "replies": lambda w: w.messages("replies", w.span, w.reply_format, w.storage.senders),
    "received": lambda w: w.messages("received", w.shard, w.format),
    "sent": lambda w: w.unwritten(w.format, w.layout.ranks),
    "reply": lambda w: w.unwritten(w.reply_format, 1),
    "residual": lambda w: w.made_residual("residual", w.span, w.format),
    "server_residual": lambda w: w.made_residual("server_residual", w.shard, w.reply_format),
    "codes": lambda w: w.messages("codes", w.span, w.code_format, w.storage.senders),
    "received_codes": lambda w: w.messages("received_codes", w.shard, w.code_format),
    "sent_codes": lambda w: w.unwritten(w.code_format, w.layout.ranks),
    "reply_codes": lambda w: w.unwritten(w.code_format, 1),
    "code_residual": lambda w: w.made_residual("code_residual", w.span, w.code_format),
    "server_code_residual": lambda w: w.made_residual("server_code_residual", w.shard, w.code_format),
    "folded": lambda w: w.made_residual("folded", w.span, w.format),
    "live": lambda w: w.mask(w.span) if w.storage.masked else None,
    "live_of_shard": lambda w: w.mask(w.shard) if w.storage.masked else None,
    "written_live": lambda w: torch.zeros(w.span.elements // 8, dtype=torch.uint8, device=w.device),
    "gamma": lambda w: w.random("gamma", w.layout.parameters).add_(0.5).to(w.device) if w.scaled else None,
    "floors": lambda w: Floors(w.of_parameters(0.1), w.of_parameters(1.0)),
    "decay": lambda w: w.of_parameters(0.9),
    "factor": lambda w: w.of_parameters(1.5),
    "clip": lambda w: None if w.bare else w.of_parameters(0.7),
    "squares": lambda w: w.of_blocks(),
    "sums": lambda w: w.of_blocks(),
    "counts": lambda w: w.of_blocks(),
    "warmup_state": lambda w: LambState.initial(w.layout, w.device),
    "statistics_state": lambda w: replace(LambState.initial(w.layout, w.device), average=w.of_parameters(0.1)),
}

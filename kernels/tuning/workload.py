"""Arguments to run every pass on, with the bytes that each one moves: for the tuner, benchmarks and tests.

The values are random and stay of their size however often a pass runs, so that neither zeros, denormals nor
infinities flatter a measurement.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.backends import Backend
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import BLOCK_SIZE, Layout, Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, Messages, Norm, Scale
from onebit.kernels.passes import PASSES, Floors, Gradients, Parameters, Pass, Storage

OPTIONS = {
    "coeff_beta": 0.9, "min_coeff": 0.01, "max_coeff": 0.3, "between": None,
    "factor_min": 0.5, "factor_max": 4.0, "factor_threshold": 0.1,
}  # fmt: skip
# Fields, of a pass or of any, that Workload calls by another name.
CALLED = {
    ("average", "residual"): "server_residual", ("average", "out"): "reply", ("average", "live"): "live_of_shard",
    ("decode", "out"): "decoded", ("lamb_warmup", "state"): "warmup_state", ("zero_one_full", "live"): "written_live",
    ("zero_one_full", "residual"): "residual_of_steps", ("zero_one_local", "residual"): "residual_of_steps",
    ("", "out"): "sent", ("", "previous"): "momentum", ("", "state"): "statistics_state",
}  # fmt: skip
HYPER = Hyper.at_step(1000, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


@dataclass(frozen=True)
class Bound:
    """One pass with its arguments bound, and the algorithmic bytes that one run of it reads and writes."""

    name: str
    run: Callable[[], None]
    bytes: int


T = TypeVar("T")


def _made_once(make: Callable[[Workload], T]) -> Callable[[Workload], T]:
    """A method that makes a buffer when it is first called, and returns the same one from then on."""
    name = make.__name__

    @functools.wraps(make)
    def made(workload: Workload) -> T:
        if name not in workload.buffers:
            workload.buffers[name] = make(workload)
        found: T = workload.buffers[name]
        return found

    return made


class Workload:
    """A model of `numels` elements a parameter, in the middle of training over `ranks` ranks.

    `average` works on one shard, 1/ranks of the blocks; the other passes on all of them. `masked`: a live mask leaves
    some elements out. `copies`: the messages that momentum and replies have of each block. `scaled`: messages hold
    each parameter's momentum times a gamma of its own. `kept`: residuals are also written as they were. `bare`: passes
    get nothing that they can do without. `summed`: adam_warmup adds up v too, and LAMB's ratios are of denominators.
    Each buffer is a method, and is made when it is first called.
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
        copies: int = 1,
        packed: bool = True,
        master: bool | None = None,
        masked: bool = False,
        scaled: bool = False,
        kept: bool = False,
        bare: bool = False,
        summed: bool = False,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        sizes = [numels] if isinstance(numels, int) else list(numels)
        self.device, self.dtype, self.packed = torch.device(device), dtype, packed
        self.masked, self.scaled, self.copies, self.kept = masked, scaled, copies, kept
        self.bare, self.summed = bare, summed
        self.with_master = dtype != torch.float32 if master is None else master
        self.layout = Layout(sizes, block_size=block_size, ranks=ranks)
        self.format = Format(self.layout, scale, norm)
        self.reply_format = self.format if copies > 1 else self.format.of_means()
        self.span, self.shard = self.layout.all(), self.layout.shard(0, 0)
        # a small model is the same on every device, so that backends can be compared
        self.drawn_on = torch.device("cpu") if self.layout.elements < 2**20 else self.device
        self.storage = Storage(
            dtype.itemsize, master=self.with_master, packed=packed, ranks=ranks, masked=masked, copies=copies, kept=kept
        )
        self.buffers: dict[str, Any] = {}  # those that a pass has needed so far, by the name of their method

    def passes(self, backend: Backend) -> dict[str, Bound]:
        """Every pass of a backend (`cpu` or `gpu`), in the order of a step."""

        def of(name: str) -> Bound:
            return Bound(name, lambda: backend.run(self._arguments(name)), self._bytes(name))

        return {name: of(name) for name in PASSES}

    def _arguments(self, name: str) -> Pass:
        made = PASSES[name]
        return made(**{field.name: self._argument(name, field.name) for field in fields(made)})

    def _argument(self, name: str, field: str) -> Any:
        """One of a pass: what this class calls by the name of the field, where the pass has no other."""
        match name, field:
            case _, "span":
                return self.shard if name == "average" else self.span
            case ("scan" | "zero_one_local", "squares") | ("compress", "momentum") if self.bare:
                return None
            case ("adam_warmup", "sums") if not self.summed:
                return None
            case "adam_update", "coefficient":
                return None
        if field in OPTIONS:
            return OPTIONS[field]
        return getattr(self, CALLED.get((name, field), CALLED.get(("", field), field)))()

    def outputs(self) -> dict[str, Tensor]:
        """Every tensor that some pass writes; of flat state the valid elements."""
        found = {
            "flags": self.flags(),
            "squares": self.squares(),
            "exp_avg": self._valid(self.exp_avg(), self.span),
            "exp_avg_sq": self._valid(self.exp_avg_sq(), self.span),
            "anchor": self._valid(self.anchor(), self.span),
            "residual": self._valid(self.residual().value, self.span),
            "server_residual": self._valid(self.server_residual().value, self.shard),
            "folded": self._valid(self.folded().value, self.span),
            "live": self.written_live(),
            "sums": self.sums(),
            "counts": self.counts(),
            "average.coefficient": self.warmup_state().coefficient,
            "average.average": self.warmup_state().average,
            "statistics.coefficient": self.statistics_state().coefficient,
            "statistics.ratio": self.statistics_state().ratio,
        }
        for name, pointers in (("parameter", self.params()), ("decoded", self.decoded())):
            found |= {f"{name}.{i}": t for i, t in enumerate(pointers.tensors) if t is not None}
        for name, messages, span in (("sent", self.sent(), self.span), ("reply", self.reply(), self.shard)):
            found |= {
                f"{name}.header": messages.header,
                f"{name}.bits": messages.bits_of(span),
                f"{name}.scales": messages.scales_of(span),
            }
        if (master := self.master()) is not None:
            found["master"] = self._valid(master, self.span)
        return found

    def _bytes(self, name: str) -> int:
        each = PASSES[name].moves(self.storage)
        span = self.shard if name == "average" else self.span
        return round(each * int(span.counts().sum()))

    @_made_once
    def hyper(self) -> Tensor:
        return hyper_table([HYPER], self.device)

    @_made_once
    def flags(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    @_made_once
    def squares(self) -> Tensor:
        return torch.full((self.layout.blocks,), float("nan"), device=self.device)

    @_made_once
    def live(self) -> Tensor | None:
        return self._mask("live", self.span) if self.masked else None

    @_made_once
    def live_of_shard(self) -> Tensor | None:
        return self._mask("live", self.shard) if self.masked else None

    @_made_once
    def gamma(self) -> Tensor | None:
        if not self.scaled:
            return None
        drawn = torch.rand(self.layout.parameters, generator=self._generator("gamma"), device=self.drawn_on)
        return drawn.add_(0.5).to(self.device)

    @_made_once
    def params(self) -> Pointers:
        return self._pointers("parameter")

    @_made_once
    def grads(self) -> Pointers:
        return self._pointers("gradient")

    @_made_once
    def decoded(self) -> Pointers:
        return self._pointers("tensor")

    def x(self) -> Parameters:
        return Parameters(self.params(), self.master())

    def g(self) -> Gradients:
        return Gradients(self.grads(), self.hyper(), self.flags())

    @_made_once
    def exp_avg(self) -> Tensor:
        return self._flat("exp_avg", self.span).mul_(0.1)

    @_made_once
    def exp_avg_sq(self) -> Tensor:
        return self._flat("exp_avg_sq", self.span).square_()

    @_made_once
    def d(self) -> Tensor:
        """1 / (sqrt(v_T) + eps), the gradients' root mean square being 1."""
        return self._flat("d", self.span).mul_(0.1).add_(1).clamp_(min=0.1)

    @_made_once
    def master(self) -> Tensor | None:
        return self._flat("master", self.span) if self.with_master else None

    @_made_once
    def momentum(self) -> Tensor | Messages:
        if self.packed:
            return self._messages("momentum", self.span, self.reply_format, self.copies)
        return self._flat("momentum", self.span).mul_(0.1)

    @_made_once
    def replies(self) -> Messages:
        return self._messages("replies", self.span, self.reply_format, self.copies)

    @_made_once
    def received(self) -> Messages:
        return self._messages("received", self.shard, self.format)

    @_made_once
    def sent(self) -> Messages:
        return self._unwritten(self.format, self.layout.ranks)

    @_made_once
    def reply(self) -> Messages:
        return self._unwritten(self.reply_format, 1)

    @_made_once
    def residual(self) -> Residual:
        return self._residual("residual", self.span, self.format)

    @_made_once
    def server_residual(self) -> Residual:
        return self._residual("server_residual", self.shard, self.reply_format)

    @_made_once
    def folded(self) -> Residual:
        """What full steps between compressed ones, and local steps, add to."""
        return self._residual("folded", self.span, self.format)

    def residual_of_steps(self) -> Residual | None:
        """None where the span is another rank's slice."""
        return None if self.bare else self.folded()

    @_made_once
    def floors(self) -> Floors:
        least_root = torch.full((self.layout.parameters,), 0.1, device=self.device)
        return Floors(least_root, torch.ones(self.layout.parameters, device=self.device))

    def coefficient(self) -> Tensor:
        return self.statistics_state().coefficient

    def ratio(self) -> str:
        return "denominator" if self.summed else "variance"

    @_made_once
    def anchor(self) -> Tensor:
        return self._flat("anchor", self.span)

    @_made_once
    def decay(self) -> Tensor:
        """Far enough from 1 that the same reply, again and again, adds up to no more than ten of it."""
        return torch.full((self.layout.parameters,), 0.9, device=self.device)

    @_made_once
    def factor(self) -> Tensor:
        return torch.full((self.layout.parameters,), 1.5, device=self.device)

    @_made_once
    def clip(self) -> Tensor | None:
        return None if self.bare else torch.full((self.layout.parameters,), 0.7, device=self.device)

    @_made_once
    def written_live(self) -> Tensor:
        return torch.zeros(self.span.elements // 8, dtype=torch.uint8, device=self.device)

    @_made_once
    def sums(self) -> Tensor:
        return torch.full((self.layout.blocks,), float("nan"), device=self.device)

    @_made_once
    def counts(self) -> Tensor:
        return torch.full((self.layout.blocks,), float("nan"), device=self.device)

    @_made_once
    def warmup_state(self) -> LambState:
        return LambState.initial(self.layout, self.device)

    @_made_once
    def statistics_state(self) -> LambState:
        state = LambState.initial(self.layout, self.device)
        state.average.fill_(0.1)
        return state

    def _unwritten(self, form: Format, rows: int) -> Messages:
        """Messages whose every scale is NaN."""
        messages = form.empty(rows, self.device)
        messages.buffer.fill_(255)
        return messages

    def _valid(self, flat: Tensor, span: Span) -> Tensor:
        """Of flat state the valid elements."""
        return torch.cat([flat[s.offset : s.offset + s.stop - s.start] for s in span.segments()])

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.drawn_on).manual_seed(zlib.crc32(name.encode()))

    def _pointers(self, what: str) -> Pointers:
        source = self._generator(what)
        tensors = [
            torch.randn(n, generator=source, device=self.drawn_on).to(self.device, self.dtype)
            for n in self.layout.numel.tolist()
        ]
        return Pointers.to(self.layout, tensors, what)

    def _flat(self, name: str, span: Span) -> Tensor:
        return torch.randn(span.elements, generator=self._generator(name), device=self.drawn_on).to(self.device)

    def _mask(self, name: str, span: Span) -> Tensor:
        packed = torch.empty(span.elements // 8, dtype=torch.uint8, device=self.drawn_on)
        return packed.random_(0, 256, generator=self._generator(name)).to(self.device)

    def _residual(self, name: str, span: Span, form: Format) -> Residual:
        residual = Residual.zeros(span, form, self.device)
        residual.value.copy_(self._flat(name, span).mul_(0.1))
        if residual.scale is not None:
            residual.scale.fill_(0.1)
        return replace(residual, before=torch.full_like(residual.value, float("nan"))) if self.kept else residual

    def _messages(self, name: str, span: Span, form: Format, copies: int = 1) -> Messages:
        """One message a rank, as `span` (the whole layout, or the shard that all of them are for) is cut."""
        source = self._generator(name)
        messages = form.empty(self.layout.ranks * copies, self.device, copies)
        drawn = torch.empty_like(messages.buffer, device=self.drawn_on)
        messages.buffer.copy_(drawn.random_(0, 256, generator=source))
        messages.header.copy_(torch.tensor(form.header, dtype=torch.int32))
        shards = self.span.shards() if span is self.span else [self.shard] * self.layout.ranks
        for row in range(messages.rows):
            shard = shards[row // copies]
            scales = messages.scales(row, shard)
            scales.copy_(torch.rand(scales.shape, generator=source, device=self.drawn_on).add_(0.5).mul_(0.1))
            messages.bits(row, shard).bitwise_and_(self._valid_bits(shard))
        return messages

    def _valid_bits(self, span: Span) -> Tensor:
        """1 for the bits of valid elements."""
        places = np.broadcast_to(np.arange(self.layout.block_size), (span.count, self.layout.block_size))
        counts, room = span.counts()[:, None], places < span.lengths()[:, None]
        return torch.from_numpy(np.packbits((places < counts)[room], bitorder="little")).to(self.device)

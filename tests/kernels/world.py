"""The numbers of a case, in float64 for the oracle, its tensors on a backend, and each pass on them.

What a pass must not read would show: padding of state and scratch are NaN, unwritten messages are 0xFF, and parameters
and gradients lie between guard elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Layout, Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, Messages
from onebit.kernels.passes import PASSES, Average, AverageCodes, Floors, Gradients, Parameters
from onebit.kernels.tuning import workload
from tests import oracle
from tests.kernels.cases import BF16, ELEMENTWISE, F32, GPU, GUARD, HALF_PLACE, SENTINEL, Case, backend, device_of
from tests.kernels.compare import assert_all_close, assert_close, assert_guards, frozen_bits, numpy, rounded, stored
from tests.wire import values_of

STEP = 7
HYPERS = (
    oracle.LambHyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.01),
    oracle.LambHyper(lr=0.02, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.0),
    oracle.LambHyper(lr=1.5, beta1=0.0, beta2=0.999, eps=1e-8, weight_decay=0.3),
)
GRAD_SCALES = (0.5, 1.0, 3.0)
# 0/1 Adam's, by parameter: every third holds what has no variance, the others give it that of the mean.
LEAST, AT_ZERO, DECAY, FACTOR = (0.3, 2.0, 0.0), (0.0, 1.5, 0.7), (0.9, 1.0, 0.5), (0.7, 3.0, 0.1)
CLIP = (1.0, 0.6, 0.2)


class Chunk(NamedTuple):
    """A chunk as the passes take it: the part of a flat array that it is, its blocks and its messages."""

    index: int
    span: Span
    part: slice
    blocks: slice
    rows: slice


class Inputs:
    """Lists of arrays, one a parameter, that tensors can hold. `masked`: some elements take no part, and messages
    hold gamma times the momentum. `bits`: of an element in messages. `zeros`: every fifth v is 0, and every third
    gradient of those too."""

    def __init__(
        self, case: Case, name: str = "cpu", *, bits: int = 1, masked: bool = False, zeros: bool = False
    ) -> None:
        self.case, self.name, self.device, self.masked = case, name, torch.device(device_of(name)), masked
        self.passes = backend(name)
        self.rng = rng = np.random.default_rng(0)
        cut = {"block_size": case.block_size, "ranks": case.ranks, "chunks": case.chunks}
        groups = [p % case.groups for p in range(len(case.numels))]
        self.layout, self.plan = Layout(case.numels, groups=groups, **cut), oracle.Layout(case.numels, **cut)
        self.span, self.elements, self.rows = self.layout.all(), self.layout.elements, case.ranks * case.chunks
        self.form = Format(self.layout, case.scale, case.norm) if bits == 1 else Format(self.layout, bits=bits)
        self.hypers, self.grad_scales = ([of[group] for group in groups] for of in (HYPERS, GRAD_SCALES))
        self.x = self._normal(case.param if not case.master else F32)
        self.g = [None if p in case.missing else g for p, g in enumerate(self._normal(case.grad))]
        self.m, self.e = self._normal(F32), self._normal(F32)
        self.v = [rounded(rng.uniform(0.5, 1.5, n) * s * s, F32) for n, s in self._sizes()]
        for v, g in zip(self.v, self.g, strict=True) if zeros else ():
            v[::5] = 0.0
            if g is not None:
                g[::15] = 0.0
        self.live, self.gamma = np.ones(self.elements, bool), np.ones(len(self.x))
        if masked:
            self._mask()
        frozen = [v * rng.uniform(0.5, 4.0, v.size) for v in self.v]
        parts = zip(frozen, self.hypers, self.gamma, strict=True)
        self.d64 = [rounded(1 / ((np.sqrt(f) + h.eps) * gamma), F32) for f, h, gamma in parts]
        for d in self.d64:
            d[3::7] = 0.0
        self.coefficient64 = rounded(rng.uniform(0.01, 0.3, len(self.x)), F32)
        self.scales64 = rounded(rng.uniform(0.1, 0.4, self.rows), F32)  # of residuals, with a tensor scale
        self.anchor64 = [rounded(x + 0.3 * m, F32) for x, m in zip(self.x, self.m, strict=True)]
        self.least_root64, self.root_at_zero64, self.decay64, self.factor64, self.clip64 = (
            rounded(np.resize(values, len(self.x)), F32) for values in (LEAST, AT_ZERO, DECAY, FACTOR, CLIP)
        )

    def _mask(self) -> None:
        """What takes no part is NaN: it is not read."""
        self.live = self.rng.random(self.elements) < 0.6
        first, second, *_ = [*self.plan.lengths, 0]
        self.live[first : first + second] = False  # nothing of the second block
        self.gamma = rounded(self.rng.uniform(0.2, 5.0, len(self.x)), F32)
        for arrays in (self.g, self.e):
            for array, live in zip(arrays, self.plan.unflatten(self.live), strict=True):
                if array is not None:
                    array[~live] = np.nan

    def _sizes(self) -> Iterator[tuple[int, float]]:
        """Elements and magnitude of each parameter: from 0.1 to 10."""
        return ((n, 10.0 ** (p % 3 - 1)) for p, n in enumerate(self.case.numels))

    def _normal(self, dtype: torch.dtype) -> oracle.Arrays:
        return [rounded(s * self.rng.normal(size=n), dtype) for n, s in self._sizes()]

    @property
    def scaled_g(self) -> list[np.ndarray | None]:
        return [None if g is None else s * g for g, s in zip(self.g, self.grad_scales, strict=True)]

    @property
    def counted(self) -> np.ndarray:
        """bool over the whole space: which elements take part."""
        return self.plan.valid & self.live

    @property
    def half_place(self) -> float:
        """What storing x, where it is kept in 16 bits only, may change."""
        if self.case.master:
            return 0.0
        return HALF_PLACE[self.case.param] * (2 if self.cuts_off else 1)

    @property
    def cuts_off(self) -> bool:
        """Triton's interpreter cuts bf16 off where others round."""
        return self.interpreted and self.case.param == BF16

    @property
    def interpreted(self) -> bool:
        return self.name == "triton" and GPU == "cpu"

    def hyper(self, step: int = STEP) -> Tensor:
        rows = []
        for h, scale in zip(HYPERS, GRAD_SCALES, strict=True):
            options = {"lr": h.lr, "betas": (h.beta1, h.beta2), "eps": h.eps, "weight_decay": h.weight_decay}
            rows.append(Hyper.at_step(step, bias_correction=True, grad_scale=scale, **options))
        return hyper_table(rows[: self.case.groups], self.device)

    def chunks(self, only: int | None = None) -> list[Chunk]:
        found, ranks = [], self.case.ranks
        for j in range(self.case.chunks) if only is None else [only]:
            span, rows = self.layout.chunk(j), slice(j * ranks, (j + 1) * ranks)
            part = slice(self.plan.shard(j, 0).start, self.plan.shard(j, ranks - 1).stop)
            found.append(Chunk(j, span, part, slice(span.first, span.first + span.count), rows))
        return found

    def unpadded(self, flat: Tensor) -> oracle.Arrays:
        return self.plan.unflatten(numpy(flat))

    def pointers(self, values: list[np.ndarray | None], dtype: torch.dtype, what: str) -> Pointers:
        """One tensor a parameter, each inside a longer one whose other elements are SENTINEL."""
        start, made = 1 if self.case.unaligned else GUARD, [None] * len(values)
        for p, value in ((p, value) for p, value in enumerate(values) if value is not None):
            longer = torch.full((start + value.size + GUARD,), SENTINEL, dtype=dtype, device=self.device)
            made[p] = longer[start : start + value.size].copy_(torch.from_numpy(value))
        pointers = Pointers(self.layout, self.device, dtype, what)
        pointers.bind_tensors(made)
        return pointers

    def flat(self, arrays: oracle.Arrays) -> Tensor:
        """A flat state buffer with NaN where nothing is valid."""
        return torch.from_numpy(self.plan.flatten(arrays, float("nan"))).to(self.device, F32)

    def per_parameter(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, F32)

    def residual(self, span: Span, first_row: int) -> Residual:
        """A residual of `span` with e; with a tensor scale e is c, and `scales64` the last ones."""
        made = Residual.zeros(span, self.form, self.device)
        made.value.copy_(span.of(self.flat(self.e)))
        if made.scale is not None:
            made.scale.copy_(torch.from_numpy(self.scales64[first_row:][: len(made.scale)]))
            made.partial.fill_(float("nan"))
        return made

    def fresh(self, rows: int) -> Messages:
        messages = self.form.empty(rows, self.device)
        messages.buffer.fill_(0xFF)
        return messages

    def random_messages(self, shards: list[Span], seed: int = 1) -> Messages:
        """Make messages of these shards, with random bits (in padding too) and random scales, one of them 0."""
        rng, messages = np.random.default_rng(seed), self.fresh(len(shards))
        messages.header.copy_(torch.tensor(messages.format.header, dtype=torch.int32))
        for row, shard in enumerate(shards):
            bits, scales = messages.bits(row, shard), messages.scales(row, shard)
            bits.copy_(torch.from_numpy(rng.integers(0, 256, len(bits), dtype=np.uint8)))
            scales.copy_(torch.from_numpy(rng.uniform(0.1, 2.0, len(scales))))
        if len(shards) > 2 or len(scales) > 2:
            scales[-1] = 0
        return messages

    def all_messages(self, seed: int = 1) -> Messages:
        """Those of every shard, as replies are."""
        shards, senders = self.layout.all().shards(), self.case.senders
        found = self.random_messages([s for s in shards for _ in range(senders)], seed)
        return Messages(found.buffer, found.format, senders)


def lamb_state(world: Inputs) -> LambState:
    state, rng = LambState.initial(world.layout, world.device), np.random.default_rng(3)
    state.partial.fill_(float("nan"))
    state.average.copy_(torch.from_numpy(rng.uniform(0.01, 0.3, len(world.x))))
    state.ratio.copy_(torch.from_numpy(rng.uniform(0.9, 1.1, len(world.x))))
    return state


def momentum(world: Inputs) -> Tensor | Messages | None:
    """The momentum before the last replies, in the form that the case has it."""
    if world.case.momentum == "packed":
        return world.all_messages(5)
    return world.flat(world.m) if world.case.momentum == "dense" else None


# What a world has, by its name in a pass's signature where it is an argument.
MADE: dict[str, Callable[[World], Any]] = {
    "params": lambda w: w.pointers(list(w.x), w.case.param, "parameter"),
    "grads": lambda w: w.pointers(w.g, w.case.grad, "gradient"),
    "master": lambda w: w.flat(w.x) if w.case.master else None,
    "exp_avg": lambda w: w.flat(w.m),
    "exp_avg_sq": lambda w: w.flat(w.v),
    "anchor": lambda w: w.flat(w.anchor64),
    "d": lambda w: w.flat(w.d64),
    "replies": lambda w: w.all_messages(),
    "momentum": momentum,
    "residuals": lambda w: [w.residual(c.span, c.rows.start) for c in w.chunks()],
    "sent": lambda w: w.fresh(w.rows),
    "squares": lambda w: torch.full((w.layout.blocks,), float("nan"), device=w.device),
    "sums": lambda w: torch.full_like(w.squares, float("nan")),
    "counts": lambda w: torch.full_like(w.squares, float("nan")),
    "written_live": lambda w: torch.full((w.elements // 8,), 0xA5, dtype=torch.uint8, device=w.device),
    "flags": lambda w: torch.zeros(1, dtype=torch.int32, device=w.device),
    "state": lamb_state,
}
PER_PARAMETER = ("least_root", "root_at_zero", "decay", "factor", "coefficient", "clip")
RECORDS = {"x": Parameters, "g": Gradients, "floors": Floors}
OPTIONS = workload.OPTIONS | {"ratio": "variance"}


class World(Inputs):
    """The tensors of one case on a backend, each made when it is first used, and every pass on them."""

    def __getattr__(self, name: str) -> Any:
        if name not in MADE:
            raise AttributeError(name)
        setattr(self, name, MADE[name](self))
        return getattr(self, name)

    @property
    def buffers(self) -> dict[str, Any]:
        """Those that a pass has needed so far. What LAMB keeps of parameters without elements means nothing."""
        state, some = vars(self).get("state"), torch.tensor(self.case.numels, device=self.device) > 0
        kept = (
            {}
            if state is None
            else {f"state.{of}": getattr(state, of)[some] for of in ("coefficient", "average", "ratio")}
        )
        return {name: value for name, value in vars(self).items() if name in MADE and name != "state"} | kept

    def run(self, name: str, chunk: int | None = None, **options: Any) -> None:
        """A pass, over all chunks or over one; LAMB's own over the whole layout. Options are arguments of others."""
        known = {field.name for of in (PASSES[name], *RECORDS.values()) for field in fields(of)}
        assert options.keys() <= known, f"{name} has no {options.keys() - known}"
        whole = Chunk(0, self.layout.all(), slice(0, self.elements), slice(0, None), slice(0, self.rows))
        for c in [whole] if name in ("lamb_warmup", "lamb_statistics") else self.chunks(chunk):
            self.passes.run(self.record(PASSES[name], name, c, options))

    def record(self, made: type[Any], name: str, c: Chunk, options: Mapping[str, Any]) -> Any:
        """The arguments of a pass, or a record among them."""

        def value(field: str) -> Any:
            if field in RECORDS:
                return self.record(RECORDS[field], name, c, options)
            return options[field] if field in options else self.argument(name, field, c)

        return made(**{field.name: value(field.name) for field in fields(made)})

    def argument(self, name: str, of: str, c: Chunk) -> Any:
        """One of a pass, for a chunk."""
        match name, of:
            case _, "span":
                return c.span
            case _, "hyper":
                return self.hyper()
            case _, "residual":
                return self.residuals[c.index]
            case (("decode" | "dequantize"), "out"):
                return self.params
            case "zero_one_full", "live":
                return self.written_live[c.part.start // 8 : c.part.stop // 8]
            case _, "live":
                return self.mask(c.part)
            case "adam_update", "coefficient":
                return None
            case _, "gamma":
                return self.per_parameter(self.gamma) if self.masked else None
            case ("lamb_statistics", "previous") | ("zero_one_full", "momentum") if self.momentum is None:
                return self.exp_avg[c.part]
        if of in OPTIONS:
            return OPTIONS[of]
        if of in PER_PARAMETER:
            return self.per_parameter(getattr(self, f"{of}64"))
        found = getattr(self, {"param": "params", "grad": "grads", "out": "sent", "previous": "momentum"}.get(of, of))
        if isinstance(found, Messages):
            return found.slice(c.rows.start * found.senders, (c.rows.stop - c.rows.start) * found.senders)
        if of in ("squares", "sums", "counts"):
            return found[c.blocks]
        return found[c.part] if isinstance(found, Tensor) and of != "flags" else found

    def mask(self, part: slice) -> Tensor | None:
        """live as the passes take it."""
        live = torch.from_numpy(np.packbits(self.live[part], bitorder="little"))
        return live.to(self.device) if self.masked else None

    def received(self, chunk: int, rank: int) -> Messages:
        """What a rank gets for its shard, from each."""
        return self.random_messages([self.layout.shard(chunk, rank)] * self.case.ranks, 1 + rank)

    def average(self, chunk: int, rank: int, received: Messages) -> tuple[Messages, Residual]:
        shard, out = self.layout.shard(chunk, rank), self.fresh(1)
        residual = self.residual(shard, chunk * self.case.ranks + rank)
        if self.form.bits > 1:
            self.passes.run(AverageCodes(shard, received, residual, out))
        else:
            self.passes.run(Average(shard, received, residual, out, live=self.mask(self.plan.shard(chunk, rank))))
        return out, residual

    def moved(self) -> oracle.Arrays:
        """x: the master copy where there is one."""
        return [numpy(t) for t in self.params.tensors] if self.master is None else self.unpadded(self.master)

    def replied(self, messages: Messages | None = None) -> oracle.Arrays:
        """What the replies, or other messages of all shards, stand for."""
        return self.plan.unflatten(values_of(messages or self.replies, self.plan))

    def last_momentum(self) -> oracle.Arrays:
        """What lamb_statistics and zero_one_full get as the momentum of the step before."""
        if isinstance(self.momentum, Messages):
            return self.replied(self.momentum)
        return self.unpadded(self.exp_avg if self.momentum is None else self.momentum)

    def left_out(self) -> oracle.Arrays:
        """e of the residuals of all chunks."""
        return self.unpadded(torch.cat([residual.left_out() for residual in self.residuals]))

    def everything(self) -> list[bytes]:
        """Every byte of all tensors."""
        return frozen_bits(*(getattr(self, name) for name in MADE))

    def check_moments(self, m: oracle.Arrays, v: oracle.Arrays) -> None:
        terms = [np.abs(a) + np.abs(b) for a, b in zip(m, self.m, strict=True)]
        assert_all_close(self.unpadded(self.exp_avg), m, ELEMENTWISE, terms)
        assert_all_close(self.unpadded(self.exp_avg_sq), v, ELEMENTWISE)

    def check_sums(self, found: Tensor, flat: np.ndarray) -> None:
        """Check the sum of every block."""
        assert_close(numpy(found), [block.sum() for block in self.plan.of_blocks(flat)], 4e-6)

    def check_parameters(
        self, expected: oracle.Arrays, *, moves: int = 1, lrs: int = 0, sizes: oracle.Arrays | None = None
    ) -> None:
        """x, and the master copy. Rounding is of x, and so many times of what it moves by and of lr."""
        pairs = zip(self.x, expected, self.hypers, strict=True)
        sizes = sizes or [np.abs(a) + moves * np.abs(b - a) + lrs * h.lr for a, b, h in pairs]
        assert_guards(self.params)
        found = [numpy(t) for t in self.params.tensors]
        if self.master is None:
            assert_all_close(found, expected, ELEMENTWISE + self.half_place, sizes)
            return
        assert_all_close(self.moved(), expected, ELEMENTWISE, sizes)
        for x, copy in zip(found, self.moved(), strict=True):
            assert x.tolist() == stored(copy, self.case.param, self.name).tolist()

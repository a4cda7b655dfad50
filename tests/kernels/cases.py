"""What the tests of the passes share: the cases, the inputs made from one, and how results are compared.

Inputs are made twice from the same numbers: float64 for the oracle, tensors for a backend. What a pass must not read
would show: padding of state and scratch are NaN, unwritten messages are 0xFF, and parameters and gradients lie between
guard elements.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from onebit.kernels.cpu import threads
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Layout, Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, Messages
from onebit.kernels.tuning import tuner
from tests import oracle
from tests.wire import contents

BACKENDS = ("cpu", "triton")
GPU = "cuda" if torch.cuda.is_available() else "cpu"

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HALF_PLACE = {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}  # what rounding to a 16-bit dtype may change, relatively
STEP = 7
GUARD = 8  # elements: 16 bytes of the narrowest dtype
SENTINEL = -77.0


def backend(name: str) -> ModuleType:
    return importlib.import_module("onebit.kernels." + {"triton": "gpu"}.get(name, name))


def device_of(name: str) -> str:
    return GPU if name == "triton" else "cpu"


@dataclass(frozen=True)
class Case:
    """One point of the grid. `copies`, `reply_bits`: the messages that replies and packed momentum have of a block, and
    the bits of an element. `grain`: blocks a Triton program takes, or at least a CPU thread."""

    numels: tuple[int, ...]
    block_size: int = 32
    ranks: int = 1
    chunks: int = 1
    scale: str = "block"
    norm: str = "l1"
    param: torch.dtype = F32
    grad: torch.dtype = F32
    master: bool = False
    momentum: str = "dense"  # or "packed" or "none"
    copies: int = 1
    reply_bits: int = 1
    missing: tuple[int, ...] = ()
    unaligned: bool = False
    groups: int = 1
    grain: int = 1


# Every scale, norm, dtype, form of momentum and kind of reply, with tails, several messages, chunks and groups.
CASES = {
    "three-groups-tensor": Case((63, 7, 1), ranks=2, scale="tensor", momentum="packed", copies=3, groups=3),
    "fp16-master-2049": Case(
        (2049,), 2048, 2, scale="tensor", norm="l2", param=F16, grad=F16, master=True, momentum="packed"
    ),
    "unaligned-bf16-96": Case(
        (192, 100), 96, norm="l2", param=BF16, grad=BF16, momentum="packed", reply_bits=2, unaligned=True
    ),
    "chunks": Case((500, 63, 1, 129), 32, 2, 3, momentum="packed", missing=(3,), groups=2, grain=2),
    "rotated-96": Case((500, 63, 1, 192), 96, 2, norm="rotated", momentum="packed", copies=2, groups=2, grain=2),
    "empty-parameters": Case((0, 40, 0, 5, 0), ranks=2, scale="tensor", param=F16, momentum="none"),
    "unbiased-bf16-chunks": Case(
        (2049, 40), 2048, 2, 2, norm="unbiased", param=BF16, grad=BF16, master=True, copies=2, missing=(1,)
    ),
}
GRID = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
ON_BACKENDS = pytest.mark.parametrize("name", BACKENDS)
SCALES = pytest.mark.parametrize("scale", ["block", "tensor"])


def use_grain(monkeypatch: pytest.MonkeyPatch, grain: int, block_size: int) -> None:
    """Have Triton programs take `grain` blocks, and cut CPU loops into runs of as many, on three threads."""
    config = tuner.Config(blocks_per_program=grain, warps=8)
    monkeypatch.setattr(tuner, "lookup", lambda *_: config)
    monkeypatch.setattr(threads, "LEAST", grain * block_size)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


HYPERS = (
    oracle.LambHyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.01),
    oracle.LambHyper(lr=0.02, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.0),
    oracle.LambHyper(lr=1.5, beta1=0.0, beta2=0.999, eps=1e-8, weight_decay=0.3),
)
GRAD_SCALES = (0.5, 1.0, 3.0)
# 0/1 Adam's, by parameter: every third holds what has no variance, the others give it that of the mean.
LEAST, AT_ZERO, DECAY, FACTOR = (0.3, 2.0, 0.0), (0.0, 1.5, 0.7), (0.9, 1.0, 0.5), (0.7, 3.0, 0.1)


@dataclass(frozen=True)
class Chunk:
    """A chunk as the passes take it: the part of a flat array that it is, its blocks and its messages."""

    index: int
    span: Span
    part: slice
    blocks: slice
    rows: slice

    def bits(self) -> slice:
        return slice(self.part.start // 8, self.part.stop // 8)


class Inputs:
    """The numbers of one case: lists of float64 arrays, one a parameter, that the tensors can hold.

    `masked`: some coordinates take no part, and messages hold gamma times the momentum. `zeros`: every fifth v is 0,
    and every third gradient of those too. Every seventh d is 0.
    """

    def __init__(self, case: Case, name: str = "cpu", *, masked: bool = False, zeros: bool = False) -> None:
        self.case, self.name, self.device, self.masked = case, name, torch.device(device_of(name)), masked
        self.passes = backend(name)
        self.rng = rng = np.random.default_rng(0)
        groups = [p % case.groups for p in range(len(case.numels))]
        self.layout = Layout(
            case.numels, groups=groups, block_size=case.block_size, ranks=case.ranks, chunks=case.chunks
        )
        self.plan = oracle.Layout(case.numels, case.block_size, case.ranks, case.chunks)
        self.form = Format(self.layout, case.scale, case.norm)
        self.hypers = [HYPERS[group] for group in groups]
        self.grad_scales = [GRAD_SCALES[group] for group in groups]
        self.x = self._normal(case.param if not case.master else F32)
        self.g: list[np.ndarray | None] = list(self._normal(case.grad))
        self.g = [None if p in case.missing else g for p, g in enumerate(self.g)]
        self.m, self.e = self._normal(F32), self._normal(F32)
        self.v = [rounded(rng.uniform(0.5, 1.5, n) * s * s, F32) for n, s in self._sizes()]
        for v, g in zip(self.v, self.g, strict=True) if zeros else ():
            v[::5] = 0.0
            if g is not None:
                g[::15] = 0.0
        self.live = np.ones(self.elements, bool)
        self.gamma = np.ones(len(self.x))
        if masked:
            self.live = rng.random(self.elements) < 0.6
            first, second, *_ = [*self.plan.lengths, 0]
            self.live[first : first + second] = False  # nothing of the second block
            self.gamma = rounded(rng.uniform(0.2, 5.0, len(self.x)), F32)
        frozen = [v * rng.uniform(0.5, 4.0, v.size) for v in self.v]
        parts = zip(frozen, self.hypers, self.gamma, strict=True)
        self.d64 = [rounded(1 / ((np.sqrt(f) + h.eps) * gamma), F32) for f, h, gamma in parts]
        for d in self.d64:
            d[3::7] = 0.0
        self.c64 = rounded(rng.uniform(0.01, 0.3, len(self.x)), F32)
        self.scales64 = rounded(rng.uniform(0.1, 0.4, self.rows), F32)  # of residuals, with a tensor scale
        self.anchor64 = [rounded(x + 0.3 * m, F32) for x, m in zip(self.x, self.m, strict=True)]
        self.least64, self.at_zero64, self.decay64, self.factor64 = (
            rounded(np.resize(values, len(self.x)), F32) for values in (LEAST, AT_ZERO, DECAY, FACTOR)
        )

    def _sizes(self) -> Iterator[tuple[int, float]]:
        """Elements and magnitude of each parameter: from 0.1 to 10."""
        return ((n, 10.0 ** (p % 3 - 1)) for p, n in enumerate(self.case.numels))

    def _normal(self, dtype: torch.dtype) -> oracle.Arrays:
        return [rounded(s * self.rng.normal(size=n), dtype) for n, s in self._sizes()]

    @property
    def scaled_g(self) -> list[np.ndarray | None]:
        return [None if g is None else s * g for g, s in zip(self.g, self.grad_scales, strict=True)]

    @property
    def elements(self) -> int:
        return self.layout.elements

    @property
    def rows(self) -> int:
        return self.case.ranks * self.case.chunks

    @property
    def counted(self) -> np.ndarray:
        """bool over the whole space: which elements take part."""
        return self.plan.valid & self.live

    @property
    def half_place(self) -> float:
        """What storing x, where it is kept in 16 bits only, may change."""
        if self.case.master:
            return 0.0
        cut_off = self.name == "triton" and GPU == "cpu" and self.case.param == BF16
        return HALF_PLACE[self.case.param] * (2 if cut_off else 1)

    def hyper(self, step: int = STEP, bias_correction: bool = True) -> Tensor:
        rows = [
            Hyper.at_step(
                step, lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay,
                bias_correction=bias_correction, grad_scale=scale,
            )
            for h, scale in zip(HYPERS, GRAD_SCALES, strict=True)
        ]  # fmt: skip
        return hyper_table(rows[: self.case.groups], self.device)

    def chunks(self, only: int | None = None) -> list[Chunk]:
        found, ranks = [], self.case.ranks
        for j in range(self.case.chunks) if only is None else [only]:
            span = self.layout.chunk(j)
            part = slice(self.plan.shard(j, 0).start, self.plan.shard(j, ranks - 1).stop)
            found.append(
                Chunk(j, span, part, slice(span.first, span.first + span.count), slice(j * ranks, (j + 1) * ranks))
            )
        return found

    def unpadded(self, flat: Tensor) -> oracle.Arrays:
        return self.plan.unflatten(numpy(flat))

    def tensors(self, values: list[np.ndarray | None], dtype: torch.dtype) -> list[Tensor | None]:
        """One tensor a parameter, each inside a longer one whose other elements are SENTINEL."""
        start, made = 1 if self.case.unaligned else GUARD, []
        for value in values:
            if value is None:
                made.append(None)
                continue
            longer = torch.full((start + value.size + GUARD,), SENTINEL, dtype=dtype, device=self.device)
            made.append(longer[start : start + value.size].copy_(torch.from_numpy(value)))
        return made

    def pointers(self, values: list[np.ndarray | None], dtype: torch.dtype, what: str) -> Pointers:
        pointers = Pointers(self.layout, self.device, dtype, what)
        pointers.bind_tensors(self.tensors(values, dtype))
        return pointers

    def flat(self, arrays: oracle.Arrays, padding: float = float("nan")) -> Tensor:
        """A flat state buffer with NaN where nothing is valid."""
        return torch.from_numpy(self.plan.flatten(arrays, padding)).to(self.device, F32)

    def packed(self, mask: np.ndarray) -> Tensor:
        """A mask as the passes take it."""
        return torch.from_numpy(np.packbits(mask, bitorder="little")).to(self.device)

    def per_parameter(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, F32)

    def flags(self, value: int = 0) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=self.device)

    def residual(self, span: Span, first_row: int, form: Format) -> Residual:
        """A residual of `span` with e; with a tensor scale e is c, and `scales64` the last ones."""
        made = Residual.zeros(span, form, self.device)
        made.value.copy_(span.of(self.flat(self.e)))
        if made.scale is not None:
            made.scale.copy_(torch.from_numpy(self.scales64[first_row:][: len(made.scale)]))
            made.partial.fill_(float("nan"))
        return made

    def fresh(self, rows: int, form: Format | None = None) -> Messages:
        messages = (form or self.form).empty(rows, self.device)
        messages.buffer.fill_(0xFF)
        return messages

    def random_messages(self, shards: list[Span], seed: int = 1, bits: int = 1) -> Messages:
        """Of these shards, with random bits (in padding too) and random scales, one of them 0."""
        rng, messages = np.random.default_rng(seed), self.fresh(len(shards), self.form.with_bits(bits))
        messages.header.copy_(torch.tensor(messages.format.header, dtype=torch.int32))
        for row, shard in enumerate(shards):
            bits, scales = messages.bits(row, shard), messages.scales(row, shard)
            bits.copy_(torch.from_numpy(rng.integers(0, 256, len(bits), dtype=np.uint8)))
            exact = self.case.norm == "rotated"  # powers of two: fp32 holds all that such messages decode to
            sizes = 2.0 ** rng.integers(-8, -4, len(scales)) if exact else rng.uniform(0.1, 2.0, len(scales))
            scales.copy_(torch.from_numpy(sizes))
            if row == len(shards) - 1 and (row > 1 or len(scales) > 2):
                scales[-1] = 0
        return messages

    def all_messages(self, seed: int = 1) -> Messages:
        """Those of every shard, as replies are."""
        shards, copies = self.layout.all().shards(), self.case.copies
        found = self.random_messages([s for s in shards for _ in range(copies)], seed, self.case.reply_bits)
        return Messages(found.buffer, found.format, copies)


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float64 values that `dtype` can hold."""
    return torch.from_numpy(np.asarray(values, np.float64)).to(dtype).to(torch.float64).numpy()


def stored(values: np.ndarray, dtype: torch.dtype, name: str) -> np.ndarray:
    """What a backend stores for fp32 values. Triton's interpreter cuts bf16 off; its compiler rounds to nearest."""
    if name == "triton" and GPU == "cpu" and dtype == BF16:
        words = torch.from_numpy(np.asarray(values, np.float64)).to(F32).view(torch.int32) & -65536
        return words.view(F32).to(torch.float64).numpy()
    return rounded(values, dtype)


def numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().to(torch.float64).numpy()


def decoded_rows(messages: Messages, lengths: list[int]) -> np.ndarray:
    """Messages of one shard: the values of each."""
    return np.stack([contents(messages, row, lengths).values for row in range(messages.rows)])


def frozen_bits(*things: object) -> list[bytes]:
    """Every byte of these, so that a test can say that nothing changed."""
    found = []
    for thing in things:
        match thing:
            case Tensor():
                found.append(thing.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            case Pointers():
                found += frozen_bits(*thing.tensors)
            case Messages():
                found += frozen_bits(thing.buffer)
            case Residual() | LambState():
                found += frozen_bits(*vars(thing).values())
            case list() | tuple():
                found += frozen_bits(*thing)
    return found


def assert_close(actual: object, expected: object, tolerance: float, size: object = 0.0) -> None:
    """|actual - expected| <= tolerance * max(|expected|, size), everywhere; NaN fails."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    allowed = tolerance * np.maximum(np.abs(expected), size)
    wrong = ~(np.abs(actual - expected) <= allowed)
    where = np.argwhere(wrong)[:5].tolist()
    values = f"{actual[wrong][:5]} for {expected[wrong][:5]}"
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ, first at {where}: {values}"


def assert_all_close(actual: oracle.Arrays, expected: oracle.Arrays, tolerance: float, sizes: object = 0.0) -> None:
    """The same of lists of arrays; sizes: one number, or one array a parameter."""
    for p, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_close(got, want, tolerance, sizes[p] if isinstance(sizes, list) else sizes)


def assert_guards(pointers: Pointers) -> None:
    """Nothing was written beside the tensors."""
    for tensor in pointers.tensors:
        if tensor is None:
            continue
        longer = tensor.as_strided((tensor.storage_offset() + tensor.numel() + GUARD,), (1,), 0)
        outside = [longer[: tensor.storage_offset()], longer[tensor.storage_offset() + tensor.numel() :]]
        assert all(bool((part == SENTINEL).all()) for part in outside)

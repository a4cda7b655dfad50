"""What the tests of the passes share: the backends, a covering set of cases, and inputs made from a case.

Inputs are made twice from the same numbers: float64 for the oracle, tensors for a backend. What a pass must not read
would show: padding of state and scratch are NaN, unwritten messages are 0xFF, and parameters and gradients lie between
guard elements.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
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
FUSED = ("triton",)  # beside the CPU's
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
    """One point of the grid. `grain`: blocks a Triton program takes, or at least a CPU thread."""

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
    missing: tuple[int, ...] = ()
    unaligned: bool = False
    groups: int = 1
    grain: int = 1


TINY = tuple(1 + i % 5 for i in range(300))
CASES = {
    "one-element": Case((1,), momentum="none"),
    "seven": Case((7,), block_size=2048, norm="l2"),
    "three-groups-tensor": Case((63, 7, 1), ranks=2, scale="tensor", momentum="packed", groups=3),
    "bf16-master-96": Case((1000,), 96, 3, norm="l2", param=BF16, grad=BF16, master=True, grain=4),
    "fp16-master-2049": Case(
        (2049,), 2048, 2, scale="tensor", norm="l2", param=F16, grad=F16, master=True, momentum="packed"
    ),
    "full-blocks": Case((2048, 4096), 2048, momentum="packed", groups=2),
    "full-blocks-bf16-tensor": Case((4096, 2048), 2048, scale="tensor", param=BF16, grad=BF16, grain=2),
    "full-blocks-mixed": Case((256, 64), 64, norm="l2", param=F16, grad=F32, master=True, momentum="none"),
    "unaligned": Case((256, 64, 33), missing=(1,), unaligned=True, groups=3, grain=3),
    "unaligned-bf16-96": Case((192, 100), 96, param=BF16, grad=BF16, momentum="packed", unaligned=True),
    "chunks": Case((500, 63, 1, 129), 32, 2, 3, momentum="packed", missing=(3,), groups=2, grain=2),
    "chunks-tensor": Case((500, 200), 96, 3, 2, "tensor", "l2", param=F16, grad=F16),
    "300-parameters": Case(TINY, 32, 3, 2, momentum="none", missing=(0, 150, 299), groups=3, grain=16),
    "empty-parameters": Case((0, 40, 0, 5, 0), ranks=2, scale="tensor", momentum="packed"),
    "unbiased-96": Case((500, 63, 1, 192), 96, 2, norm="unbiased", momentum="packed", groups=2, grain=2),
    "unbiased-bf16-chunks": Case((2049, 40), 2048, 2, 2, norm="unbiased", param=BF16, grad=BF16, missing=(1,)),
    "rotated-96": Case((500, 63, 1, 192), 96, 2, norm="rotated", momentum="packed", groups=2, grain=2),
    "rotated-bf16-chunks": Case((1030, 40), 512, 2, 2, norm="rotated", param=BF16, grad=BF16, missing=(1,)),
    "more-ranks-than-blocks": Case((5, 40), ranks=3, chunks=2, scale="tensor", norm="l1"),
}
GRID = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
# Without the case that takes Triton's interpreter seconds: the oracle sees that one.
SMALL = {name: case for name, case in CASES.items() if len(case.numels) < 300}
SMALL_GRID = pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
# Both scales, all norms, tails, several messages and chunks.
FEW = (
    "three-groups-tensor",
    "bf16-master-96",
    "fp16-master-2049",
    "full-blocks",
    "chunks",
    "chunks-tensor",
    "unbiased-96",
    "rotated-96",
)
FEW_GRID = pytest.mark.parametrize("case", [CASES[name] for name in FEW], ids=FEW)
PAIRS = (
    ("block", "l1"), ("block", "l2"), ("block", "unbiased"), ("block", "rotated"), ("tensor", "l1"), ("tensor", "l2"),
)  # fmt: skip
SCALES_AND_NORMS = pytest.mark.parametrize("scale, norm", PAIRS)
ON_BACKENDS = pytest.mark.parametrize("name", BACKENDS)
ON_FUSED = pytest.mark.parametrize("name", FUSED)


def use_grain(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Have Triton programs take `case.grain` blocks, and cut CPU loops into runs of as many, on three threads."""
    config = tuner.Config(blocks_per_program=case.grain, warps=8)
    monkeypatch.setattr(tuner, "lookup", lambda *_: config)
    monkeypatch.setattr(threads, "LEAST", case.grain * case.block_size)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def group_hypers() -> list[oracle.LambHyper]:
    return [
        oracle.LambHyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.01),
        oracle.LambHyper(lr=0.02, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.0),
        oracle.LambHyper(lr=1.5, beta1=0.0, beta2=0.999, eps=1e-8, weight_decay=0.3),
    ]


GRAD_SCALES = (0.5, 1.0, 3.0)


class World:
    """The inputs of one case: `x`, `g`, ... are float64 lists for the oracle, methods make fresh tensors."""

    def __init__(self, case: Case, name: str = "cpu", seed: int = 0) -> None:
        self.case, self.name, self.device = case, name, torch.device(device_of(name))
        self.passes = backend(name)
        self.rng = np.random.default_rng(seed)
        self.groups = [p % case.groups for p in range(len(case.numels))]
        self.layout = Layout(
            case.numels,
            groups=self.groups,
            block_size=case.block_size,
            ranks=case.ranks,
            chunks=case.chunks,
        )
        self.plan = oracle.Layout(case.numels, case.block_size, case.ranks, case.chunks)
        self.form = Format(self.layout, case.scale, case.norm)
        self.hypers = [group_hypers()[group] for group in self.groups]
        self.grad_scales = [GRAD_SCALES[group] for group in self.groups]
        self.x = self._normal(case.param if not case.master else F32)
        self.g = self._normal(case.grad)
        self.g = [None if p in case.missing else g_p for p, g_p in enumerate(self.g)]
        self.m, self.e = self._normal(F32), self._normal(F32)
        self.v = [rounded(self.rng.uniform(0.5, 1.5, n) * s * s, F32) for n, s in self._sizes()]
        self.scaled_g = [None if g_p is None else s * g_p for g_p, s in zip(self.g, self.grad_scales, strict=True)]

    def _sizes(self) -> Iterator[tuple[int, float]]:
        """Elements and magnitude of each parameter: from 0.1 to 10."""
        return ((n, 10.0 ** (p % 3 - 1)) for p, n in enumerate(self.case.numels))

    def _normal(self, dtype: torch.dtype) -> oracle.Arrays:
        return [rounded(s * self.rng.normal(size=n), dtype) for n, s in self._sizes()]

    @property
    def elements(self) -> int:
        return self.layout.elements

    @property
    def half_place(self) -> float:
        """What storing x, where it is kept in 16 bits only, may change."""
        if self.case.master:
            return 0.0
        cut_off = self.name == "triton" and GPU == "cpu" and self.case.param == BF16
        return HALF_PLACE[self.case.param] * (2 if cut_off else 1)

    def spans(self) -> list[tuple[Span, slice]]:
        """The chunks as the passes take them, with the part of a flat array that each is."""
        spans = [self.layout.chunk(j) for j in range(self.case.chunks)]
        ends = [(self.plan.shard(j, 0).start, self.plan.shard(j, self.case.ranks - 1).stop) for j in range(len(spans))]
        return [(span, slice(*end)) for span, end in zip(spans, ends, strict=True)]

    def hyper(self, step: int = STEP, bias_correction: bool = True) -> Tensor:
        rows = [
            Hyper.at_step(
                step,
                lr=h.lr,
                betas=(h.beta1, h.beta2),
                eps=h.eps,
                weight_decay=h.weight_decay,
                bias_correction=bias_correction,
                grad_scale=scale,
            )
            for h, scale in zip(group_hypers(), GRAD_SCALES, strict=True)
        ]
        return hyper_table(rows[: self.case.groups], self.device)

    def flags(self, value: int = 0) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=self.device)

    def tensors(self, values: list[np.ndarray | None], dtype: torch.dtype) -> list[Tensor | None]:
        """One tensor a parameter, each inside a longer one whose other elements are SENTINEL."""
        start = 1 if self.case.unaligned else GUARD
        made: list[Tensor | None] = []
        for value in values:
            if value is None:
                made.append(None)
                continue
            longer = torch.full((start + value.size + GUARD,), SENTINEL, dtype=dtype, device=self.device)
            tensor = longer[start : start + value.size]
            tensor.copy_(torch.from_numpy(value))
            made.append(tensor)
        return made

    def params(self) -> Pointers:
        return self._point(self.tensors(list(self.x), self.case.param), self.case.param, "parameter")

    def grads(self) -> Pointers:
        return self._point(self.tensors(self.g, self.case.grad), self.case.grad, "gradient")

    def _point(self, tensors: list[Tensor | None], dtype: torch.dtype, what: str) -> Pointers:
        pointers = Pointers(self.layout, self.device, dtype, what)
        pointers.bind_tensors(tensors)
        return pointers

    def flat(self, arrays: oracle.Arrays, padding: float = float("nan")) -> Tensor:
        """A flat state buffer with NaN where nothing is valid."""
        return torch.from_numpy(self.plan.flatten(arrays, padding)).to(self.device, F32)

    def master(self) -> Tensor | None:
        return self.flat(self.x) if self.case.master else None

    def residual(self, span: Span, values: oracle.Arrays, scales: np.ndarray | None = None) -> Residual:
        """A residual of `span` with `values`; with a tensor scale they are c, and `scales` the last ones."""
        made = Residual.zeros(span, self.form, self.device)
        made.value.copy_(span.of(self.flat(values)))
        if made.scale is not None:
            made.scale.copy_(torch.from_numpy(scales if scales is not None else np.zeros(len(made.scale))))
            made.partial.fill_(float("nan"))
        return made

    @cached_property
    def live(self) -> np.ndarray:
        """bool over the whole space, padding too: over half, and nothing of the second block."""
        live = np.random.default_rng(11).random(self.elements) < 0.6
        first, second, *_ = [*self.plan.lengths, 0]
        live[first : first + second] = False
        return live

    @cached_property
    def gamma(self) -> np.ndarray:
        return rounded(np.random.default_rng(12).uniform(0.2, 5.0, len(self.x)), F32)

    def packed(self, mask: np.ndarray) -> Tensor:
        """A mask as the passes take it."""
        return torch.from_numpy(np.packbits(mask, bitorder="little")).to(self.device)

    def per_parameter(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, F32)

    def lamb_state(self) -> LambState:
        state = LambState.initial(self.layout, self.device)
        state.partial.fill_(float("nan"))
        return state

    def fresh(self, rows: int) -> Messages:
        messages = self.form.empty(rows, self.device)
        messages.buffer.fill_(0xFF)
        return messages

    @cached_property
    def rows(self) -> int:
        return self.case.ranks * self.case.chunks

    def random_messages(self, shards: list[Span], seed: int = 1) -> Messages:
        """Of these shards, with random bits (in padding too) and random scales, one of them 0."""
        rng, messages = np.random.default_rng(seed), self.fresh(len(shards))
        messages.header.copy_(torch.tensor(self.form.header, dtype=torch.int32))
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
        """One of every shard."""
        return self.random_messages(self.layout.all().shards(), seed)

    def received(self, chunk: int, rank: int, seed: int = 1) -> Messages:
        """What a rank gets for its shard, from each."""
        return self.random_messages([self.layout.shard(chunk, rank)] * self.case.ranks, seed)


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


def decoded_size(case: Case, scales: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Of every element of some blocks, how large what its block's scale decodes to is: of a rotated one nearly always
    below this, which is what its rounding is measured by."""
    mixed = 4 * np.sqrt([oracle.mixed(int(n)) for n in lengths]) if case.norm == "rotated" else np.ones(len(lengths))
    return np.repeat(scales.ravel() * mixed, lengths)


def gathered(pointers: Pointers) -> oracle.Arrays:
    return [numpy(t) for t in pointers.tensors]


def frozen_bits(*things: Tensor | Residual | LambState | Messages | Pointers | None) -> list[bytes]:
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
            case None:
                pass
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


def assert_guards(pointers: Pointers) -> None:
    """Nothing was written beside the tensors."""
    for tensor in pointers.tensors:
        if tensor is None:
            continue
        longer = tensor.as_strided((tensor.storage_offset() + tensor.numel() + GUARD,), (1,), 0)
        outside = [longer[: tensor.storage_offset()], longer[tensor.storage_offset() + tensor.numel() :]]
        assert all(bool((part == SENTINEL).all()) for part in outside)

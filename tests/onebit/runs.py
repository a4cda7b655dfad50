"""Runs of an optimizer on gradients that follow from (case, rank, step) alone, so that an oracle can make them again.

Tests of what 1-bit Adam and 1-bit LAMB share take `kinds`: every optimizer there is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onebit
from onebit.collectives.topology import Topology
from onebit.collectives.transport import transport_for
from tests.ranks import run_ranks, run_ranks_once

OPTIMIZERS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
kinds = pytest.mark.parametrize("kind", OPTIMIZERS)
freezing_kinds = pytest.mark.parametrize("kind", OPTIMIZERS[:2])  # those that freeze a variance for good


@dataclass(frozen=True)
class Case:
    kind: str = "OneBitAdam"
    shapes: tuple[tuple[int, ...], ...] = ((7, 9), (33,), (2,), (130,))
    dtype: str = "float32"
    last_dtype: str = ""  # of the last parameter, where it is another
    steps: int = 12
    options: dict[str, Any] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] = ({},)  # parameter p is in group p % len(groups)
    bad: tuple[tuple[int, int, float], ...] = ()  # (step, rank, value): one element of the last gradient
    missing: tuple[tuple[int, int, int], ...] = ()  # (step, rank, parameter): a gradient that is None
    untouched: tuple[tuple[int, int, int], ...] = ()  # (parameter, rows, step): its first rows get 0 up to that step
    grown: tuple[tuple[int, int, float], ...] = ()  # (first, last, times): of these steps gradients are so much larger
    seed: int = 0
    each: int = 1  # ranks a node; more than one is two levels
    clip: float | None = None  # the norm that gradients are clipped to

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def parameters(self) -> list[nn.Parameter]:
        """The same on every rank."""
        source = np.random.default_rng([self.seed, 1000])
        values = [source.normal(size=shape) for shape in self.shapes]
        return [nn.Parameter(torch.as_tensor(v).to(self.dtype_of(p))) for p, v in enumerate(values)]

    def dtype_of(self, parameter: int) -> torch.dtype:
        is_last = parameter == len(self.shapes) - 1
        return getattr(torch, self.last_dtype if self.last_dtype and is_last else self.dtype)

    def gradients(self, rank: int, step: int) -> list[Tensor | None]:
        """A common part, a rank's own part, and another magnitude for each parameter. Steps count from 1."""
        common, own = (np.random.default_rng([self.seed, step, who]) for who in (0, rank + 1))
        made: list[Tensor | None] = []
        times = math.prod(each for first, last, each in self.grown if first <= step <= last)
        for p, shape in enumerate(self.shapes):
            values = times * 10.0 ** (p % 3 - 1) * (0.5 * common.normal(size=shape) + own.normal(size=shape))
            made.append(torch.as_tensor(values).to(self.dtype_of(p)))
        for parameter, rows, last in self.untouched:
            if step <= last:
                made[parameter][:rows] = 0
        for when, who, value in self.bad:
            if (when, who) == (step, rank):
                made[-1].view(-1)[-1] = value
        for when, who, parameter in self.missing:
            if (when, who) == (step, rank):
                made[parameter] = None
        return made

    def group_of(self, parameter: int) -> int:
        return parameter % len(self.groups)

    def node_gradients(self, node: int, step: int) -> list[Tensor | None]:
        """The mean of a node's ranks, of which a missing gradient counts as zero; of a node of one rank what it has."""
        own = [self.gradients(rank, step) for rank in range(node * self.each, (node + 1) * self.each)]
        if self.each == 1:
            return own[0]
        zeros = [torch.zeros(shape, dtype=getattr(torch, self.dtype)) for shape in self.shapes]
        filled = [[z if g is None else g for g, z in zip(of, zeros, strict=True)] for of in own]
        return [torch.stack(of).double().mean(0) for of in zip(*filled, strict=True)]

    def ranks(self, group: Any) -> dict[str, Any]:
        """The groups, as an optimizer takes them. With two levels a collective call."""
        if self.each == 1:
            return {"process_group": group}
        if isinstance(group, dist.ProcessGroup):
            return {"process_group": nodes_of(group, self.each)}
        transport = transport_for(group)
        return {"process_group": group, "node_group": transport.split(transport.rank // self.each)}

    def build(self, params: list[nn.Parameter], group: Any = None) -> Any:
        """The optimizer. Its flat order is that of the groups: see `order`."""
        groups = [
            {"params": [p for i, p in enumerate(params) if self.group_of(i) == g], **own}
            for g, own in enumerate(self.groups)
        ]
        small = {"variance_floor": 0.0, "lr": 1e-2, "block_size": 64, "chunks": 1, "reply": 1}  # some blocks are short
        paper = {"update_limit": None}  # gradients here grow and shrink by tens
        options = {**small, **paper, **self.ranks(group), **self.options}
        return getattr(onebit, self.kind)(groups, **options_of(self.kind, options))

    def made(self, group: Any = None) -> tuple[list[nn.Parameter], Any]:
        """Parameters and their optimizer."""
        params = self.parameters()
        return params, self.build(params, group)

    @property
    def order(self) -> list[int]:
        """Parameters in the order of the param groups."""
        return sorted(range(len(self.shapes)), key=self.group_of)


_nodes: dict[tuple[int, ...], Topology] = {}


def nodes_of(group: dist.ProcessGroup, each: int) -> Topology:
    """Nodes of ranks that follow one another. Once for a group: every group of Gloo's has threads, for good."""
    key = (each, *dist.get_process_group_ranks(group))
    if key not in _nodes:
        transport = transport_for(group)
        _nodes[key] = Topology.of(transport, transport.split(transport.rank // each))
    return _nodes[key]


def run(case: Case, rank: int, optimizer: Any, params: list[nn.Parameter], first: int, last: int) -> None:
    """Steps `first` to `last`, both included."""
    for step in range(first, last + 1):
        take(case, rank, optimizer, params, step)


def take(case: Case, rank: int, optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    for p, g in zip(params, case.gradients(rank, step), strict=True):
        p.grad = g
    clip_as_asked(case, optimizer)
    optimizer.step()


def step_by(optimizer: Any, gradient: Callable[[Any], Any] = torch.ones_like) -> None:
    """A step of gradients that are made of each parameter."""
    for p in (p for g in optimizer.param_groups for p in g["params"]):
        p.grad = gradient(p)
    optimizer.step()


def clip_as_asked(case: Case, optimizer: Any) -> None:
    if case.clip is not None:
        optimizer.clip_grad_norm_(case.clip)


def options_of(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """freeze_step as 0/1 Adam has it: no full-precision step after it. Others are test_zero_one's."""
    if kind != "ZeroOneAdam" or "freeze_step" not in options:
        return options
    rest = {name: value for name, value in options.items() if name != "freeze_step"}
    last = options["freeze_step"]
    return rest if last is None else {**rest, "var_update_scaler": last, "var_freeze_step": last}


def frozen_name(kind: str) -> str:
    """The field of a flat state that compressed steps divide by."""
    return "exp_avg_sq" if kind == "ZeroOneAdam" else "denominator"


def arrays(params: list[nn.Parameter]) -> list[np.ndarray]:
    """float64 copies."""
    return [p.detach().double().numpy().copy() for p in params]


def bits(tensors: Any) -> bytes:
    """What two runs must have in common to be equal bit for bit. Of copies with stride 1: what is expanded and has one
    element counts as contiguous with any."""
    flat = (t.detach().reshape(-1).clone(memory_format=torch.contiguous_format) for t in tensors if t.numel())
    return b"".join(t.view(torch.uint8).numpy().tobytes() for t in flat)


def snapshot(state: Any) -> Any:
    """A copy of a state_dict that no later step changes."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {k: snapshot(v) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(snapshot(v) for v in state)
    return state


def same(one: Any, other: Any) -> bool:
    """Two snapshots, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and bits([one]) == bits([other])
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def unchanged(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal but for what counts: skipped steps, and bytes sent for them."""
    counting = ("skipped_steps", "wire_bytes")
    groups = [[dict(g) for g in s["param_groups"]] for s in (one, other)]
    for saved in groups:
        saved[0]["onebit"] = {k: v for k, v in json.loads(saved[0]["onebit"]).items() if k not in counting}
    return same(one["state"], other["state"]) and same(*groups)


def adamw_state(case: Case, steps: int, lr: float = 5e-3, **options: Any) -> dict[str, Any]:
    """What torch.optim.AdamW saves after some steps of the case."""
    params = case.parameters()
    optimizer = torch.optim.AdamW([params[p] for p in case.order], lr=lr, **options)
    run(case, 0, optimizer, params, 1, steps)
    return snapshot(optimizer.state_dict())


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    """The same on every rank."""
    sources = [torch.Generator().manual_seed(i) for i in range(len(shapes))]
    return [nn.Parameter(torch.randn(shape, generator=g)) for shape, g in zip(shapes, sources, strict=True)]


def build(kind: str, params: Any = None, **options: Any) -> Any:
    """An optimizer with the library's defaults."""
    return getattr(onebit, kind)(parameters((3, 2), (5,)) if params is None else params, **options_of(kind, options))


def assert_message(caught: Any, *parts: str) -> None:
    """The text of the error that was raised has every part."""
    text = str(caught.value)
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


@contextmanager
def refused(error: Any, *parts: str) -> Iterator[None]:
    """Such an error is raised, whose text has every part."""
    with pytest.raises(error) as caught:
        yield
    assert_message(caught, *parts)


@contextmanager
def on_warnings(action: Any = "always", category: type[Warning] = Warning, message: str = "") -> Iterator[list[str]]:
    """The texts of warnings meanwhile. "ignore" passes over, "error" raises; with a message those of onebit that begin
    so."""
    texts: list[str] = []

    def note(text: Any, its_category: type[Warning], *_: Any) -> None:
        texts.extend([str(text)] * issubclass(its_category, category))

    with warnings.catch_warnings():
        warnings.filterwarnings(action, message and f"onebit: {message}", category)
        warnings.showwarning = note
        yield texts


def on_ranks(size: int = 0, once: bool = False) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test whose body runs on each of so many ranks, the pool's or `once`: test(rank, ...) or test(rank, size, ...).
    It returns what must be the same on all, bit for bit. Without a number the test's own `size` says it."""

    def made(work: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(work)
        def test(**given: Any) -> None:
            ranks, task = size or given.pop("size"), (work.__module__, work.__name__, given)
            found = run_ranks_once(ranks, _on_rank, task) if once else run_ranks(ranks, _on_rank, *task)
            assert all(same(own, found[0]) for own in found), "the ranks differ"

        taken = inspect.signature(work).parameters
        left = [each for name, each in taken.items() if name != "rank" and (name != "size" or not size)]
        test.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return test

    return made


def _on_rank(rank: int, size: int, module: str, name: str, given: dict[str, Any]) -> Any:
    work = getattr(importlib.import_module(module), name).__wrapped__
    return work(rank, **({"size": size} if "size" in inspect.signature(work).parameters else {}), **given)

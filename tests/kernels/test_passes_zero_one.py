"""zero_one_full and zero_one_update of every backend against float64, and against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onebit.kernels.data.wire import NONFINITE
from tests import oracle
from tests.kernels.cases import (
    F16,
    F32,
    GRID,
    ON_BACKENDS,
    ON_FUSED,
    SMALL_GRID,
    STEP,
    Case,
    World,
    assert_close,
    decoded,
    frozen_bits,
    gathered,
    numpy,
    rounded,
    use_grain,
)
from tests.kernels.test_passes_adam import AGREEMENT, ELEMENTWISE, check_parameters, updated

# By parameter: every third holds what has no variance, the others give it that of the mean.
LEAST, AT_ZERO = (0.3, 2.0, 0.0), (0.0, 1.5, 0.7)


class Run:
    """The tensors of one run of either pass. Every fifth v is 0, and every third gradient of those too."""

    def __init__(self, case: Case, name: str = "reference", residual: bool = True) -> None:
        self.world = world = World(case, name)
        self.v64 = [v.copy() for v in world.v]
        for v, g in zip(self.v64, world.g, strict=True):
            v[::5] = 0.0
            if g is not None:
                g[::15] = 0.0
        world.scaled_g = [None if g is None else s * g for g, s in zip(world.g, world.grad_scales, strict=True)]
        self.params, self.grads, self.master = world.params(), world.grads(), world.master()
        self.v, self.replies = world.flat(self.v64), world.random_messages(world.rows)
        self.least64, self.at_zero64 = (rounded(np.resize(values, len(world.x)), F32) for values in (LEAST, AT_ZERO))
        self.least, self.at_zero = world.per_parameter(self.least64), world.per_parameter(self.at_zero64)
        blocks = world.layout.blocks
        self.sums, self.counts = (torch.full((blocks,), float("nan"), device=world.device) for _ in range(2))
        self.live = torch.full((world.elements // 8,), 0xA5, dtype=torch.uint8, device=world.device)
        scales = np.linspace(0.1, 0.4, case.ranks)
        self.scales64 = rounded(scales, F32) if case.scale == "tensor" else np.zeros(case.ranks)
        self.residuals = [world.residual(span, world.e, self.scales64) if residual else None
                          for span, _ in world.spans()]  # fmt: skip

    def _of(self, chunk: int) -> tuple[Any, slice, Any, torch.Tensor | None]:
        span, part = self.world.spans()[chunk]
        ranks = self.world.case.ranks
        replies = self.replies.slice(chunk * ranks, ranks)
        return span, part, replies, None if self.master is None else self.master[part]

    def full(self, chunk: int, flag: int = 0) -> None:
        span, part, replies, master = self._of(chunk)
        blocks = slice(span.first, span.first + span.count)
        self.world.passes.zero_one_full(
            span, self.params, self.grads, self.v[part], replies, self.residuals[chunk], master, self.world.hyper(),
            self.world.flags(flag), self.least, self.at_zero, self.live[part.start // 8 : part.stop // 8],
            self.sums[blocks], self.counts[blocks],
        )  # fmt: skip

    def update(self, chunk: int) -> None:
        span, part, replies, master = self._of(chunk)
        self.world.passes.zero_one_update(
            span, self.params, self.v[part], replies, master, self.world.hyper(), self.least, self.at_zero
        )

    def all_bytes(self) -> list[bytes]:
        return frozen_bits(
            self.params, self.grads, self.v, self.master, self.sums, self.counts, self.live, self.replies,
            *self.residuals,
        )  # fmt: skip

    def x(self) -> oracle.Arrays:
        return updated(self.world, self.params, self.master)

    def e(self, had: bool = False) -> oracle.Arrays:
        """had: 0 where a coordinate took no part before."""
        parts = [numpy(residual.left_out()) for residual in self.residuals if residual is not None]
        found = self.world.plan.unflatten(np.concatenate(parts))
        pairs = zip(found, self.v64, self.at_zero64, strict=True)
        return [np.where((v == 0) & (z == 0), 0.0, e) for e, v, z in pairs] if had else found


def moved(x: np.ndarray, m: np.ndarray, v: np.ndarray, h: Any, least: float, at_zero: float) -> np.ndarray:
    vhat, mhat = v / (1 - h.beta2**STEP), m / (1 - h.beta1**STEP)
    u = np.where(v == 0, at_zero, np.maximum(np.sqrt(vhat), least))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(u == 0, x, x - h.lr * (mhat / (u + h.eps) + h.weight_decay * x))


def expected(run: Run, full: bool) -> dict[str, list[np.ndarray]]:
    world, found = run.world, {"x": [], "v": [], "folded": [], "m": []}
    replies = world.plan.unflatten(decoded(run.replies))
    for p, (x, v, m, h) in enumerate(zip(world.x, run.v64, replies, world.hypers, strict=True)):
        if full:
            g = oracle.gradient(world.scaled_g[p], x)
            m = h.beta1 * np.where((v == 0) & (run.at_zero64[p] == 0), 0.0, m) + (1 - h.beta1) * g
            v = h.beta2 * v + (1 - h.beta2) * g**2
        found["x"].append(moved(x, m, v, h, run.least64[p], run.at_zero64[p]))
        found["v"].append(v)
        found["m"].append(m)
        found["folded"].append(h.beta1 * m)
    return found


def sizes(run: Run, x: oracle.Arrays) -> oracle.Arrays:
    return [np.abs(a) + np.abs(b - a) + 10 * h.lr for a, b, h in zip(run.world.x, x, run.world.hypers, strict=True)]


@ON_BACKENDS
@GRID
def test_a_full_step_agrees_with_float64(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    run = Run(case, name)
    before = run.e(had=True)
    for chunk in range(case.chunks):
        run.full(chunk)
    want, world = expected(run, full=True), run.world
    check_parameters(world, run.params, run.master, want["x"], sizes(run, want["x"]))
    for got, v in zip(world.plan.unflatten(numpy(run.v)), want["v"], strict=True):
        assert_close(got, v, ELEMENTWISE)
    for got, e, folded in zip(run.e(), before, want["folded"], strict=True):
        # With a tensor scale e is computed from c, which a scale that is set to 0 afterwards ends.
        last = 0 if case.scale == "block" else 0.4
        assert np.all(np.abs(got - (e + folded)) <= 2e-6 * (np.abs(e) + np.abs(folded)) + 2.1 * last)
    values = world.plan.flatten(want["v"]).reshape(-1, case.block_size)
    assert_close(numpy(run.sums), values.sum(1), 4e-6)
    assert numpy(run.counts).tolist() == (values != 0).sum(1).tolist()
    bits = np.unpackbits(run.live.cpu().numpy(), bitorder="little").reshape(-1, case.block_size)
    assert np.array_equal(bits != 0, values != 0)


@ON_BACKENDS
def test_what_a_tensor_scale_left_out_is_folded_into(name):
    """`value` becomes e + beta1 m, which is the residual once the scale is set to 0."""
    run = Run(Case((200, 40), ranks=2, scale="tensor", momentum="packed"), name)
    before = run.e(had=True)
    run.full(0)
    run.residuals[0].scale.zero_()
    want = expected(run, full=True)
    for got, e, folded in zip(run.e(), before, want["folded"], strict=True):
        assert_close(got, e + folded, 1e-6, 10)


@ON_BACKENDS
@GRID
def test_an_update_agrees_with_float64(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    run = Run(case, name)
    for chunk in range(case.chunks):
        run.update(chunk)
    want = expected(run, full=False)["x"]
    check_parameters(run.world, run.params, run.master, want, sizes(run, want))
    for p, (got, before, v) in enumerate(zip(run.x(), run.world.x, run.v64, strict=True)):
        if run.at_zero64[p] == 0:
            assert got[v == 0].tolist() == before[v == 0].tolist()


@ON_FUSED
@SMALL_GRID
def test_both_agree_with_the_reference(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    for each in ("full", "update"):
        ours, theirs = Run(case, name), Run(case)
        for chunk in range(case.chunks):
            getattr(ours, each)(chunk)
            getattr(theirs, each)(chunk)
        for got, want, s in zip(ours.x(), theirs.x(), sizes(theirs, theirs.x()), strict=True):
            assert_close(got, want, AGREEMENT + 2 * theirs.world.half_place, s)
        if each == "full":
            assert torch.equal(ours.live.cpu(), theirs.live) and torch.equal(ours.counts.cpu(), theirs.counts)
            for got, want in zip(ours.e(), theirs.e(), strict=True):
                assert_close(got, want, AGREEMENT, 10)


@ON_BACKENDS
@pytest.mark.parametrize("master", [True, False])
def test_a_flag_stops_a_full_step(name, master):
    run = Run(Case((70, 5), param=F16, grad=F16, master=master), name)
    before = run.all_bytes()
    run.full(0, flag=NONFINITE)
    assert run.all_bytes() == before


@ON_BACKENDS
def test_a_full_step_reads_replies_that_carry_a_flag_and_an_update_does_not(name):
    """They hold the momentum of the last step that was taken."""
    case = Case((64, 64), ranks=2)
    flagged, plain = Run(case, name), Run(case, name)
    flagged.replies.flags[0] = NONFINITE
    flagged.full(0)
    plain.full(0)
    assert [x.tolist() for x in flagged.x()] == [x.tolist() for x in plain.x()]
    stopped = Run(case, name)
    stopped.replies.flags[0] = NONFINITE
    stopped.update(0)
    assert stopped.x()[0].tolist() == stopped.world.x[0].tolist()
    assert stopped.x()[1].tolist() != stopped.world.x[1].tolist()


@ON_BACKENDS
def test_a_slice_of_another_rank_has_no_residual(name):
    case = Case((130, 60), ranks=2, chunks=2)
    without, with_it = Run(case, name, residual=False), Run(case, name)
    for chunk in range(2):
        without.full(chunk)
        with_it.full(chunk)
    assert [x.tolist() for x in gathered(without.params)] == [x.tolist() for x in gathered(with_it.params)]
    assert torch.equal(without.live, with_it.live)

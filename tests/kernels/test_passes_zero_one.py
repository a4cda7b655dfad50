"""0/1 Adam's four passes: the CPU's against float64, and what they read and leave on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import NONFINITE
from tests import oracle
from tests.kernels.cases import (
    GRID,
    ON_BACKENDS,
    SCALES,
    STEP,
    Case,
    assert_all_close,
    assert_close,
    frozen_bits,
    numpy,
    stored,
    use_grain,
)
from tests.kernels.world import ELEMENTWISE, World
from tests.wire import values_of


def used_root(v: np.ndarray, h: Any, least: float, at_zero: float) -> np.ndarray:
    return np.where(v == 0, at_zero, np.maximum(np.sqrt(v / (1 - h.beta2**STEP)), least))


def roots(world: World, v: oracle.Arrays) -> oracle.Arrays:
    return [used_root(*each) for each in zip(v, world.hypers, world.least64, world.at_zero64, strict=True)]


def moved(x: np.ndarray, m: np.ndarray, u: np.ndarray, h: Any) -> np.ndarray:
    mhat = m / (1 - h.beta1**STEP)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(u == 0, x, x - h.lr * (mhat / (u + h.eps) + h.weight_decay * x))


def sizes(world: World, x: oracle.Arrays) -> oracle.Arrays:
    return [np.abs(a) + np.abs(b - a) + 10 * h.lr for a, b, h in zip(world.x, x, world.hypers, strict=True)]


def replies(world: World) -> oracle.Arrays:
    return world.plan.unflatten(values_of(world.replies, world.plan))


def zero_scales(world: World) -> None:
    """With a tensor scale the residual's value is e itself once the caller has set its scale to 0."""
    for residual in world.residuals:
        if residual.scale is not None:
            residual.scale.zero_()


@GRID
def test_a_full_step_agrees_with_float64(case, monkeypatch):
    use_grain(monkeypatch, case.grain, case.block_size)
    world = World(case, zeros=True)
    had = [(v != 0) | (z != 0) for v, z in zip(world.v, world.at_zero64, strict=True)]
    before = [np.where(on, e, 0.0) for on, e in zip(had, world.left_out(), strict=True)]
    world.zero_one_full()
    zero_scales(world)
    x, v, e = [], [], []
    for p, (start, m, on, h) in enumerate(zip(world.x, replies(world), had, world.hypers, strict=True)):
        g = oracle.gradient(world.scaled_g[p], start)
        m = h.beta1 * np.where(on, m, 0.0) + (1 - h.beta1) * g
        v.append(h.beta2 * world.v[p] + (1 - h.beta2) * g**2)
        x.append(moved(start, m, used_root(v[p], h, world.least64[p], world.at_zero64[p]), h))
        e.append(before[p] + h.beta1 * m)
        assert_close(world.left_out()[p], e[p], ELEMENTWISE, np.abs(before[p]) + np.abs(m) + world.scales64.max())
    world.check_parameters(x, sizes(world, x))
    assert_all_close(world.unpadded(world.exp_avg_sq), v, ELEMENTWISE)
    flat = world.plan.flatten(v)
    assert_close(numpy(world.sums), [block.sum() for block in world.plan.of_blocks(flat)], 4e-6)
    assert numpy(world.counts).tolist() == [np.count_nonzero(block) for block in world.plan.of_blocks(flat)]
    assert np.array_equal(np.unpackbits(world.written_live.numpy(), bitorder="little") != 0, flat != 0)


@GRID
def test_an_update_agrees_with_float64(case, monkeypatch):
    use_grain(monkeypatch, case.grain, case.block_size)
    world = World(case, zeros=True)
    world.zero_one_update()
    u = roots(world, world.v)
    x = [moved(*each) for each in zip(world.x, replies(world), u, world.hypers, strict=True)]
    world.check_parameters(x, sizes(world, x))
    for got, start, root in zip(world.moved(), world.x, u, strict=True):
        assert got[root == 0].tolist() == start[root == 0].tolist()


@GRID
def test_a_local_step_agrees_with_float64(case, monkeypatch):
    use_grain(monkeypatch, case.grain, case.block_size)
    world = World(case, zeros=True)
    before, unread = world.left_out(), frozen_bits(world.exp_avg_sq, world.grads)
    world.zero_one_local()
    assert frozen_bits(world.exp_avg_sq, world.grads) == unread
    zero_scales(world)
    x, found_m, found_e = [], world.unpadded(world.exp_avg), world.left_out()
    for p, (m, e, u, h) in enumerate(zip(world.m, before, roots(world, world.v), world.hypers, strict=True)):
        g, lr = oracle.gradient(world.scaled_g[p], m), h.lr / (1 - h.beta1**STEP)
        new = np.where(u == 0, m, h.beta1 * m + (1 - h.beta1) * g)
        size = np.abs(h.beta1 * m) + np.abs((1 - h.beta1) * g)
        x.append(moved(world.x[p], new, u, h))
        held = e if case.scale == "block" else np.zeros_like(e)
        assert_close(found_m[p], new, ELEMENTWISE, size)
        assert_close(found_e[p], np.where(u == 0, held, e + lr * new), ELEMENTWISE, np.abs(e) + lr * size)
        for got, start in ((found_m[p], m), (found_e[p], held), (world.moved()[p], world.x[p])):
            assert got[u == 0].tolist() == start[u == 0].tolist()
    world.check_parameters(x, sizes(world, x))


@GRID
def test_a_sync_agrees_with_float64(case, monkeypatch):
    """The anchor is x as it was stored; m is what decode gives times a factor, to the last bit, so that others can
    compute it again."""
    use_grain(monkeypatch, case.grain, case.block_size)
    world = World(case, zeros=True)
    unread = frozen_bits(world.exp_avg_sq)
    values = [torch.full((n,), float("nan")) for n in case.numels]
    for chunk in world.chunks():
        world.passes.decode(chunk.span, world.of_replies(chunk), Pointers.to(world.layout, values))
    world.zero_one_sync()
    assert frozen_bits(world.exp_avg_sq) == unread
    x, size, u = [], [], roots(world, world.v)
    for p, (a, total, h) in enumerate(zip(world.anchor64, replies(world), world.hypers, strict=True)):
        with np.errstate(divide="ignore", invalid="ignore"):
            move = np.where(u[p] == 0, 0.0, total / (u[p] + h.eps))
        x.append(np.where(u[p] == 0, 1.0, world.decay64[p]) * a - move)
        size.append(np.abs(a) + np.abs(move))
    world.check_parameters(x, size)
    anchors, ms = world.unpadded(world.anchor), world.unpadded(world.exp_avg)
    for p, (found, a) in enumerate(zip(world.moved(), world.anchor64, strict=True)):
        assert anchors[p].tolist() == found.tolist()
        kept = a if case.master else stored(a, case.param, "cpu")
        assert found[u[p] == 0].tolist() == kept[u[p] == 0].tolist()
        want = numpy(values[p] * np.float32(world.factor64[p]))
        assert ms[p].tobytes() == np.where(u[p] == 0, 0.0, want).tobytes()


@ON_BACKENDS
def test_a_full_step_reads_replies_that_carry_a_flag(name):
    """They hold the momentum of the last step that was taken."""
    found = []
    for flag in (0, NONFINITE):
        world = World(Case((64, 64), ranks=2), name)
        world.replies.flags[0] = flag
        world.zero_one_full()
        found.append([x.tolist() for x in world.moved()])
    assert found[0] == found[1]


@ON_BACKENDS
@SCALES
@pytest.mark.parametrize("each", ["zero_one_full", "zero_one_local"])
def test_a_slice_of_another_rank_has_no_residual(name, each, scale):
    case = Case((130, 60), ranks=2, chunks=2, scale=scale, missing=(1,))
    without, with_it = World(case, name), World(case, name)
    without.residuals = [None, None]
    for world in (without, with_it):
        getattr(world, each)()
    written = [frozen_bits(w.params, w.exp_avg, w.exp_avg_sq, w.written_live) for w in (without, with_it)]
    assert written[0] == written[1]

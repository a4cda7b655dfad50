"""0/1 Adam's four passes: the CPU's against float64, and what they read and leave on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import NONFINITE
from tests import oracle
from tests.kernels.cases import ELEMENTWISE, GRID, ON_BACKENDS, SCALES, Case
from tests.kernels.compare import assert_all_close, assert_close, frozen_bits, numpy, stored
from tests.kernels.world import STEP, World
from tests.oracle import zero_one


def roots(world: World, v: oracle.Arrays) -> oracle.Arrays:
    floors = [*zip(world.least_root64, world.root_at_zero64, strict=True)]
    return zero_one.roots(v, [1 - h.beta2**STEP for h in world.hypers], floors, bias_correction=True)


def zero_scales(world: World) -> None:
    """Set tensor scales of residuals to 0, as the caller does: then their value is e itself."""
    for residual in world.residuals:
        if residual.scale is not None:
            residual.scale.zero_()


def check_full_step(world: World) -> None:
    """Run it, and compare with float64."""
    last_m = world.last_momentum()
    had = [(v != 0) | (z != 0) for v, z in zip(world.v, world.root_at_zero64, strict=True)]
    before = [np.where(on, e, 0.0) for on, e in zip(had, world.left_out(), strict=True)]
    world.run("zero_one_full")
    zero_scales(world)
    ms, v = [], []
    for p, (m, on, h) in enumerate(zip(last_m, had, world.hypers, strict=True)):
        g = oracle.gradient(world.scaled_g[p], m)
        ms.append(h.beta1 * np.where(on, m, 0.0) + (1 - h.beta1) * g)
        v.append(h.beta2 * world.v[p] + (1 - h.beta2) * g**2)
        size = np.abs(before[p]) + np.abs(ms[p]) + world.scales64.max()
        assert_close(world.left_out()[p], before[p] + h.beta1 * ms[p], ELEMENTWISE, size)
    world.check_parameters(zero_one.update(world.x, ms, roots(world, v), world.hypers, STEP), lrs=10)
    assert_all_close(world.unpadded(world.exp_avg_sq), v, ELEMENTWISE)
    flat = world.plan.flatten(v)
    world.check_sums(world.sums, flat)
    assert numpy(world.counts).tolist() == [np.count_nonzero(block) for block in world.plan.of_blocks(flat)]
    assert np.array_equal(np.unpackbits(world.written_live.cpu().numpy(), bitorder="little") != 0, flat != 0)


@GRID
def test_a_full_step_agrees_with_float64(case):
    """Its momentum is messages, or dense."""
    check_full_step(World(case, zeros=True))


@ON_BACKENDS
@GRID
def test_a_dense_momentum_gives_a_full_step_the_bits_that_its_messages_do(name, case):
    packed, dense = World(case, name, zeros=True), World(case, name, zeros=True)
    decoded = [torch.full((n,), float("nan"), device=packed.device) for n in case.numels]
    packed.run("decode", out=Pointers.to(packed.layout, decoded))
    packed.momentum, dense.momentum = packed.replies, dense.flat([numpy(m) for m in decoded])
    unread = frozen_bits(dense.momentum, dense.grads)
    for world in (packed, dense):
        check_full_step(world)
    assert frozen_bits(dense.momentum, dense.grads) == unread
    written = ("params", "master", "exp_avg_sq", "residuals", "written_live", "sums", "counts")
    found = [[frozen_bits(getattr(world, each)) for each in written] for world in (packed, dense)]
    assert found[0] == found[1]


@GRID
def test_an_update_agrees_with_float64(case):
    world = World(case, zeros=True)
    u = roots(world, world.v)
    world.run("zero_one_update")
    clipped = [clip * m for clip, m in zip(world.clip64, world.replied(), strict=True)]
    world.check_parameters(zero_one.update(world.x, clipped, u, world.hypers, STEP), lrs=10)
    assert all((x == was)[root == 0].all() for x, was, root in zip(world.moved(), world.x, u, strict=True))


@GRID
def test_inverses_agree_with_float64(case):
    """Every block's sum does, without elements that do not move."""
    world = World(case, zeros=True)
    world.run("zero_one_inverses")
    d = [np.where(u == 0, 0.0, 1 / (u + h.eps)) for u, h in zip(roots(world, world.v), world.hypers, strict=True)]
    world.check_sums(world.sums, world.plan.flatten([d_p**2 for d_p in d]))


@GRID
def test_the_length_of_a_local_step_agrees_with_float64(case):
    """It is that of the step which then follows, without its clip."""
    world = World(case, zeros=True)
    unread = frozen_bits(world.exp_avg_sq, world.exp_avg, world.grads)
    world.run("zero_one_length")
    assert frozen_bits(world.exp_avg_sq, world.exp_avg, world.grads) == unread
    squares = []
    for p, (m, u, h) in enumerate(zip(world.m, roots(world, world.v), world.hypers, strict=True)):
        new = h.beta1 * m + (1 - h.beta1) * oracle.gradient(world.scaled_g[p], m)
        squares.append(np.where(u == 0, 0.0, new / (1 - h.beta1**STEP) / (u + h.eps)) ** 2)
    world.check_sums(world.squares, world.plan.flatten(squares))
    measured = frozen_bits(world.squares)
    world.flags.fill_(1)
    world.grads.tensors[0].fill_(1e3)
    world.run("zero_one_length")
    assert frozen_bits(world.squares) == measured


@GRID
def test_a_local_step_agrees_with_float64(case):
    world = World(case, zeros=True)
    before, unread = world.left_out(), frozen_bits(world.exp_avg_sq, world.grads)
    world.run("zero_one_local")
    assert frozen_bits(world.exp_avg_sq, world.grads) == unread
    zero_scales(world)
    us, ms, found_m, found_e = roots(world, world.v), [], world.unpadded(world.exp_avg), world.left_out()
    for p, (m, e, u, h) in enumerate(zip(world.m, before, us, world.hypers, strict=True)):
        g, lr = oracle.gradient(world.scaled_g[p], m), h.lr / (1 - h.beta1**STEP)
        new = np.where(u == 0, m, h.beta1 * m + (1 - h.beta1) * g)
        size = np.abs(h.beta1 * m) + np.abs((1 - h.beta1) * g)
        ms.append(new)
        held = e if case.scale == "block" else np.zeros_like(e)
        assert_close(found_m[p], new, ELEMENTWISE, size)
        assert_close(found_e[p], np.where(u == 0, held, e + lr * new), ELEMENTWISE, np.abs(e) + lr * size)
        for got, start in ((found_m[p], m), (found_e[p], held), (world.moved()[p], world.x[p])):
            assert got[u == 0].tolist() == start[u == 0].tolist()
    clipped = [clip * m for clip, m in zip(world.clip64, ms, strict=True)]
    world.check_parameters(zero_one.update(world.x, clipped, us, world.hypers, STEP), lrs=10)


@GRID
def test_a_sync_agrees_with_float64(case):
    """The anchor is x as it was stored; m is what decode gives times a factor, to the last bit."""
    world = World(case, zeros=True)
    unread = frozen_bits(world.exp_avg_sq)
    values = [torch.full((n,), float("nan")) for n in case.numels]
    world.run("decode", out=Pointers.to(world.layout, values))
    world.run("zero_one_sync")
    assert frozen_bits(world.exp_avg_sq) == unread
    x, size, u = [], [], roots(world, world.v)
    for p, (a, total, h) in enumerate(zip(world.anchor64, world.replied(), world.hypers, strict=True)):
        with np.errstate(divide="ignore", invalid="ignore"):
            move = np.where(u[p] == 0, 0.0, world.clip64[p] * total / (u[p] + h.eps))
        x.append(np.where(u[p] == 0, 1.0, world.decay64[p]) * a - move)
        size.append(np.abs(a) + np.abs(move))
    world.check_parameters(x, sizes=size)
    anchors, ms = world.unpadded(world.anchor), world.unpadded(world.exp_avg)
    for p, (found, a) in enumerate(zip(world.moved(), world.anchor64, strict=True)):
        assert anchors[p].tolist() == found.tolist()
        kept = a if case.master else stored(a, case.param, "cpu")
        assert found[u[p] == 0].tolist() == kept[u[p] == 0].tolist()
        want = numpy(values[p] * np.float32(world.factor64[p]))
        assert ms[p].tobytes() == np.where(u[p] == 0, 0.0, want).tobytes()


@ON_BACKENDS
def test_a_full_step_reads_messages_that_carry_a_flag(name):
    """They hold the momentum of the last step that was taken."""
    found = []
    for flag in (0, NONFINITE):
        world = World(Case((64, 64), ranks=2, momentum="packed"), name)
        world.momentum.flags[0] = flag
        world.run("zero_one_full")
        found.append([x.tolist() for x in world.moved()])
    assert found[0] == found[1]


@ON_BACKENDS
@SCALES
@pytest.mark.parametrize("each", ["zero_one_full", "zero_one_local"])
def test_a_slice_of_another_rank_has_no_residual(name, each, scale):
    case = Case((130, 60), ranks=2, chunks=2, scale=scale, momentum="packed", missing=(1,))
    without, with_it = World(case, name), World(case, name)
    without.residuals = [None, None]
    for world in (without, with_it):
        world.run(each)
    written = [frozen_bits(w.params, w.exp_avg, w.exp_avg_sq, w.written_live) for w in (without, with_it)]
    assert written[0] == written[1]

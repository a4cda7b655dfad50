"""adam_warmup and adam_update of every backend against the float64 oracle, and Triton against the CPU."""

import numpy as np
import pytest
import torch

from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import NONFINITE, Messages
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
    assert_guards,
    frozen_bits,
    gathered,
    numpy,
    rounded,
    stored,
    use_grain,
)
from tests.wire import values_of

ELEMENTWISE = 2e-6  # a dozen fp32 roundings, and hyper-parameters in fp32
AGREEMENT = 1e-6  # another order of the same operations


def check_parameters(
    world: World, params: Pointers, master: torch.Tensor | None, expected: oracle.Arrays, size: oracle.Arrays
) -> None:
    """x, and the master copy that x is rounded from, where there is one."""
    assert_guards(params)
    if master is None:
        for x, want, s in zip(gathered(params), expected, size, strict=True):
            assert_close(x, want, ELEMENTWISE + world.half_place, s)
        return
    for x, copy, want, s in zip(gathered(params), world.plan.unflatten(numpy(master)), expected, size, strict=True):
        assert_close(copy, want, ELEMENTWISE, s)
        assert x.tolist() == stored(copy, world.case.param, world.name).tolist()


def updated(world: World, params: Pointers, master: torch.Tensor | None) -> oracle.Arrays:
    return gathered(params) if master is None else world.plan.unflatten(numpy(master))


class Warmup:
    """The tensors of one run of adam_warmup."""

    def __init__(self, world: World, *, with_sums: bool = True) -> None:
        self.world = world
        self.params, self.grads, self.master = world.params(), world.grads(), world.master()
        self.exp_avg, self.exp_avg_sq = world.flat(world.m), world.flat(world.v)
        self.sums = torch.full((world.layout.blocks,), float("nan"), device=world.device)
        self.with_sums = with_sums

    def run(self, chunk: int, flag: int = 0, **options: object) -> None:
        world = self.world
        span, part = world.spans()[chunk]
        blocks = slice(span.first, span.first + span.count)
        world.passes.adam_warmup(
            span,
            self.params,
            self.grads,
            self.exp_avg[part],
            self.exp_avg_sq[part],
            None if self.master is None else self.master[part],
            world.hyper(**options),
            world.flags(flag),
            self.sums[blocks] if self.with_sums else None,
        )

    def x(self) -> oracle.Arrays:
        return updated(self.world, self.params, self.master)

    def all_bytes(self) -> list[bytes]:
        return frozen_bits(self.params, self.grads, self.exp_avg, self.exp_avg_sq, self.master, self.sums)


@ON_BACKENDS
@GRID
def test_warmup_agrees_with_the_oracle(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    run = Warmup(world)
    for chunk in range(case.chunks):
        run.run(chunk)
    x, m, v = oracle.adamw_step(world.x, world.scaled_g, world.m, world.v, world.hypers, STEP)
    terms = [np.abs(a) + np.abs(b) for a, b in zip(m, world.m, strict=True)]
    for got, want, size in zip(world.plan.unflatten(numpy(run.exp_avg)), m, terms, strict=True):
        assert_close(got, want, ELEMENTWISE, size)
    for got, want in zip(world.plan.unflatten(numpy(run.exp_avg_sq)), v, strict=True):
        assert_close(got, want, ELEMENTWISE)
    moved = [np.abs(a) + np.abs(b - a) + 10 * h.lr for a, b, h in zip(world.x, x, world.hypers, strict=True)]
    check_parameters(world, run.params, run.master, x, moved)
    sums = [block.sum() for block in world.plan.of_blocks(world.plan.flatten(v))]
    assert_close(numpy(run.sums), sums, 4e-6)


@ON_BACKENDS
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_bias_correction_is_that_of_the_step(name, step, bias_correction):
    world = World(Case((45, 3), groups=2), name)
    run = Warmup(world, with_sums=False)
    run.run(0, step=step, bias_correction=bias_correction)
    x, _, _ = oracle.adamw_step(world.x, world.scaled_g, world.m, world.v, world.hypers, step, bias_correction)
    for got, want, before in zip(gathered(run.params), x, world.x, strict=True):
        assert_close(got, want, ELEMENTWISE, np.abs(want - before) + 1)


@ON_FUSED
@SMALL_GRID
def test_warmup_agrees_with_the_cpu(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    ours, theirs = Warmup(World(case, name)), Warmup(World(case))
    for chunk in range(case.chunks):
        ours.run(chunk)
        theirs.run(chunk)
    plan = ours.world.plan
    for a, b in ((ours.exp_avg, theirs.exp_avg), (ours.exp_avg_sq, theirs.exp_avg_sq)):
        for got, want in zip(plan.unflatten(numpy(a)), plan.unflatten(numpy(b)), strict=True):
            assert_close(got, want, AGREEMENT, 0.1)
    for got, want, h in zip(ours.x(), theirs.x(), ours.world.hypers, strict=True):
        assert_close(got, want, AGREEMENT + 2 * theirs.world.half_place, 10 * h.lr)


@ON_BACKENDS
@pytest.mark.parametrize("master", [True, False])
def test_warmup_with_a_flag_set_changes_nothing(name, master):
    world = World(Case((70, 5), param=F16, grad=F16, master=master), name)
    world.g[0][3] = np.inf
    run = Warmup(world)
    before = run.all_bytes()
    run.run(0, flag=NONFINITE)
    assert run.all_bytes() == before


@ON_BACKENDS
def test_warmup_of_one_chunk_leaves_the_others_alone(name):
    """A parameter that two chunks share moves in one of them only."""
    world = World(Case((160, 40), ranks=1, chunks=2), name)
    run = Warmup(world)
    run.run(1)
    boundary = world.plan.shard(1, 0).start
    same = np.concatenate(gathered(run.params))[:boundary] == np.concatenate(world.x)[:boundary]
    assert boundary == 96
    assert same.all()
    assert (gathered(run.params)[0][boundary:] != world.x[0][boundary:]).all()
    assert numpy(run.exp_avg)[:boundary].tolist() == world.m[0][:boundary].tolist()


@ON_BACKENDS
def test_warmup_carries_its_state_over_three_steps(name):
    world = World(Case((100, 7), groups=2, missing=(1,)), name)
    run = Warmup(world)
    x, m, v = world.x, world.m, world.v
    for step in (1, 2, 3):
        run.run(0, step=step)
        x, m, v = oracle.adamw_step(x, world.scaled_g, m, v, world.hypers, step)
    for got, want in zip(gathered(run.params), x, strict=True):
        assert_close(got, want, 3 * ELEMENTWISE, 1)


class Update:
    """The tensors of one run of adam_update. Every seventh d is 0."""

    def __init__(self, world: World, coefficient: bool) -> None:
        self.world = world
        self.params, self.master = world.params(), world.master()
        self.d64 = [rounded(1 / np.sqrt(v), F32) for v in world.v]
        for d in self.d64:
            d[3::7] = 0.0
        self.d, self.replies = world.flat(self.d64), world.all_messages()
        self.c64 = rounded(np.random.default_rng(2).uniform(0.01, 0.3, len(world.x)), F32)
        self.coefficient = torch.from_numpy(self.c64).to(world.device, F32) if coefficient else None

    def run(self, chunk: int, replies: Messages | None = None) -> None:
        world = self.world
        span, part = world.spans()[chunk]
        world.passes.adam_update(
            span,
            self.params,
            self.d[part],
            (self.replies if replies is None else replies).slice(chunk * world.case.ranks, world.case.ranks),
            None if self.master is None else self.master[part],
            world.hyper(),
            self.coefficient,
        )

    def x(self) -> oracle.Arrays:
        return updated(self.world, self.params, self.master)

    def expected(self) -> tuple[oracle.Arrays, oracle.Arrays]:
        world = self.world
        m = world.plan.unflatten(values_of(self.replies, world.plan))
        hypers = world.hypers
        if self.coefficient is not None:
            hypers = [
                oracle.Hyper(h.lr * c, h.beta1, h.beta2, h.eps, h.weight_decay)
                for h, c in zip(hypers, self.c64, strict=True)
            ]
        x = oracle.onebit_adam_update(world.x, m, self.d64, hypers)
        return x, [np.abs(a) + np.abs(b - a) for a, b in zip(world.x, x, strict=True)]


@ON_BACKENDS
@pytest.mark.parametrize("coefficient", [False, True])
@GRID
def test_update_agrees_with_the_oracle(name, case, coefficient, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    run = Update(world, coefficient)
    for chunk in range(case.chunks):
        run.run(chunk)
    x, size = run.expected()
    check_parameters(world, run.params, run.master, x, size)


@ON_FUSED
@SMALL_GRID
def test_update_agrees_with_the_cpu(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    ours, theirs = Update(World(case, name), True), Update(World(case), True)
    for chunk in range(case.chunks):
        ours.run(chunk)
        theirs.run(chunk)
    _, size = theirs.expected()
    for got, want, s in zip(ours.x(), theirs.x(), size, strict=True):
        assert_close(got, want, AGREEMENT + 2 * theirs.world.half_place, s)


@ON_BACKENDS
@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_coordinate_with_d_zero_never_moves(name, master, groups):
    """Weight decay does not move it either, whatever the group."""
    world = World(Case((64, 30, 21), groups=groups, master=master), name)
    run = Update(world, False)
    for _ in range(3):
        run.run(0)
    for got, start, d in zip(run.x(), world.x, run.d64, strict=True):
        assert (got[d == 0] == start[d == 0]).all()
        assert (got[d != 0] != start[d != 0]).all()


@ON_BACKENDS
def test_update_leaves_blocks_of_a_flagged_reply_alone(name):
    world = World(Case((64, 64), ranks=2, master=True), name)
    run = Update(world, False)
    x, _ = run.expected()
    run.replies.flags[0] = NONFINITE
    run.replies.scales(0, world.layout.shard(0, 0)).fill_(float("nan"))
    run.run(0)
    got = run.x()
    assert got[0].tolist() == world.x[0].tolist()
    assert_close(got[1], x[1], ELEMENTWISE, 10)
    assert gathered(run.params)[0].tolist() == world.x[0].tolist()


@ON_BACKENDS
def test_update_of_one_chunk_leaves_the_others_alone(name):
    world = World(Case((160, 40), chunks=2), name)
    run = Update(world, False)
    run.run(0)
    assert gathered(run.params)[0][96:].tolist() == world.x[0][96:].tolist()
    assert gathered(run.params)[1].tolist() == world.x[1].tolist()
    x, size = run.expected()
    assert_close(gathered(run.params)[0][:96], x[0][:96], ELEMENTWISE, size[0][:96])

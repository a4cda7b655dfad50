"""lamb_warmup of every backend against the float64 oracle, and Triton against the CPU."""

import numpy as np
import pytest

from onebit.kernels.data.wire import NONFINITE
from tests import oracle
from tests.kernels.cases import (
    BF16,
    F32,
    GRID,
    ON_BACKENDS,
    ON_FUSED,
    SMALL_GRID,
    STEP,
    Case,
    World,
    assert_close,
    frozen_bits,
    gathered,
    numpy,
    rounded,
    use_grain,
)
from tests.kernels.test_passes_adam import AGREEMENT, ELEMENTWISE, check_parameters, updated

SUMMED = 1e-5  # a norm over a parameter, and what is divided by it
COEFFICIENTS = {"coeff_beta": 0.9, "min_coeff": 0.01, "max_coeff": 0.3}


def holding_elements(world: World) -> np.ndarray:
    """Parameters with elements: the coefficient of one without means nothing."""
    return np.array(world.case.numels) > 0


class Warmup:
    """The tensors of one run of lamb_warmup."""

    def __init__(self, world: World, average: float = 0.2) -> None:
        self.world = world
        self.params, self.grads, self.master = world.params(), world.grads(), world.master()
        self.exp_avg, self.exp_avg_sq = world.flat(world.m), world.flat(world.v)
        self.state = world.lamb_state()
        self.state.average.fill_(average)

    def run(self, step: int = STEP, flag: int = 0, **coefficients: float) -> None:
        world = self.world
        world.passes.lamb_warmup(
            world.layout.all(),
            self.params,
            self.grads,
            self.exp_avg,
            self.exp_avg_sq,
            self.master,
            world.hyper(step),
            world.flags(flag),
            self.state,
            **{**COEFFICIENTS, **coefficients},
        )

    def x(self) -> oracle.Arrays:
        return updated(self.world, self.params, self.master)


@ON_BACKENDS
@GRID
def test_warmup_agrees_with_the_oracle(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    run, some = Warmup(world), holding_elements(world)
    run.run()
    c_avg = np.full(len(world.x), 0.2)
    x, m, v, c_avg, c = oracle.lamb_step(world.x, world.scaled_g, world.m, world.v, c_avg, world.hypers, STEP)
    assert_close(numpy(run.state.coefficient)[some], c[some], SUMMED)
    assert_close(numpy(run.state.average)[some], c_avg[some], SUMMED)
    for got, want, size in zip(world.plan.unflatten(numpy(run.exp_avg)), m, world.m, strict=True):
        assert_close(got, want, ELEMENTWISE, np.abs(want) + np.abs(size))
    for got, want in zip(world.plan.unflatten(numpy(run.exp_avg_sq)), v, strict=True):
        assert_close(got, want, ELEMENTWISE)
    size = [np.abs(a) + 5 * np.abs(b - a) + h.lr for a, b, h in zip(world.x, x, world.hypers, strict=True)]
    check_parameters(world, run.params, run.master, x, size)
    assert not run.state.counter.any()


@ON_BACKENDS
def test_coefficients_lie_on_both_limits_and_between(name):
    """x of size 100, 1 and 0.001 where u is of size 1: max_coeff, unclipped, min_coeff."""
    world = World(Case((90, 90, 90)), name)
    rng = np.random.default_rng(0)
    world.x = [rounded(s * rng.normal(size=90), F32) for s in (100.0, 0.1, 0.001)]
    world.hypers = [oracle.LambHyper(0.1, 0.9, 0.99, 1e-6, 0.01)] * 3
    run = Warmup(world)
    run.run()
    *_, c = oracle.lamb_step(world.x, world.scaled_g, world.m, world.v, np.zeros(3), world.hypers, STEP)
    assert c[0] == 0.3 and 0.01 < c[1] < 0.3 and c[2] == 0.01
    assert_close(numpy(run.state.coefficient), c, SUMMED)


@ON_FUSED
@SMALL_GRID
def test_warmup_agrees_with_the_cpu(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    ours, theirs = Warmup(World(case, name)), Warmup(World(case))
    ours.run()
    theirs.run()
    some = holding_elements(ours.world)
    assert_close(numpy(ours.state.coefficient)[some], numpy(theirs.state.coefficient)[some], AGREEMENT)
    assert_close(numpy(ours.state.average)[some], numpy(theirs.state.average)[some], AGREEMENT)
    for got, want, h in zip(ours.x(), theirs.x(), ours.world.hypers, strict=True):
        assert_close(got, want, 2 * AGREEMENT + 2 * theirs.world.half_place, 10 * h.lr)


@ON_BACKENDS
@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_where_a_norm_is_zero_the_coefficient_is_one(name, what):
    """Zero gradients and momenta without weight decay, or a parameter that is zero: no NaN, and no clip."""
    world = World(Case((70, 33), groups=2), name)
    if what == "gradient":
        world.g[1], world.m[1], world.v[1] = np.zeros(33), np.zeros(33), np.zeros(33)
        world.scaled_g[1] = world.g[1]
    else:
        world.x[1] = np.zeros(33)
    run = Warmup(world, average=0.0)
    run.run()
    x, _, _, c_avg, c = oracle.lamb_step(world.x, world.scaled_g, world.m, world.v, np.zeros(2), world.hypers, STEP)
    assert c[1] == 1
    assert numpy(run.state.coefficient)[1] == 1
    assert_close(numpy(run.state.average), c_avg, SUMMED)
    assert_close(gathered(run.params)[1], x[1], ELEMENTWISE, 1)


@ON_BACKENDS
def test_warmup_with_a_flag_set_changes_nothing(name):
    world = World(Case((70, 5), param=BF16, grad=BF16, master=True), name)
    run = Warmup(world)
    watched = (run.params, run.exp_avg, run.exp_avg_sq, run.master, run.state)
    before = frozen_bits(*watched)
    run.run(flag=NONFINITE)
    assert frozen_bits(*watched) == before


@ON_BACKENDS
def test_warmup_carries_its_state_over_three_steps(name):
    world = World(Case((100, 7, 40), groups=2, missing=(1,)), name)
    run = Warmup(world, average=0.0)
    x, m, v, c_avg = world.x, world.m, world.v, np.zeros(3)
    for step in (1, 2, 3):
        run.run(step)
        x, m, v, c_avg, _ = oracle.lamb_step(x, world.scaled_g, m, v, c_avg, world.hypers, step)
        assert not run.state.counter.any()
    assert_close(numpy(run.state.average), c_avg, 3 * SUMMED)
    for got, want in zip(gathered(run.params), x, strict=True):
        assert_close(got, want, 3 * SUMMED, 1)

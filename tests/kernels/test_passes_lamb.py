"""lamb_warmup and lamb_statistics: the CPU's against the float64 oracle, and their limits on every backend."""

import numpy as np
import pytest

from onebit.kernels.data.wire import NONFINITE
from tests import oracle
from tests.kernels.cases import ELEMENTWISE, F32, GRID, MASKED, ON_BACKENDS, Case
from tests.kernels.compare import assert_all_close, assert_close, frozen_bits, numpy, rounded
from tests.kernels.world import World

SUMMED = 1e-5  # a norm over a parameter, and what is divided by it
RATIOS = pytest.mark.parametrize("ratio", ["variance", "denominator"])


@GRID
def test_warmup_agrees_with_the_oracle(case):
    world, average = World(case), numpy(World(case).state.average)
    world.run("lamb_warmup")
    x, m, v, c_avg, c = oracle.lamb_step(world.x, world.scaled_g, world.m, world.v, average, world.hypers, 7)
    some = np.array(case.numels) > 0  # the coefficient of a parameter without elements means nothing
    assert_close(numpy(world.state.coefficient)[some], c[some], SUMMED)
    assert_close(numpy(world.state.average)[some], c_avg[some], SUMMED)
    world.check_moments(m, v)
    world.check_parameters(x, moves=5, lrs=1)


@ON_BACKENDS
def test_coefficients_lie_on_both_limits_and_between_and_are_one_where_a_norm_is_zero(name):
    """x of size 100, 0.1 and 0.001 where u is of size 1; then a u of zeros, and an x of zeros: no NaN, and no clip."""
    world = World(Case((90,) * 5), name)
    rng = np.random.default_rng(0)
    world.x = [rounded(s * rng.normal(size=90), F32) for s in (100.0, 0.1, 0.001, 1.0, 0.0)]
    world.hypers = [oracle.LambHyper(0.1, 0.9, 0.99, 1e-6, 0.01)] * 5
    world.g[3], world.m[3], world.v[3], world.x[3] = (np.zeros(90) for _ in range(4))
    world.state.average.zero_()
    x, m, v, c_avg = world.x, world.m, world.v, np.zeros(5)
    for step in (1, 2, 3):
        world.run("lamb_warmup", hyper=world.hyper(step))
        x, m, v, c_avg, c = oracle.lamb_step(x, world.scaled_g, m, v, c_avg, world.hypers, step)
        assert step > 1 or (c[0] == 0.3 and 0.01 < c[1] < 0.3 and c[2] == 0.01 and c[3] == c[4] == 1)
        assert_close(numpy(world.state.coefficient), c, 3 * SUMMED)
        assert not world.state.counter.any()
    assert_close(numpy(world.state.average), c_avg, 3 * SUMMED)
    assert_all_close(world.moved(), x, 3 * SUMMED, 1)


def expected_statistics(world: World, ratio: str, v: oracle.Arrays, r: np.ndarray) -> tuple[oracle.Arrays, np.ndarray]:
    """What the pass can compute: v_T from the fp32 d; live where d is not 0 and the mask has a bit."""
    frozen = []
    for d, h, live, gamma in zip(world.d64, world.hypers, world.plan.unflatten(world.live), world.gamma, strict=True):
        v_d = np.maximum(1 / (np.where(d > 0, d, 1) * gamma) - h.eps, 0) ** 2
        frozen.append(np.where(live & (d > 0), v_d, 0.0))
    frozen = oracle.LambFrozen(world.d64, frozen, numpy(world.state.average), np.ones(len(v)))
    momenta = world.replied(), world.last_momentum()
    m, previous = ([m / gamma for m, gamma in zip(of, world.gamma, strict=True)] for of in momenta)
    _, v, r = oracle.onebit_lamb_update(world.x, m, previous, v, r, frozen, world.hypers, ratio)
    return v, r


@RATIOS
@MASKED
@GRID
def test_statistics_agree_with_the_oracle(ratio, masked, case):
    world = World(case, masked=masked)
    some = np.array(case.numels) > 0
    v, r = expected_statistics(world, ratio, world.v, numpy(world.state.ratio))
    world.run("lamb_statistics", ratio=ratio)
    assert_all_close(world.unpadded(world.exp_avg_sq), v, 2 * ELEMENTWISE, 1e-3)
    assert_close(numpy(world.state.ratio)[some], r[some], SUMMED)
    assert_close(numpy(world.state.coefficient)[some], (r * numpy(world.state.average))[some], SUMMED)


@ON_BACKENDS
@RATIOS
@MASKED
def test_without_clips_the_ratio_is_the_maximum_over_steps(name, ratio, masked):
    """Thresholds wide open, so that a wrong maximum cannot hide behind a clip."""
    world = World(Case((100, 70, 31), groups=2, ranks=2, momentum="packed"), name, masked=masked)
    parts, rng = zip(world.v, world.hypers, world.gamma, strict=True), np.random.default_rng(3)
    wide = [1 / ((np.sqrt(v * rng.uniform(0.1, 30, v.size)) + h.eps) * gamma) for v, h, gamma in parts]
    world.d64 = [rounded(d, F32) for d in wide]
    open_wide = {"factor_min": 0.0, "factor_max": 1e9, "factor_threshold": 1e6}
    world.hypers = [oracle.LambHyper(**{**vars(h), **open_wide}) for h in world.hypers]
    v, r = world.v, numpy(world.state.ratio)
    for seed in (6, 7, 8):
        v, r = expected_statistics(world, ratio, v, r)
        world.run("lamb_statistics", ratio=ratio, **open_wide)
        assert seed > 6 or (r > 1.5).all()
        assert_close(numpy(world.state.ratio), r, 3 * SUMMED)
        assert not world.state.counter.any()
        world.momentum, world.replies = world.replies, world.all_messages(seed)
    assert_all_close(world.unpadded(world.exp_avg_sq), v, 3 * SUMMED, 1e-3)


@ON_BACKENDS
def test_the_ratio_is_clipped_to_the_last_one_and_then_to_its_limits(name):
    for last, frozen, least, want in (
        (1.0, 35.0, 0.5, 1.1),  # up by no more than the threshold
        (1.0, 0.01, 0.5, 0.9),  # down by no more than the threshold
        (3.9, 35.0, 0.5, 4.0),  # no higher than factor_max
        (0.52, 0.01, 0.5, 0.5),  # no lower than factor_min
        (1.0, 35.0, 2.0, 2.0),  # which has the last word over the threshold
    ):
        world = World(Case((100,), groups=1), name)
        world.d64 = [rounded(1 / (np.sqrt(frozen * v) + 1e-6), F32) for v in world.v]
        world.state.ratio.fill_(last)
        world.replies.scales(0, world.layout.all()).fill_(1e-6)
        world.exp_avg.zero_()
        world.run("lamb_statistics", factor_min=least)
        assert_close(numpy(world.state.ratio), [want], 1e-6)
        assert_close(numpy(world.state.coefficient), want * numpy(world.state.average), 1e-6)


@ON_BACKENDS
@RATIOS
def test_a_parameter_that_no_gradient_ever_reached_has_ratio_one_and_no_nan(name, ratio):
    """Every d is 0, and v_T and v are too."""
    world = World(Case((70, 33), groups=2), name)
    world.v[1], world.m[1], world.d64[1] = np.zeros((3, 33))
    world.state.ratio.fill_(1.0)
    world.replies.scales(0, world.layout.all())[3:] = 0.0
    world.run("lamb_statistics", ratio=ratio)
    assert numpy(world.state.ratio)[1] == 1 and np.isfinite(numpy(world.state.ratio)).all()
    assert not world.unpadded(world.exp_avg_sq)[1].any()


@ON_BACKENDS
def test_statistics_of_flagged_replies_change_nothing(name):
    world = World(Case((70, 5), ranks=2, senders=3), name)
    world.replies.flags[1::3] = NONFINITE  # as in all servers' replies
    world.replies.scales(1, world.layout.shard(0, 0)).fill_(float("nan"))
    before = frozen_bits(world.exp_avg_sq, world.state)
    world.run("lamb_statistics")
    assert frozen_bits(world.exp_avg_sq, world.state) == before


@ON_BACKENDS
def test_between_sees_the_sums_of_squares_and_may_put_other_coefficients(name):
    """This rank has a part of a parameter alone: x moves by what `between` leaves."""
    for c in (0.0, 0.05):
        world, partials = World(Case((90, 40)), name), []

        def between(state=world.state, c=c, partials=partials):
            partials.append(numpy(state.partial))
            state.coefficient.fill_(c)

        world.run("lamb_warmup", between=between)
        squares = [(block**2).sum() for block in world.plan.of_blocks(world.plan.flatten(world.x))]
        assert_close(partials[0][0], squares, SUMMED)
        for x, start in zip(world.moved(), world.x, strict=True):
            assert (x != start).all() if c else x.tolist() == start.tolist()

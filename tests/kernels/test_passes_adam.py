"""scan, adam_warmup and adam_update: the CPU's against the float64 oracle, and what stops them on every backend."""

import numpy as np
import pytest

from onebit.kernels.data.hyper import LARGEST
from onebit.kernels.data.wire import NONFINITE
from tests import oracle
from tests.kernels.cases import BF16, F16, F32, GRID, ON_BACKENDS, SCALES, Case
from tests.kernels.compare import assert_guards, numpy
from tests.kernels.world import World


@GRID
def test_scan_sums_the_squares_of_the_scaled_gradients_of_each_block(case):
    world = World(case)
    world.run("scan")
    world.check_sums(world.squares, world.plan.flatten(world.scaled_g) ** 2)
    assert int(world.flags) == 0
    assert_guards(world.grads)


def test_scan_of_four_blocks_at_a_time():
    """The CPU scans fp32 gradients so: each sum and each flag is that of its own block."""
    for numel in (1000, 256, 320):
        world = World(Case((numel, 40)))
        world.run("scan")
        world.check_sums(world.squares, world.plan.flatten(world.scaled_g) ** 2)
        for element in range(0, numel, 31):
            bad = World(Case((numel, 40)))
            bad.g[0][element] = np.nan
            bad.run("scan")
            assert int(bad.flags) == 1, element


NOT_FINITE = [
    (0, 0, np.inf, F32), (0, 69, -np.inf, F16), (1, 2, np.nan, BF16), (2, 63, np.inf, BF16), (2, 5, np.nan, F16)
]  # fmt: skip


@ON_BACKENDS
def test_an_element_that_is_not_finite_or_too_large_when_scaled_sets_the_flag_which_stays_set(name):
    """Group 2 has a gradient scale of 3. Only the gradients of the span are looked at; one that is None is 0."""
    for parameter, element, value, grad in NOT_FINITE:
        world = World(Case((70, 3, 64), grad=grad, param=grad, groups=2), name)
        world.g[parameter][element] = value
        for _ in range(2):
            world.flags.zero_()
            world.run("scan")
            assert int(world.flags) == 1, (parameter, element)
    world = World(Case((5, 40, 5), groups=3, chunks=2, missing=(0,)), name)
    world.g[1][3] = 0.7 * LARGEST
    world.run("scan")
    assert int(world.flags) == 0 and float(world.squares[0]) == 0
    world = World(Case((5, 5, 40), groups=3, chunks=2), name)
    world.g[2][39] = 0.7 * LARGEST
    for chunk, flag in ((0, 0), (1, 1), (0, 1)):
        world.run("scan", chunk)
        assert int(world.flags) == flag


@GRID
def test_warmup_agrees_with_the_oracle(case):
    world = World(case)
    world.run("adam_warmup")
    x, m, v = oracle.adamw_step(world.x, world.scaled_g, world.m, world.v, world.hypers, 7)
    world.check_moments(m, v)
    world.check_parameters(x, lrs=10)
    world.check_sums(world.sums, world.plan.flatten(v))


@GRID
@pytest.mark.parametrize("each", ["adam_update", "lamb_update"])
def test_update_agrees_with_the_oracle(each, case):
    world = World(case)
    world.run(each)
    factors = world.coefficient64 if each == "lamb_update" else np.ones(len(world.x))
    hypers = [oracle.Hyper(h.lr * c, weight_decay=h.weight_decay) for h, c in zip(world.hypers, factors, strict=True)]
    clipped = [clip * m for clip, m in zip(world.clip64, world.replied(), strict=True)]
    world.check_parameters(oracle.onebit_adam_update(world.x, clipped, world.d64, hypers))
    for got, start, d in zip(world.moved(), world.x, world.d64, strict=True):  # weight decay does not move it either
        assert (got[d == 0] == start[d == 0]).all()


@ON_BACKENDS
@pytest.mark.parametrize("master, scale", [(True, "block"), (False, "tensor")])
@pytest.mark.parametrize("each", ["adam_warmup", "lamb_warmup", "zero_one_full", "zero_one_local"])
def test_a_set_flag_changes_nothing(name, each, master, scale):
    world = World(Case((70, 5), param=F16, grad=F16, master=master, scale=scale), name)
    world.g[0][3] = np.inf
    world.flags.fill_(NONFINITE)
    before = world.everything()
    world.run(each)
    assert world.everything() == before


@ON_BACKENDS
@pytest.mark.parametrize("param, master, senders", [(F32, False, 1), (F16, True, 2), (F16, False, 3)])
@pytest.mark.parametrize("each", ["adam_update", "zero_one_update", "zero_one_sync"])
def test_a_flagged_reply_leaves_its_blocks_alone(name, each, param, master, senders):
    """Whichever sender's message has the flag."""
    case = Case((64, 64), ranks=2, param=param, grad=param, master=master, senders=senders)
    stopped, plain = World(case, name), World(case, name)
    stopped.replies.flags[senders - 1] = NONFINITE
    stopped.replies.scales(0, stopped.layout.shard(0, 0)).fill_(float("nan"))
    for world in (stopped, plain):
        world.run(each)
    for found, whole, start in (
        (stopped.moved(), plain.moved(), stopped.x),
        (stopped.unpadded(stopped.anchor), plain.unpadded(plain.anchor), stopped.anchor64),
        (stopped.unpadded(stopped.exp_avg), plain.unpadded(plain.exp_avg), stopped.m),
    ):
        assert found[0].tolist() == start[0].tolist()
        assert found[1].tolist() == whole[1].tolist()
    assert stopped.moved()[1].tolist() != stopped.x[1].tolist()
    assert_guards(stopped.params)


@ON_BACKENDS
@SCALES
def test_padding_stays_as_it_is(name, scale):
    for each in ("adam_warmup", "lamb_warmup", "lamb_statistics", "zero_one_full", "zero_one_local", "zero_one_sync"):
        world = World(Case((70, 5), ranks=2, param=F16, grad=F16, master=True, scale=scale), name)
        states = [world.exp_avg, world.exp_avg_sq, world.anchor, world.d, world.master, world.residuals[0].value]
        for state in states:
            state.nan_to_num_(nan=2.5)  # what a NaN is added to would not show
        world.run(each)
        assert all((numpy(state)[~world.plan.valid] == 2.5).all() for state in states), each

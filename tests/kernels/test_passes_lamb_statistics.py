"""lamb_statistics of every backend against the float64 oracle, and Triton against the CPU."""

import numpy as np
import pytest
import torch

from onebit.kernels.data.wire import NONFINITE, Messages
from tests import oracle
from tests.kernels.cases import (
    F32,
    FEW_GRID,
    GRID,
    ON_BACKENDS,
    ON_FUSED,
    SMALL_GRID,
    Case,
    World,
    assert_close,
    frozen_bits,
    numpy,
    rounded,
    use_grain,
)
from tests.kernels.test_passes_adam import AGREEMENT, ELEMENTWISE
from tests.kernels.test_passes_lamb_warmup import SUMMED, holding_elements
from tests.wire import values_of

FACTORS = {"factor_min": 0.5, "factor_max": 4.0, "factor_threshold": 0.1}
RATIOS = pytest.mark.parametrize("ratio", ["variance", "denominator"])


class Statistics:
    """The tensors of one run of lamb_statistics. v_T lies between half of v and four times v; some d are 0.

    `extras`: coordinates that are not live, and messages of gamma times the momentum.
    """

    def __init__(self, world: World, spread: tuple[float, float] = (0.5, 4.0), extras: bool = False) -> None:
        self.world, self.extras, rng = world, extras, np.random.default_rng(3)
        self.live = world.plan.unflatten(world.live if extras else np.ones(world.elements, bool))
        self.gamma = world.gamma if extras else np.ones(len(world.x))
        frozen = [v * rng.uniform(*spread, v.size) for v in world.v]
        self.d64 = [
            rounded(1 / ((np.sqrt(f) + h.eps) * gamma), F32)
            for f, h, gamma in zip(frozen, world.hypers, self.gamma, strict=True)
        ]
        for d in self.d64:
            d[3::7] = 0.0
        self.d, self.exp_avg_sq = world.flat(self.d64), world.flat(world.v)
        self.replies = world.all_messages(seed=4)
        self.state = world.lamb_state()
        self.state.average.copy_(torch.from_numpy(rng.uniform(0.01, 0.3, len(world.x))))
        self.state.ratio.copy_(torch.from_numpy(rng.uniform(0.9, 1.1, len(world.x))))
        self.previous, self.previous64 = self._previous()

    def _previous(self) -> tuple[torch.Tensor | Messages, oracle.Arrays]:
        world = self.world
        if world.case.momentum == "packed":
            messages = world.all_messages(seed=5)
            return messages, world.plan.unflatten(values_of(messages, world.plan))
        return world.flat(world.m), world.m

    def frozen(self) -> oracle.LambFrozen:
        """What the pass can compute: v_T from the fp32 d; live where d is not 0 and the mask has a bit."""
        v = [
            np.where(live & (d > 0), np.maximum(1 / (np.where(d > 0, d, 1) * gamma) - h.eps, 0) ** 2, 0.0)
            for d, h, live, gamma in zip(self.d64, self.world.hypers, self.live, self.gamma, strict=True)
        ]
        return oracle.LambFrozen(self.d64, v, numpy(self.state.average), np.ones(len(v)))

    def run(self, ratio: str, replies: Messages | None = None, **factors: float) -> None:
        world = self.world
        world.passes.lamb_statistics(
            world.layout.all(),
            self.replies if replies is None else replies,
            self.previous,
            self.d,
            self.exp_avg_sq,
            world.hyper(),
            self.state,
            **{**FACTORS, **factors},
            ratio=ratio,
            live=world.packed(world.live) if self.extras else None,
            gamma=world.per_parameter(self.gamma) if self.extras else None,
        )

    def expected(self, ratio: str, v: oracle.Arrays, r: np.ndarray) -> tuple[oracle.Arrays, np.ndarray]:
        world = self.world
        m, previous = (
            [m_p / gamma for m_p, gamma in zip(scaled, self.gamma, strict=True)]
            for scaled in (world.plan.unflatten(values_of(self.replies, world.plan)), self.previous64)
        )
        _, v, r = oracle.onebit_lamb_update(world.x, m, previous, v, r, self.frozen(), world.hypers, ratio)
        return v, r


def check_statistics(run: Statistics, ratio: str) -> None:
    world, some = run.world, holding_elements(run.world)
    want_v, want_r = run.expected(ratio, world.v, numpy(run.state.ratio))
    run.run(ratio)
    for got, want in zip(world.plan.unflatten(numpy(run.exp_avg_sq)), want_v, strict=True):
        assert_close(got, want, 2 * ELEMENTWISE, 1e-3)
    assert_close(numpy(run.state.ratio)[some], want_r[some], SUMMED)
    assert_close(numpy(run.state.coefficient)[some], (want_r * numpy(run.state.average))[some], SUMMED)
    assert not run.state.counter.any()


@ON_BACKENDS
@RATIOS
@GRID
def test_statistics_agree_with_the_oracle(name, ratio, case, monkeypatch):
    use_grain(monkeypatch, case)
    check_statistics(Statistics(World(case, name)), ratio)


@ON_BACKENDS
@RATIOS
@FEW_GRID
def test_statistics_with_a_live_mask_and_scaled_momentum(name, ratio, case, monkeypatch):
    use_grain(monkeypatch, case)
    check_statistics(Statistics(World(case, name), extras=True), ratio)


@ON_BACKENDS
@RATIOS
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "masked and scaled"])
def test_without_clips_the_ratio_is_the_maximum(name, ratio, extras):
    """Thresholds wide open, so that a wrong maximum cannot hide behind a clip."""
    world = World(Case((100, 70, 31), groups=2, momentum="packed"), name)
    run = Statistics(world, spread=(0.1, 30.0), extras=extras)
    open_wide = {"factor_min": 0.0, "factor_max": 1e9, "factor_threshold": 1e6}
    world.hypers = [oracle.LambHyper(**{**vars(h), **open_wide}) for h in world.hypers]
    _, want = run.expected(ratio, world.v, numpy(run.state.ratio))
    run.run(ratio, **open_wide)
    assert (want > 1.5).all()
    assert_close(numpy(run.state.ratio), want, SUMMED)


@ON_BACKENDS
@pytest.mark.parametrize("last, spread, want", [
    (1.0, (30.0, 40.0), 1.1),  # up by no more than the threshold
    (1.0, (0.01, 0.02), 0.9),  # down by no more than the threshold
    (3.9, (30.0, 40.0), 4.0),  # no higher than factor_max
    (0.52, (0.01, 0.02), 0.5),  # no lower than factor_min
])  # fmt: skip
def test_the_ratio_is_clipped_to_the_last_one_and_then_to_its_limits(name, last, spread, want):
    world = World(Case((100,), groups=1), name)
    run = Statistics(world, spread)
    run.state.ratio.fill_(last)
    run.replies.scales(0, world.layout.all()).fill_(1e-6)
    run.run("variance")
    assert_close(numpy(run.state.ratio), [want], 1e-6)
    assert_close(numpy(run.state.coefficient), want * numpy(run.state.average), 1e-6)


@ON_BACKENDS
def test_the_limits_have_the_last_word_over_the_threshold(name):
    """Up from 1 by no more than 0.1, but no lower than 2."""
    run = Statistics(World(Case((100,)), name), (30.0, 40.0))
    run.state.ratio.fill_(1.0)
    run.run("variance", factor_min=2.0)
    assert_close(numpy(run.state.ratio), [2.0], 1e-6)


@ON_FUSED
@RATIOS
@SMALL_GRID
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "masked and scaled"])
def test_statistics_agree_with_the_cpu(name, ratio, case, extras, monkeypatch):
    use_grain(monkeypatch, case)
    ours, theirs = Statistics(World(case, name), extras=extras), Statistics(World(case), extras=extras)
    ours.run(ratio)
    theirs.run(ratio)
    some = holding_elements(ours.world)
    plan = ours.world.plan
    for got, want in zip(*(plan.unflatten(numpy(r.exp_avg_sq)) for r in (ours, theirs)), strict=True):
        assert_close(got, want, AGREEMENT)
    assert_close(numpy(ours.state.ratio)[some], numpy(theirs.state.ratio)[some], AGREEMENT)
    assert_close(numpy(ours.state.coefficient)[some], numpy(theirs.state.coefficient)[some], AGREEMENT)


@ON_BACKENDS
@RATIOS
def test_zero_gradients_and_variances_give_ratio_one_and_no_nan(name, ratio):
    """A parameter that no gradient ever reached: every d is 0, and v_T and v are too."""
    world = World(Case((70, 33), groups=2), name)
    world.v[1], world.m[1] = np.zeros(33), np.zeros(33)
    run = Statistics(world)
    run.state.ratio.fill_(1.0)
    run.d[96:] = 0.0
    run.replies.scales(0, world.layout.all())[3:] = 0.0
    run.run(ratio)
    assert numpy(run.state.ratio)[1] == 1
    assert not numpy(run.exp_avg_sq)[96:129].any()
    assert np.isfinite(numpy(run.state.ratio)).all()


@ON_BACKENDS
@RATIOS
@pytest.mark.parametrize("momentum", ["dense", "packed"])
def test_all_live_is_no_mask_and_gamma_one_is_no_gamma_bit_for_bit(name, ratio, momentum):
    world = World(Case((100, 7, 96), 96, 2, groups=2, momentum=momentum), name)
    world.live, world.gamma = np.ones(world.elements, bool), np.ones(3)
    found = []
    for extras in (False, True):
        run = Statistics(world, extras=extras)
        run.run(ratio)
        found.append(frozen_bits(run.exp_avg_sq, run.state.ratio, run.state.coefficient))
    assert found[0] == found[1]


@ON_BACKENDS
def test_statistics_with_flagged_replies_change_nothing(name):
    world = World(Case((70, 5), ranks=2), name)
    run = Statistics(world)
    run.replies.flags.fill_(NONFINITE)
    for row, shard in enumerate(world.layout.all().shards()):
        run.replies.scales(row, shard).fill_(float("nan"))
    watched = (run.exp_avg_sq, run.state.ratio, run.state.coefficient, run.state.average, run.state.counter)
    before = frozen_bits(*watched)
    run.run("variance")
    assert frozen_bits(*watched) == before


@ON_BACKENDS
@RATIOS
def test_statistics_carry_their_state_over_three_steps(name, ratio):
    world = World(Case((100, 7, 64), ranks=2, groups=2, momentum="packed"), name)
    run = Statistics(world)
    v, r = world.v, numpy(run.state.ratio)
    for seed in (6, 7, 8):
        v, r = run.expected(ratio, v, r)
        run.run(ratio)
        assert not run.state.counter.any()
        run.previous, run.previous64 = run.replies, world.plan.unflatten(values_of(run.replies, world.plan))
        run.replies = world.all_messages(seed=seed)
    assert_close(numpy(run.state.ratio), r, 3 * SUMMED)
    for got, want in zip(world.plan.unflatten(numpy(run.exp_avg_sq)), v, strict=True):
        assert_close(got, want, 3 * SUMMED, 1e-3)

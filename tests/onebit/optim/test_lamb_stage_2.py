"""Stage 2 of 1-bit LAMB is the float64 simulation of the paper's Algorithm 1, at every step and on every rank."""

import itertools

import numpy as np
import pytest

from tests import oracle
from tests.onebit.optim.lamb_simulation import GROUPS, LAMB, RATIO, UNDECAYED, LambSimulation, both_stages, check
from tests.onebit.optim.simulation import ROUNDING, averaged, on_ranks, options, whole_c, whole_scale
from tests.onebit.runs import arrays


def run_all(rank, size, cases):
    return [both_stages(rank, size, case) for case in cases]


EVERY = list(itertools.product(("variance", "denominator"), ("block", "tensor"), (True, False)))
CHOICES = {  # ratio, scale, weight decay
    1: [EVERY[0], EVERY[7]],
    2: [EVERY[0], EVERY[3], EVERY[5], EVERY[6]],
    3: [EVERY[1], EVERY[2], EVERY[4], EVERY[7]],
    4: [EVERY[2], EVERY[5]],
}


def chosen(i, ratio, scale, decayed):
    own = {"ratio": ratio, "scale": scale, "chunks": 1 + i % 3, "norm": ("l1", "l2")[i % 4 // 2]}
    limits = {"factor_max": 1.5, "factor_min": 0.8, "factor_threshold": 0.05, "bias_correction": False} if i % 2 else {}
    return options(LAMB.but(groups=GROUPS if decayed else UNDECAYED), **own, **limits)


@pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_100_steps_of_stage_2_equal_the_simulation(size):
    cases = [chosen(i, *own) for i, own in enumerate(CHOICES[size])]
    reasons = set()
    for case, recorded in zip(cases, zip(*on_ranks(size, run_all, cases), strict=True), strict=True):
        reasons |= check(case, recorded)
    assert reasons == {"none", "limit", "the largest", "as far up as it may", "as far down as it may"}


@pytest.mark.parametrize("reply", ["direct", 2])
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4))])
def test_100_steps_with_other_replies_equal_the_simulation(size, reply):
    cases = [options(chosen(i, *own), reply=reply) for i, own in enumerate(CHOICES[max(size, 2)])]
    for case, recorded in zip(cases, zip(*on_ranks(size, run_all, cases), strict=True), strict=True):
        check(case, recorded)


def test_stage_2_in_16_bits_equals_the_simulation():
    case = LAMB.but(dtype="bfloat16", steps=40, options={"freeze_step": 8, "scale": "tensor"})
    check(case, on_ranks(2, both_stages, case))


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stage_2_follows_a_simulation_that_is_never_synced(size, scale):
    """From the first step of stage 1 on, until |c| is within rounding of 0 anywhere; these gradients leave 22 steps."""
    case = options(LAMB.but(steps=30, seed=3), scale=scale, block_size=32)
    recorded, sim = on_ranks(size, both_stages, case)[0], LambSimulation(case, size)
    x, c = sim.ordered(arrays(case.parameters())), np.zeros(len(case.shapes))
    m, v = oracle.zeros(x), oracle.zeros(x)
    for step in range(1, sim.freeze_step + 1):
        mean = [g.numpy() for g in sim.ordered(averaged(case, size, step))]
        x, m, v, c, _ = oracle.lamb_step(x, mean, m, v, c, sim.hypers, step)
    sim.freeze(m, v, c)
    holds, followed = [part.size > 0 for part in x], 0
    for i, step in enumerate(range(sim.freeze_step + 1, case.steps + 1)):
        x = sim.step(x, step)
        messages = [*sim.all_reduce.gathered, sim.all_reduce.scattered]
        if any((sim.has_variance & (np.abs(whole_c(ms)) <= ROUNDING * whole_scale(ms))).any() for ms in messages):
            break
        for got, expected in zip(recorded.x[i], x, strict=True):
            assert np.abs(got - expected).max(initial=0.0) <= ROUNDING * np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(recorded.ratio[i][holds], sim.r[holds], rtol=10 * RATIO)
        followed += 1
    assert followed >= 15

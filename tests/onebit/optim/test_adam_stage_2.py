"""Stage 2 of 1-bit Adam is the float64 simulation of the paper's Algorithm 1, at every step and on every rank."""

import itertools

import numpy as np
import pytest

from tests import oracle
from tests.onebit.optim.simulation import (
    GROUPS,
    MISSING,
    ROUNDING,
    SHAPES,
    Simulation,
    averaged,
    both_stages,
    check,
    on_ranks,
    options,
    whole_c,
    whole_scale,
)
from tests.onebit.runs import Case, arrays

STAGES = Case(
    shapes=SHAPES,
    steps=108,
    groups=GROUPS,
    missing=(*MISSING, (30, 0, 1), (31, 0, 0), (31, 1, 0), (31, 2, 0), (31, 3, 0)),
    options={"freeze_step": 8},
)


def run_all(rank, size, cases):
    return [both_stages(rank, size, case) for case in cases]


EVERY = [*itertools.product(("block", "tensor"), ("l1", "l2"), (True, False)), ("block", "unbiased", True)]
CHOICES = {  # scale, norm, bias_correction
    1: EVERY,
    2: [("block", "l1", True), ("block", "l2", False), ("tensor", "l1", False), ("tensor", "l2", True)],
    3: [("block", "l1", True), ("tensor", "l2", False), ("block", "unbiased", False)],
    4: [("block", "l2", False), ("tensor", "l1", True), ("block", "unbiased", True)],
}


@pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_100_steps_of_stage_2_equal_the_simulation(size):
    cases = [
        options(STAGES, scale=scale, norm=norm, bias_correction=corrected, chunks=1 + i % 3)
        for i, (scale, norm, corrected) in enumerate(CHOICES[size])
    ]
    for case, recorded in zip(cases, zip(*on_ranks(size, run_all, cases), strict=True), strict=True):
        check(case, recorded)


@pytest.mark.parametrize("reply", ["direct", 2])
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4))])
def test_100_steps_with_other_replies_equal_the_simulation(size, reply):
    cases = [
        options(STAGES, scale=scale, norm=norm, bias_correction=corrected, chunks=1 + i % 3, reply=reply)
        for i, (scale, norm, corrected) in enumerate(CHOICES[max(size, 2)])
    ]
    for case, recorded in zip(cases, zip(*on_ranks(size, run_all, cases), strict=True), strict=True):
        check(case, recorded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("master", [True, False], ids=["master", "rounded"])
def test_stage_2_in_16_bits_equals_the_simulation(dtype, master):
    case = options(STAGES.but(dtype=dtype, steps=40), master_weights=master)
    check(case, on_ranks(2, both_stages, case))


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stage_2_follows_a_simulation_that_is_never_synced(size, scale):
    """From the first step of stage 1 on, until |c| is within rounding of 0 anywhere; these gradients leave 15 steps."""
    case = options(STAGES.but(steps=38), scale=scale)
    recorded, sim = on_ranks(size, both_stages, case)[0], Simulation(case, size)
    x = sim.ordered(arrays(case.parameters()))
    m, v = oracle.zeros(x), oracle.zeros(x)
    for step in range(1, sim.freeze_step + 1):
        mean = [g.numpy() for g in sim.ordered(averaged(case, size, step))]
        x, m, v = oracle.adamw_step(x, mean, m, v, sim.hypers, step)
    sim.freeze(m, v)
    followed = 0
    for i, step in enumerate(range(sim.freeze_step + 1, case.steps + 1)):
        x = sim.step(x, step)
        messages = [*sim.all_reduce.gathered, sim.all_reduce.scattered]
        if any((sim.has_variance & (np.abs(whole_c(ms)) <= ROUNDING * whole_scale(ms))).any() for ms in messages):
            break
        for got, expected in zip(sim.ordered(recorded.x[i]), x, strict=True):
            assert np.abs(got - expected).max(initial=0.0) <= ROUNDING * np.abs(expected).max(initial=0.0)
        followed += 1
    assert followed >= 15

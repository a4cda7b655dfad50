"""1-bit LAMB where parameters, gradients or variances are 0, empty or missing: finite, and as simulated."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from tests.onebit.optim.lamb_simulation import LambSimulation, Sized, both_stages, check, without_warnings
from tests.onebit.optim.simulation import group_or_none, on_ranks, options
from tests.onebit.runs import bits, take

NOTHING = Sized(
    shapes=((12, 8), (2,), (0,), (33,), (40,), (1,)),
    x_sizes=(1.0, 0.0, 1.0, 0.1, 1.0, 0.5),
    steps=30,
    options={"freeze_step": 1, "weight_decay": 0.1},
    groups=({}, {"betas": (0.8, 0.9), "eps": 1e-3}),
    missing=((1, 0, 3), (2, 0, 1), (5, 1, 0), (7, 0, 3), (7, 1, 3)),
    untouched=((0, 3, 15), (4, 40, 10**6)),  # rows without gradients until stage 2 is well under way; a whole parameter
)
HARD = [
    options(NOTHING, ratio=ratio, scale=scale, zero_variance=zero_variance, bias_correction=scale == "block")
    for ratio, scale, zero_variance in itertools.product(
        ("variance", "denominator"), ("block", "tensor"), ("floor", "hold")
    )
]


def everything_finite(rank, size, cases):
    return [without_warnings(lambda case=case: _everything_finite(rank, size, case)) for case in cases]


def _everything_finite(rank, size, case):
    params = case.parameters()
    optimizer = case.build(params, group_or_none(size))
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        tensors = [*params, *(t for own in optimizer.state_dict()["state"].values() for t in own.values())]
        for state in optimizer.current.states:
            tensors += [state[name] for name in ("ratio", "coefficient", "coefficient_average") if name in state]
        for tensor in tensors:
            assert tensor.isfinite().all(), f"step {step}, shape {tuple(tensor.shape)}"
        if step == case.options["freeze_step"]:
            frozen = [p.detach().clone() for p in params]
    assert optimizer.compressing and optimizer.skipped_steps == 0
    moved = [bool((p != before).any()) for p, before in zip(params, frozen, strict=True)]
    return moved, bits(params)


@pytest.mark.parametrize("size", [1, 2])
def test_everything_is_finite_with_parameters_and_gradients_that_are_0_or_missing(size):
    """Where a parameter, its gradient or both are empty, 0 or missing; and a freeze after the first step."""
    found = on_ranks(size, everything_finite, HARD)
    for own in found:
        for moved, _ in own:  # without a gradient on any rank until the freeze, d is 0
            assert moved == [True, True, False, size > 1, False, True]
        assert [end for _, end in own] == [end for _, end in found[0]]


@pytest.mark.parametrize("ratio", ["variance", "denominator"])
def test_one_gradient_element_that_is_not_0_is_enough(ratio):
    """The smallest model that can be frozen at all."""
    case = Sized(shapes=((0,), (3,)), steps=8, options={"freeze_step": 1, "ratio": ratio}, missing=((3, 0, 1),))
    params = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))]
    optimizer = case.build(params)
    for step in range(1, 9):
        params[0].grad, params[1].grad = None, None if step == 3 else torch.tensor([0.0, 1e-20, 0.0])
        without_warnings(optimizer.step)
        assert params[1].isfinite().all()
        assert not optimizer.compressing or optimizer.current.states[0]["ratio"].isfinite().all()
    assert optimizer.compressing


NO_VARIANCE = Sized(
    shapes=((12, 8), (33,), (7,), (0,)),
    g_sizes=(1.0, 1e-2, 1.0, 1.0),
    steps=40,
    options={"freeze_step": 8, "weight_decay": 0.1},
    untouched=((0, 3, 20), (2, 7, 10**6)),
)


@pytest.mark.parametrize("ratio", ["variance", "denominator"])
@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_coordinates_without_a_variance_are_as_simulated(size, zero_variance, ratio):
    """`check` knows of the floor, of what never moves, of what stays out of the scale, and of what a ratio counts."""
    case = options(NO_VARIANCE, zero_variance=zero_variance, ratio=ratio, scale=("block", "tensor")[size % 2])
    recorded = on_ranks(size, both_stages, case)
    check(case, recorded)
    first = recorded[0]
    moved = (first.x[-1][0] != first.x0[0]).all(axis=1)
    assert moved[3:].all()
    assert moved[:3].all() if zero_variance == "floor" else not (first.x[-1][0] != first.x0[0])[:3].any()
    assert np.array_equal(first.x[-1][2], first.x0[2])
    if (
        zero_variance == "floor"
    ):  # where the fresh variance has grown from 0, so that its quotient would be the largest by far
        layout = LambSimulation(case, size).layout
        d, fresh = layout.unflatten(first.d[-1])[0], layout.unflatten(first.v[-1])[0]
        quotient = (1 / (d * (1 if first.gamma is None else first.gamma[0]))) ** 2 / fresh
        assert quotient[:24].max() > 2 * quotient[24:].max()
        assert first.ratio[-1][0] < 1.2
    assert all(r[2] == 1 for r in first.ratio)  # no coordinate has a variance

"""Stage 1 of 1-bit LAMB is LAMB in float64: parameters, moments, coefficients and their average."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests import oracle
from tests.onebit.optim.lamb_simulation import LAMB, as_numpy, lamb_hypers, updated_values
from tests.onebit.optim.simulation import assert_close, averaged, group_or_none, hypers, lr_factor, on_ranks
from tests.onebit.runs import arrays, bits, take


def stage_1(rank, size, case):
    """x, parameters, moments in the order of `case.shapes`; averages and coefficients too."""
    params = case.parameters()
    optimizer = case.build(params, group_or_none(size))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    seen = []
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        schedule.step()
        seen.append(as_numpy(optimizer.current.states[0]["coefficient"]))
    [state] = optimizer.current.states
    inverse = np.argsort(case.order)
    return SimpleNamespace(
        x=updated_values(params, optimizer),
        p=arrays(params),
        exp_avg=arrays([optimizer.state[p]["exp_avg"] for p in params]),
        exp_avg_sq=arrays([optimizer.state[p]["exp_avg_sq"] for p in params]),
        average=as_numpy(state["coefficient_average"])[inverse],
        coefficients=np.array(seen)[:, inverse],
        bits=bits(params),
    )


def lamb_in_float64(case, ranks):
    x, h, c = arrays(case.parameters()), lamb_hypers(case), np.zeros(len(case.shapes))
    m, v, seen = oracle.zeros(x), oracle.zeros(x), []
    for step in range(1, case.steps + 1):
        now = [replace(own, lr=own.lr * lr_factor(step - 1)) for own in h]
        mean = [g.numpy() for g in averaged(case, ranks, step)]
        corrected = case.options.get("bias_correction", True)
        x, m, v, c, coefficients = oracle.lamb_step(x, mean, m, v, c, now, step, corrected)
        seen.append(coefficients)
    return SimpleNamespace(x=x, exp_avg=m, exp_avg_sq=v, average=c, coefficients=np.array(seen))


def assert_lamb(found, expected, case):
    holds = [int(np.prod(shape)) > 0 for shape in case.shapes]
    assert_close(found.x, expected.x)
    assert_close(found.exp_avg, expected.exp_avg, [np.sqrt(v) for v in expected.exp_avg_sq], "exp_avg")
    assert_close(found.exp_avg_sq, expected.exp_avg_sq, what="exp_avg_sq")
    for got, want in ((found.coefficients.T, expected.coefficients.T), (found.average, expected.average)):
        np.testing.assert_allclose(got[holds], want[holds], rtol=1e-5)


def assert_limits(case, coefficients):
    """A test of coefficients that are all clipped, or none, would show little."""
    least, most = case.options.get("min_coeff", 0.01), case.options.get("max_coeff", 0.3)
    assert (coefficients == least).any() and (coefficients == most).any()
    assert ((coefficients > least) & (coefficients < most)).sum() > 30
    assert coefficients[0, 3] == 1  # the bias that starts at 0


STAGE_1 = LAMB.but(steps=50, options={"coeff_beta": 0.8})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2])
def test_stage_1_is_lamb(size, dtype):
    case = STAGE_1.but(dtype=dtype)
    expected = lamb_in_float64(case, size)
    assert_limits(case, expected.coefficients)
    ranks = on_ranks(size, stage_1, case)
    for found in ranks:
        assert_lamb(found, expected, case)
        assert found.bits == ranks[0].bits
        for p, x in zip(found.p, found.x, strict=True):
            assert np.array_equal(p, torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy())


@pytest.mark.parametrize(
    "more",
    [
        {"bias_correction": False},
        {"min_coeff": 0.1, "max_coeff": 2.0, "coeff_beta": 0.0, "weight_decay": 0.3},
    ],
    ids=["BertAdam's moments", "other limits"],
)
def test_stage_1_with_other_options_is_lamb(more):
    case = STAGE_1.but(options=more, groups=({}, {"betas": (0.8, 0.9)}))
    expected = lamb_in_float64(case, 1)
    assert_limits(case, expected.coefficients)
    assert_lamb(stage_1(0, 1, case), expected, case)


@pytest.mark.parametrize("size", [1, 2])
def test_with_all_coefficients_1_stage_1_is_adamw(size):
    case = STAGE_1.but(options={"max_coeff": 1.0, "min_coeff": 1.0, "weight_decay": 0.05})
    params = [nn.Parameter(p.detach().double()) for p in case.parameters()]
    adamw = torch.optim.AdamW([{"params": [p], **h} for p, h in zip(params, hypers(case), strict=True)])
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lr_factor)
    for step in range(1, case.steps + 1):
        for p, g in zip(params, averaged(case, size, step), strict=True):
            p.grad = g
        adamw.step()
        schedule.step()
    for found in on_ranks(size, stage_1, case):
        assert_close(found.x, arrays(params))
        assert (found.coefficients == 1).all()

"""Stage 1 of 1-bit Adam is torch.optim.AdamW on the averaged gradients, that of 1-bit LAMB is LAMB in float64."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests import oracle
from tests.onebit.optim.lamb_simulation import LAMB, lamb_hypers
from tests.onebit.optim.simulation import (
    GROUPS,
    HALF_PLACE,
    MISSING,
    SHAPES,
    as_numpy,
    assert_close,
    averaged,
    group_or_none,
    hypers,
    lr_factor,
    on_ranks,
    oracle_hyper,
    updated_values,
)
from tests.onebit.runs import Case, arrays, bits, take

ADAM = Case(shapes=SHAPES, steps=50, groups=GROUPS, missing=MISSING, options={"weight_decay": 0.05})
STAGE_1 = LAMB.but(steps=50, options={"coeff_beta": 0.8})


def stage_1(rank, size, case):
    """In the order of `case.shapes`; of LAMB averages and coefficients too."""
    params = case.parameters()
    optimizer = case.build(params, group_or_none(size))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    seen = []
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        schedule.step()
        if case.kind == "OneBitLamb":
            seen.append(as_numpy(optimizer.current.states[0]["coefficient"]))
    found = results(params, optimizer)
    if seen:
        inverse = np.argsort(case.order)
        found.average = as_numpy(optimizer.current.states[0]["coefficient_average"])[inverse]
        found.coefficients = np.array(seen)[:, inverse]
    return found


def results(params, optimizer):
    return SimpleNamespace(
        x=updated_values(params, optimizer),
        p=arrays(params),
        exp_avg=arrays([optimizer.state[p]["exp_avg"] for p in params]),
        exp_avg_sq=arrays([optimizer.state[p]["exp_avg_sq"] for p in params]),
        bits=bits(params),
    )


def adamw(case, ranks):
    """torch.optim.AdamW in float64 on the averaged gradients. A gradient that is None counts as zero."""
    params = [nn.Parameter(p.detach().double()) for p in case.parameters()]
    optimizer = torch.optim.AdamW([{"params": [p], **h} for p, h in zip(params, hypers(case), strict=True)])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    for step in range(1, case.steps + 1):
        for p, g in zip(params, averaged(case, ranks, step), strict=True):
            p.grad = g
        optimizer.step()
        schedule.step()
    return results(params, optimizer)


def lamb(case, ranks):
    x, h, c = arrays(case.parameters()), lamb_hypers(case), np.zeros(len(case.shapes))
    m, v, seen = oracle.zeros(x), oracle.zeros(x), []
    for step in range(1, case.steps + 1):
        now = [replace(own, lr=own.lr * lr_factor(step - 1)) for own in h]
        mean = [g.numpy() for g in averaged(case, ranks, step)]
        corrected = case.options.get("bias_correction", True)
        x, m, v, c, coefficients = oracle.lamb_step(x, mean, m, v, c, now, step, corrected)
        seen.append(coefficients)
    return SimpleNamespace(x=x, exp_avg=m, exp_avg_sq=v, average=c, coefficients=np.array(seen))


def assert_same(found, expected, case):
    assert_close(found.x, expected.x)
    sizes = [np.sqrt(v) for v in expected.exp_avg_sq]  # exp_avg itself may happen to be near 0
    assert_close(found.exp_avg, expected.exp_avg, sizes, "exp_avg")
    assert_close(found.exp_avg_sq, expected.exp_avg_sq, what="exp_avg_sq")
    for p, x in zip(found.p, found.x, strict=True):
        assert np.array_equal(p, torch.from_numpy(x).to(getattr(torch, case.dtype)).double().numpy())
    if case.kind == "OneBitLamb":
        holds = [int(np.prod(shape)) > 0 for shape in case.shapes]
        for got, want in ((found.coefficients.T, expected.coefficients.T), (found.average, expected.average)):
            np.testing.assert_allclose(got[holds], want[holds], rtol=1e-5)


def assert_limits(case, coefficients):
    """A test of coefficients that are all clipped, or none, would show little."""
    least, most = case.options.get("min_coeff", 0.01), case.options.get("max_coeff", 0.3)
    assert (coefficients == least).any() and (coefficients == most).any()
    assert ((coefficients > least) & (coefficients < most)).sum() > 30
    assert coefficients[0, 3] == 1  # the bias that starts at 0


@pytest.mark.parametrize(("size", "dtype"), [(1, "float32"), (3, "float32"), (2, "bfloat16"), (1, "float16")])
def test_stage_1_is_adamw(size, dtype):
    """Of an fp32 copy, where parameters have 16 bits."""
    case = ADAM.but(dtype=dtype)
    expected = adamw(case, size)
    ranks = on_ranks(size, stage_1, case)
    for found in ranks:
        assert_same(found, expected, case)
        assert found.bits == ranks[0].bits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stage_1_without_a_copy_rounds_every_step(dtype):
    case = Case(shapes=SHAPES, dtype=dtype, steps=10, options={"master_weights": False, "weight_decay": 0.1})
    params = case.parameters()
    optimizer = case.build(params)
    x = arrays(params)
    m, v, h = oracle.zeros(x), oracle.zeros(x), [oracle.Hyper(lr=1e-2, weight_decay=0.1)] * len(x)
    for step in range(1, case.steps + 1):
        take(case, 0, optimizer, params, step)
        x, m, v = oracle.adamw_step(x, [g.double().numpy() for g in case.gradients(0, step)], m, v, h, step)
        for got, expected in zip(arrays(params), x, strict=True):
            assert np.all(np.abs(got - expected) <= np.abs(expected) * HALF_PLACE[dtype] * 1.01)
        x = arrays(params)
        assert "master" not in optimizer.state[params[0]]
    assert_same(results(params, optimizer), SimpleNamespace(x=x, exp_avg=m, exp_avg_sq=v), case)


def test_stage_1_without_bias_correction_is_bertadam():
    case = Case(shapes=SHAPES, steps=30, groups=GROUPS, options={"bias_correction": False})
    params = case.parameters()
    optimizer = case.build(params)
    x, h = arrays(params), [oracle_hyper(**own) for own in hypers(case)]
    m, v = oracle.zeros(x), oracle.zeros(x)
    for step in range(1, case.steps + 1):
        take(case, 0, optimizer, params, step)
        gradients = [g.double().numpy() for g in case.gradients(0, step)]
        x, m, v = oracle.adamw_step(x, gradients, m, v, h, step, bias_correction=False)
    assert_close(arrays(params), x)


OTHER = STAGE_1.but(groups=({}, {"betas": (0.8, 0.9)}))
LAMBS = {
    "alone": (1, STAGE_1),
    "two ranks, 16 bits": (2, STAGE_1.but(dtype="bfloat16")),
    "three ranks": (3, STAGE_1),
    "BertAdam's moments": (1, OTHER.but(options={"bias_correction": False})),
    "other limits": (
        1, OTHER.but(options={"min_coeff": 0.1, "max_coeff": 2.0, "coeff_beta": 0.0, "weight_decay": 0.3}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAMBS)
def test_stage_1_is_lamb(name):
    size, case = LAMBS[name]
    expected = lamb(case, size)
    assert_limits(case, expected.coefficients)
    ranks = on_ranks(size, stage_1, case)
    for found in ranks:
        assert_same(found, expected, case)
        assert found.bits == ranks[0].bits


def test_with_all_coefficients_1_stage_1_is_adamw():
    case = STAGE_1.but(options={"max_coeff": 1.0, "min_coeff": 1.0, "weight_decay": 0.05})
    found = stage_1(0, 1, case)
    assert_close(found.x, adamw(case, 1).x)
    assert (found.coefficients == 1).all()

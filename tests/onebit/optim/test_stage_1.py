"""Stage 1 of 1-bit Adam is torch.optim.AdamW on the averaged gradients, that of 1-bit LAMB is LAMB in float64."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests import oracle
from tests.onebit.optim import simulation as sim
from tests.onebit.optim.contract import options, started
from tests.onebit.optim.lamb_simulation import LAMB, lamb_hypers
from tests.onebit.runs import Case, arrays, bits, take

ADAM = Case(shapes=sim.SHAPES, steps=50, groups=sim.GROUPS, missing=sim.MISSING, options={"weight_decay": 0.05})
STAGE_1 = LAMB.but(steps=50, options={"coeff_beta": 0.8})


def stage_1(rank, size, case):
    """In the order of `case.shapes`; of LAMB averages and coefficients too."""
    params, optimizer = started(case, 0, rank, size)
    schedule, seen = torch.optim.lr_scheduler.LambdaLR(optimizer, sim.lr_factor), []
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        schedule.step()
        if case.kind == "OneBitLamb":
            seen.append(sim.as_numpy(optimizer.current.states[0]["coefficient"]))
    found = results(params, optimizer)
    if seen:
        inverse = np.argsort(case.order)
        found.average = sim.as_numpy(optimizer.current.states[0]["coefficient_average"])[inverse]
        found.coefficients = np.array(seen)[:, inverse]
    return found


def results(params, optimizer):
    return SimpleNamespace(
        x=sim.updated_values(params, optimizer),
        p=arrays(params),
        exp_avg=arrays([optimizer.state[p]["exp_avg"] for p in params]),
        exp_avg_sq=arrays([optimizer.state[p]["exp_avg_sq"] for p in params]),
        bits=bits(params),
    )


def adamw(case, ranks):
    """torch.optim.AdamW in float64 on the averaged gradients. A gradient that is None counts as zero."""
    params = [nn.Parameter(p.detach().double()) for p in case.parameters()]
    optimizer = torch.optim.AdamW([{"params": [p], **h} for p, h in zip(params, sim.hypers(case), strict=True)])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, sim.lr_factor)
    for step in range(1, case.steps + 1):
        for p, g in zip(params, sim.averaged(case, ranks, step), strict=True):
            p.grad = g
        optimizer.step()
        schedule.step()
    return results(params, optimizer)


def by_the_oracle(case, ranks):
    of_lamb, corrected = case.kind == "OneBitLamb", case.options.get("bias_correction", True)
    h = lamb_hypers(case) if of_lamb else sim.oracle_hypers(case)
    x, c = arrays(case.parameters()), np.zeros(len(case.shapes))
    m, v, seen = oracle.zeros(x), oracle.zeros(x), []
    for step in range(1, case.steps + 1):
        now = [replace(own, lr=own.lr * sim.lr_factor(step - 1)) for own in h]
        mean = [g.numpy() for g in sim.averaged(case, ranks, step)]
        if of_lamb:
            x, m, v, c, coefficients = oracle.lamb_step(x, mean, m, v, c, now, step, corrected)
            seen.append(coefficients)
        else:
            x, m, v = oracle.adamw_step(x, mean, m, v, now, step, bias_correction=corrected)
    return SimpleNamespace(x=x, exp_avg=m, exp_avg_sq=v, average=c, coefficients=np.array(seen))


def assert_same(found, expected, case):
    sim.assert_close(found.x, expected.x)
    sizes = [np.sqrt(v) for v in expected.exp_avg_sq]  # exp_avg itself may happen to be near 0
    sim.assert_close(found.exp_avg, expected.exp_avg, sizes, "exp_avg")
    sim.assert_close(found.exp_avg_sq, expected.exp_avg_sq, what="exp_avg_sq")
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


OTHER = STAGE_1.but(groups=({}, {"betas": (0.8, 0.9)}))
OWN_LIMITS = {"min_coeff": 0.1, "max_coeff": 2.0, "coeff_beta": 0.0, "weight_decay": 0.3}
CASES = {
    "AdamW": (1, ADAM),
    "AdamW, 3 ranks": (3, ADAM),
    "AdamW of a copy of bfloat16": (2, ADAM.but(dtype="bfloat16")),
    "AdamW of a copy of float16": (1, ADAM.but(dtype="float16")),
    "BertAdam": (1, options(ADAM, bias_correction=False)),
    "LAMB": (1, STAGE_1),
    "LAMB, two ranks, 16 bits": (2, STAGE_1.but(dtype="bfloat16")),
    "LAMB, three ranks": (3, STAGE_1),
    "LAMB with BertAdam's moments": (1, OTHER.but(options={"bias_correction": False})),
    "LAMB, other limits": (1, OTHER.but(options=OWN_LIMITS)),
}


@pytest.mark.parametrize("name", CASES)
def test_stage_1_is_the_optimizer_without_compression(name):
    size, case = CASES[name]
    expected = (adamw if name.startswith("AdamW") else by_the_oracle)(case, size)
    if case.kind == "OneBitLamb":
        assert_limits(case, expected.coefficients)
    ranks = sim.on_ranks(size, stage_1, case)
    for found in ranks:
        assert_same(found, expected, case)
        assert found.bits == ranks[0].bits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stage_1_without_a_copy_rounds_every_step(dtype):
    case = Case(shapes=sim.SHAPES, dtype=dtype, steps=10, options={"master_weights": False, "weight_decay": 0.1})
    params, optimizer = started(case, 0)
    x, h = arrays(params), sim.oracle_hypers(case)
    m, v = oracle.zeros(x), oracle.zeros(x)
    for step in range(1, case.steps + 1):
        take(case, 0, optimizer, params, step)
        x, m, v = oracle.adamw_step(x, [g.double().numpy() for g in case.gradients(0, step)], m, v, h, step)
        for got, expected in zip(arrays(params), x, strict=True):
            assert np.all(np.abs(got - expected) <= np.abs(expected) * sim.HALF_PLACE[dtype] * 1.01)
        x = arrays(params)
        assert "master" not in optimizer.state[params[0]]
    assert_same(results(params, optimizer), SimpleNamespace(x=x, exp_avg=m, exp_avg_sq=v), case)


def test_with_all_coefficients_1_stage_1_is_adamw():
    case = STAGE_1.but(options={"max_coeff": 1.0, "min_coeff": 1.0, "weight_decay": 0.05})
    found = stage_1(0, 1, case)
    sim.assert_close(found.x, adamw(case, 1).x)
    assert (found.coefficients == 1).all()

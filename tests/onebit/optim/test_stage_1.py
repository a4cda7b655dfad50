"""Stage 1 of 1-bit Adam is torch.optim.AdamW on the averaged gradients, that of 1-bit LAMB is LAMB in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.onebit.optim import simulation as sim
from tests.onebit.optim.contract import options
from tests.onebit.optim.simulation import LAMB
from tests.onebit.runs import Case, arrays

ADAM = Case(shapes=sim.SHAPES, steps=50, groups=sim.GROUPS, missing=sim.MISSING, options={"weight_decay": 0.05})
STAGE_1 = LAMB.but(steps=50, options={"coeff_beta": 0.8})
BETAS = STAGE_1.but(groups=({}, {"betas": (0.8, 0.9)}))


def adamw(case, ranks):
    """torch.optim.AdamW in float64 on the averaged gradients: x, m and v. A gradient that is None counts as zero."""
    params = [nn.Parameter(p.detach().double()) for p in case.parameters()]
    optimizer = torch.optim.AdamW([{"params": [p], **h} for p, h in zip(params, sim.hypers(case), strict=True)])
    for step in range(1, case.steps + 1):
        for p, g in zip(params, sim.averaged(case, ranks, step), strict=True):
            p.grad = g
        optimizer.step()
    ordered = [params[i] for i in case.order]
    return [arrays(ordered), *(arrays([optimizer.state[p][m] for p in ordered]) for m in ("exp_avg", "exp_avg_sq"))]


def assert_same(last, x, m, v, layout):
    exp_avg, exp_avg_sq = (layout.unflatten(last.fields[name]) for name in ("exp_avg", "exp_avg_sq"))
    sim.assert_close(last.x, x)
    sizes = [np.sqrt(v_p) for v_p in v]  # exp_avg itself may happen to be near 0
    sim.assert_close(exp_avg, [m_p.ravel() for m_p in m], sizes, "exp_avg")
    sim.assert_close(exp_avg_sq, [v_p.ravel() for v_p in v], what="exp_avg_sq")


def assert_coefficients(found, average, coefficients, oracle):
    """A test of coefficients that are all clipped, or none, would show little."""
    holds = [int(np.prod(shape)) > 0 for shape in oracle.shapes]
    seen = np.array([after.fields["coefficient"] for after in found])
    np.testing.assert_allclose(seen[:, holds], coefficients[:, holds], rtol=1e-5)
    np.testing.assert_allclose(found[-1].fields["coefficient_average"][holds], average[holds], rtol=1e-5)
    least, most = oracle.hypers[0].min_coeff, oracle.hypers[0].max_coeff
    assert least == most or ((coefficients > least) & (coefficients < most)).sum() > 30
    assert (coefficients == least).any() and (coefficients == most).any()
    assert coefficients[0, oracle.case.order.index(3)] == 1  # the bias that starts at 0


CASES = {
    "AdamW": (1, ADAM, {}),
    "AdamW, 3 ranks": (3, ADAM, {}),
    "AdamW of a copy of bfloat16": (2, ADAM.but(dtype="bfloat16"), {}),
    "AdamW of a copy of float16": (1, ADAM.but(dtype="float16"), {}),
    "BertAdam": (1, ADAM, {"bias_correction": False}),
    "LAMB": (1, STAGE_1, {}),
    "LAMB, two ranks, 16 bits": (2, STAGE_1.but(dtype="bfloat16"), {}),
    "LAMB, three ranks": (3, STAGE_1, {}),
    "LAMB with BertAdam's moments": (1, BETAS, {"bias_correction": False, "coeff_beta": 0.9}),
    "LAMB, other limits": (1, BETAS, {"min_coeff": 0.1, "max_coeff": 2.0, "coeff_beta": 0.0, "weight_decay": 0.3}),
    "LAMB, all coefficients 1, is AdamW": (1, STAGE_1, {"max_coeff": 1.0, "min_coeff": 1.0, "weight_decay": 0.05}),
}


@pytest.mark.parametrize("name", CASES)
def test_stage_1_is_the_optimizer_without_compression(name):
    size, case, own = CASES[name]
    case = options(case, freeze_step=case.steps, **own)
    oracle = (sim.LambSimulation if case.kind == "OneBitLamb" else sim.Simulation)(case, size)
    ranks = sim.on_ranks(size, sim.record_run, case)
    sim.assert_alike(case, ranks)
    x, m, v, *of_lamb = oracle.stage_1()
    if "AdamW" in name:
        x, m, v = adamw(case, size)
    assert_same(ranks[0][-1], x, m, v, oracle.layout)
    if of_lamb:
        average, coefficients = of_lamb
        assert_coefficients(ranks[0], average, np.array(coefficients), oracle)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stage_1_without_a_copy_rounds_every_step(dtype):
    case = Case(shapes=sim.SHAPES, dtype=dtype, steps=10, options={"master_weights": False, "weight_decay": 0.1})
    oracle, recorded = sim.Simulation(case, 1), sim.record_run(0, 1, case)
    x, m, v = oracle.stage_1()
    for after in recorded:
        mean = [g.numpy() for g in sim.averaged(case, 1, after.step)]
        x, m, v = oracle.full_step(after.step, mean, x, m, v)
        for got, expected in zip(after.x, x, strict=True):
            assert np.all(np.abs(got - expected) <= np.abs(expected) * sim.HALF_PLACE[dtype] * 1.01)
        x = after.x
        assert "master" not in after.fields
    assert_same(recorded[-1], x, m, v, oracle.layout)

"""Stage 1 of 1-bit Adam is torch.optim.AdamW on the averaged gradients."""

import numpy as np
import pytest
import torch
from torch import nn

from tests import oracle
from tests.onebit.optim.simulation import (
    GROUPS,
    HALF_PLACE,
    MISSING,
    SHAPES,
    Warm,
    assert_close,
    averaged,
    group_or_none,
    hypers,
    lr_factor,
    on_ranks,
    oracle_hyper,
    warm,
)
from tests.onebit.runs import Case, arrays, take


def stage_1(rank, size, case):
    params = case.parameters()
    optimizer = case.build(params, group_or_none(size))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        schedule.step()
    return warm(params, optimizer)


def adamw(case, ranks, dtype=torch.float64):
    """torch.optim.AdamW on the averaged gradients. A gradient that is None counts as zero."""
    params = [nn.Parameter(p.detach().to(dtype)) for p in case.parameters()]
    optimizer = torch.optim.AdamW([{"params": [p], **h} for p, h in zip(params, hypers(case), strict=True)])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    for step in range(1, case.steps + 1):
        for p, g in zip(params, averaged(case, ranks, step), strict=True):
            p.grad = g.to(dtype)
        optimizer.step()
        schedule.step()
    return warm(params, optimizer)


def assert_moments_close(found, expected):
    sizes = [np.sqrt(v) for v in expected.exp_avg_sq]  # exp_avg itself may happen to be near 0
    assert_close(found.exp_avg, expected.exp_avg, sizes, "exp_avg")
    assert_close(found.exp_avg_sq, expected.exp_avg_sq, what="exp_avg_sq")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stage_1_is_adamw(size, dtype):
    case = Case(shapes=SHAPES, steps=50, groups=GROUPS, missing=MISSING, options={"weight_decay": 0.05})
    expected = adamw(case, size, dtype)
    for found in on_ranks(size, stage_1, case):
        assert_close(found.x, expected.x)
        assert_moments_close(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 2])
def test_stage_1_in_16_bits_is_adamw_on_the_fp32_copy(size, dtype):
    case = Case(shapes=SHAPES, dtype=dtype, steps=50, groups=GROUPS, missing=MISSING)
    expected = adamw(case, size)
    for found in on_ranks(size, stage_1, case):
        assert_close(found.x, expected.x)
        assert_moments_close(found, expected)
        for p, x in zip(found.p, found.x, strict=True):
            assert np.array_equal(p, torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy())


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
    assert_moments_close(warm(params, optimizer), Warm(x, x, m, v, b""))


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

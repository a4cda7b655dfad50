"""The papers' ablations are what they say: each against what it must equal."""

import numpy as np
import pytest
import torch

from perf.convergence import ablations
from tests import oracle
from tests.onebit.runs import Case, arrays, bits, run, take
from tests.ranks import group, run_ranks

CASE = Case(steps=12)


def make(name, params, **options):
    return getattr(ablations, name)(params, lr=1e-2, block_size=32, chunks=1, process_group=group(), **options)


def run_all(rank, size):
    """What the ablations come to: parameters, and of naive Adam what its messages were like."""
    found = {}
    for name, options in (("LambBasic1Bit", {}), ("OneBitLamb", {"factor_min": 1.0, "factor_max": 1.0})):
        params = CASE.parameters()
        run(CASE, rank, make(name, params, freeze_step=5, weight_decay=0.01, **options), params, 1, CASE.steps)
        found[name] = bits(params)
    params = CASE.parameters()
    optimizer = ablations.FrozenAdam(params, freeze=5, lr=1e-2, weight_decay=0.01, process_group=group())
    run(CASE, rank, optimizer, params, 1, CASE.steps)
    found["frozen"] = arrays(params)
    found["naive"] = naive(rank, 4)
    return found


def naive(rank, warmup):
    """Parameters after the warmup; gradients after it have one scale a parameter."""
    params = CASE.parameters()
    optimizer = ablations.AdamOnFewBits(params, bits=1, reply=1, warmup=warmup, lr=1e-2, process_group=group())
    run(CASE, rank, optimizer, params, 1, warmup)
    after = arrays(params)
    assert optimizer.wire_bytes == 0
    take(CASE, rank, optimizer, params, warmup + 1)
    assert all(len(p.grad.abs().unique()) == 1 for p in params)  # none is longer than a block
    take(CASE, rank, optimizer, params, warmup + 2)
    assert len({float(x) for p in params for x in p.grad.abs().view(-1)}) == len(CASE.shapes)
    assert (optimizer.all_reduce.exchange.residual.value != 0).any()
    assert optimizer.wire_bytes > 0
    return after


@pytest.fixture(scope="module")
def found():
    return run_ranks(2, run_all)


def test_basic_lamb_is_1_bit_lamb_with_a_ratio_of_one(found):
    for of in found:
        assert of["LambBasic1Bit"] == of["OneBitLamb"]


def oracles(steps, freeze):
    """Parameters of Adam whose variance is frozen after step `freeze`, of gradients averaged over two ranks."""
    hypers = [oracle.Hyper(lr=1e-2, weight_decay=0.01)] * len(CASE.shapes)
    x = arrays(CASE.parameters())
    m, v = oracle.zeros(x), oracle.zeros(x)
    for step in range(1, steps + 1):
        everyone = [[g.double().numpy() for g in CASE.gradients(rank, step)] for rank in range(2)]
        mean = [np.mean(gs, 0) for gs in zip(*everyone, strict=True)]
        if step <= freeze:
            x, m, v = oracle.adamw_step(x, mean, m, v, hypers, step)
            d = oracle.freeze(v, hypers, step)
        else:
            m = oracle.local_momentum(mean, m, hypers)
            x = oracle.onebit_adam_update(x, m, d, hypers)
    return x


def test_frozen_and_naive_adam_are_adam_before_and_frozen_adam_is_so_after(found):
    for name, steps, freeze in (("frozen", CASE.steps, 5), ("naive", 4, 4)):
        expected = oracles(steps, freeze)
        for of in found:
            for a, b in zip(of[name], expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_frozen_adam_gives_an_element_without_a_variance_the_mean_of_the_others():
    params = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(3))]
    optimizer = ablations.FrozenAdam(params, freeze=2, lr=1e-2)
    for step in range(1, 4):
        values = [torch.tensor([0.0, 2.0, 2.0, 2e-3]), torch.zeros(3)]
        for p, g in zip(params, values, strict=True):
            p.grad = g if step < 3 else torch.ones_like(p)
        optimizer.step()
    d, nothing = (optimizer.denominators[p] for p in params)
    mean = (4 + 4 + 4e-6) / 3
    assert d.tolist() == pytest.approx([mean**-0.5, 0.5, 0.5, (0.01 * mean) ** -0.5], rel=1e-4)
    assert not nothing.any() and torch.equal(params[1].detach(), torch.ones(3) * (1 - 1e-4) ** 3)

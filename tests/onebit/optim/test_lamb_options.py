"""1-bit LAMB's own options: wrong ones are refused, and so are ranks with different ones."""

from math import inf, nan

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from tests.onebit.optim.lamb_simulation import Sized, as_numpy
from tests.onebit.optim.simulation import group_or_none, options
from tests.onebit.runs import bits, run, take
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *(({"coeff_beta": value}, "coeff_beta") for value in (-0.1, 1.0, 1.5, nan, inf)),
        *(({"min_coeff": value}, "coeff") for value in (0.0, -0.1, 0.4, nan, inf)),
        *(({"max_coeff": value}, "coeff") for value in (0.0, -1.0, 0.005, nan, inf)),
        *(({"factor_min": value}, "factor") for value in (0.0, -0.5, 4.5, nan, inf)),
        *(({"factor_max": value}, "factor") for value in (0.0, -4.0, 0.4, nan, inf)),
        *(({"factor_threshold": value}, "factor_threshold") for value in (0.0, -0.1, 1.0, 2.0, nan, inf)),
        *(({"ratio": value}, "ratio") for value in ("", "Variance", "max", None, 1)),
    ],
)
def test_bad_options_are_refused(wrong, words):
    """The text names the option and what was given."""
    with pytest.raises(ValueError) as caught:
        onebit.OneBitLamb([nn.Parameter(torch.ones(3))], **wrong)
    [value] = wrong.values()
    assert words in str(caught.value) and repr(value) in str(caught.value)


def test_limits_may_be_equal():
    case = Sized(steps=9, options={"freeze_step": 3, "min_coeff": 0.2, "max_coeff": 0.2, "factor_min": 2.0})
    case = options(case, factor_max=2.0)
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 9)
    np.testing.assert_allclose(as_numpy(optimizer.current.states[0]["coefficient"]), 0.4, rtol=1e-6)


OTHERS = {
    **{"coeff_beta": 0.8, "min_coeff": 0.02, "max_coeff": 0.5, "factor_min": 0.25, "factor_max": 3.0},
    **{"factor_threshold": 0.2, "ratio": "denominator"},
}


def errors_of_one_different_rank(rank, size):
    texts = {}
    for name, other in OTHERS.items():
        case = Sized(options={"freeze_step": 3, **({name: other} if rank == size - 1 else {})})
        params = case.parameters()
        optimizer = case.build(params, group_or_none(size))
        before = bits(params)
        with pytest.raises(ValueError, match=f"the ranks do not agree: rank .* has {name} ") as caught:
            take(case, rank, optimizer, params, 1)
        assert bits(params) == before
        texts[name] = str(caught.value)
    return texts


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_names_the_option_that_differs(size):
    found = run_ranks(size, errors_of_one_different_rank)
    assert all(texts == found[0] for texts in found)
    for name, text in found[0].items():
        assert f"has {name} {OTHERS[name]!r} where rank 0 has" in text or f"where rank {size - 1}" in text


def test_a_parameter_added_in_stage_1_has_an_average_of_its_own_steps():
    """With equal limits every coefficient is 0.2, and so is its average, whenever a parameter came."""
    first, second = (nn.Parameter(torch.full((3,), float(i + 1))) for i in range(2))
    optimizer = onebit.OneBitLamb([first], min_coeff=0.2, max_coeff=0.2, freeze_step=6, block_size=32)
    for step in range(1, 8):
        if step == 4:
            optimizer.add_param_group({"params": [second]})
        first.grad, second.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
    assert optimizer.compressing
    np.testing.assert_allclose(as_numpy(optimizer.current.states[0]["coefficient_average"]), 0.2, rtol=1e-6)

"""Ranks with different options or parameters: the same error on all, which names the rank and the difference."""

import warnings

import pytest
import torch
from torch import nn

from tests.onebit.runs import bits, build, parameters
from tests.ranks import group, run_ranks


def step_with_a_different_rank(rank, size, kind, which, options):
    """The error of this rank's first step, where rank `which` is given other options or parameters."""
    own = dict(options) if rank == which else {}
    params = parameters(*own.pop("shapes", [(33,), (7, 9)]))
    if own.pop("values", False):
        with torch.no_grad():
            params[1][0, 0] += 1e-6
    dtype = own.pop("dtype", torch.float32)
    params = [nn.Parameter(p.detach().to(dtype)) for p in params]
    optimizer = build(kind, params, **{"freeze_step": 5, "process_group": group(), **own})
    for p in params:
        p.grad = torch.ones_like(p) + rank
    before = bits(params)
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    assert bits(params) == before
    return str(caught.value)


DIFFERENT = [
    ({"lr": 2e-3}, ["lr", "0.002", "0.001"]),
    ({"betas": (0.8, 0.999)}, ["betas", "0.8", "0.9"]),
    ({"eps": 1e-6}, ["eps", "1e-06", "1e-08"]),
    ({"weight_decay": 0.1}, ["weight_decay", "0.1", "0.0"]),
    ({"freeze_step": 6}, ["freeze_step", "6", "5"]),
    ({"freeze_step": "auto"}, ["freeze_step", "auto", "5"]),
    ({"freeze_threshold": 0.9}, ["freeze_threshold", "0.9", "0.96"]),
    ({"freeze_window": 7}, ["freeze_window", "7", "1000"]),
    ({"bias_correction": False, "freeze_step": 5}, ["bias_correction", "False", "True"]),
    ({"zero_variance": "hold"}, ["zero_variance", "hold", "floor"]),
    ({"scale": "tensor"}, ["scale", "tensor", "block"]),
    ({"norm": "l2"}, ["norm", "l2", "l1"]),
    ({"block_size": 64}, ["block_size", "64", "2048"]),
    ({"chunks": 2}, ["chunks", "2", "auto"]),
    ({"gradient_dtype": torch.bfloat16}, ["gradient_dtype", "torch.bfloat16", "None"]),
    ({"dtype": torch.bfloat16}, ["dtypes", "bfloat16", "float32"]),
    ({"master_weights": False}, ["master_weights", "False", "True"]),
    ({"shapes": [(33,), (7, 9), (2,)]}, ["parameters", "3", "2"]),
    ({"shapes": [(33,), (7, 10)]}, ["elements", "103", "96"]),
]
OF_LAMB = {"coeff_beta": 0.8, "min_coeff": 0.02, "max_coeff": 0.5, "factor_min": 0.25, "factor_max": 3.0,
           "factor_threshold": 0.2, "ratio": "denominator"}  # fmt: skip


def step_with_each_difference(rank, size, kind, which, different):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # freeze_step=5 without bias correction
        return [step_with_a_different_rank(rank, size, kind, which, options) for options in different]


@pytest.mark.parametrize(("kind", "size", "which"), [("OneBitAdam", 3, 0), ("OneBitAdam", 2, 1), ("OneBitLamb", 3, 2)])
def test_every_rank_names_the_rank_that_differs_and_the_option(kind, size, which):
    different = DIFFERENT
    if kind == "OneBitLamb":
        different = [({name: other}, [name, repr(other)]) for name, other in OF_LAMB.items()]
    texts_of_ranks = run_ranks(size, step_with_each_difference, kind, which, [options for options, _ in different])
    for (options, parts), texts in zip(different, zip(*texts_of_ranks, strict=True), strict=True):
        for text in texts:
            assert text.startswith("the ranks do not agree"), f"{options}: {text}"
            assert f"rank {which} has" in text
            assert all(part in text for part in (*parts, "Give every rank the same")), f"{options}: {text}"


@pytest.mark.parametrize(("kind", "size", "which"), [("OneBitAdam", 3, 0), ("OneBitLamb", 2, 1), ("ZeroOneAdam", 3, 2)])
def test_every_rank_names_the_rank_that_starts_from_other_parameters(kind, size, which):
    for text in run_ranks(size, step_with_a_different_rank, kind, which, {"values": True}):
        assert f"other values on rank {which}" in text
        assert "parameter 1 of group 0 (shape (7, 9))" in text
        assert "same seed or checkpoint" in text

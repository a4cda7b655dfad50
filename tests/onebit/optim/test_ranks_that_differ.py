"""Ranks with different options or parameters: the same error on all, which names the rank and the difference."""

import pytest
import torch
from torch import nn

import onebit
from tests.onebit.runs import assert_message, bits, build, on_ranks, on_warnings, parameters, refused, step_by
from tests.ranks import group


def error_of_the_first_step(rank, kind, which, own):
    """Return this rank's error if rank `which` is given other options (`own`) or parameters."""
    own = dict(own) if rank == which else {}
    group_of_the_last = own.pop("group", {})
    params = parameters(*own.pop("shapes", ((33,), (7, 9))))
    if own.pop("values", False):
        params[1].data[0, 0] += 1e-6
    params = [nn.Parameter(p.detach().to(own.get("dtype", torch.float32))) for p in params]
    own.pop("dtype", None)
    with on_warnings("ignore"):  # freeze_step=5 without bias correction
        groups = [{"params": params[:1]}, {"params": params[1:], **group_of_the_last}]
        optimizer = build(kind, groups, **{"freeze_step": 5, "process_group": group(), **own})
    for p in params:
        p.grad = torch.ones_like(p) + rank
    before = bits(params)
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    assert bits(params) == before
    return caught


DIFFERENT = [
    ({"lr": 2e-3}, ["lr", "0.002", "0.001"]),
    ({"betas": (0.8, 0.999)}, ["betas", "0.8", "0.9"]),
    ({"eps": 1e-6}, ["eps", "1e-06", "1e-08"]),
    ({"weight_decay": 0.1}, ["weight_decay", "0.1", "0.0"]),
    ({"freeze_step": 6}, ["freeze_step", "6", "5"]),
    ({"freeze_step": "auto"}, ["freeze_step", "FreezeRule(threshold=0.96, window=1000)", "5"]),
    ({"freeze_step": onebit.FreezeRule(0.9)}, ["freeze_step", "FreezeRule(threshold=0.9, window=1000)", "5"]),
    ({"bias_correction": False, "freeze_step": 5}, ["bias_correction", "False", "True"]),
    ({"zero_variance": "hold"}, ["zero_variance", "hold", "floor"]),
    ({"scale": "tensor"}, ["scale", "tensor", "block"]),
    ({"norm": "l2"}, ["norm", "l2", "unbiased"]),
    ({"block_size": 64}, ["block_size", "64", "2048"]),
    ({"chunks": 2}, ["chunks", "2", "auto"]),
    ({"check_every": 20}, ["check_every", "20", "1000"]),
    ({"group": {"compress": False}}, ["compress"]),
    ({"group": {"mask": torch.ones(7, 9) == 0}}, ["masks '1 (checksum"]),
    ({"gradient_dtype": torch.bfloat16}, ["gradient_dtype", "torch.bfloat16", "None"]),
    ({"dtype": torch.bfloat16}, ["dtypes", "bfloat16", "float32"]),
    ({"master_weights": False}, ["master_weights", "False", "True"]),
    ({"shapes": [(33,), (7, 9), (2,)]}, ["parameters", "3", "2"]),
    ({"shapes": [(33,), (7, 10)]}, ["elements", "103", "96"]),
]
OF_LAMB = {"coeff_beta": 0.8, "min_coeff": 0.02, "max_coeff": 0.5, "factor_min": 0.25, "factor_max": 3.0,
           "factor_threshold": 0.2, "ratio": "denominator"}  # fmt: skip
OF_KIND = {
    "OneBitAdam": DIFFERENT,
    "OneBitLamb": [({name: own}, [name, repr(own)]) for name, own in OF_LAMB.items()],
    "ZeroOneAdam": [({"freeze_step": 6}, ["var_update_scaler 6", "var_freeze_step"])],
}


@pytest.mark.parametrize(
    ("kind", "size", "which"),
    [("OneBitAdam", 3, 0), ("OneBitAdam", 2, 1), ("OneBitLamb", 3, 2), ("ZeroOneAdam", 2, 1)],
)
@on_ranks()
def test_every_rank_names_the_rank_that_differs_and_the_option(rank, size, kind, which):
    for own, parts in OF_KIND[kind]:
        caught = error_of_the_first_step(rank, kind, which, own)
        assert_message(caught, f"rank {which} has", *parts, "Give every rank the same")
        assert str(caught.value).startswith("the ranks do not agree"), own


@on_ranks(2)
def test_two_freeze_rules_are_one_where_they_mean_the_same(rank):
    with refused(ValueError, "rank 1 has freeze_step", "window=8)' where rank 0", "window=7)'"):
        step_with(rank, onebit.FreezeRule(window=7 + rank))
    step_with(rank, ("auto", onebit.FreezeRule(window=1000))[rank])


def step_with(rank, freeze_step):
    step_by(build("OneBitAdam", parameters((5,)), freeze_step=freeze_step, process_group=group()))


@pytest.mark.parametrize(("kind", "size", "which"), [("OneBitAdam", 3, 0), ("OneBitLamb", 2, 1), ("ZeroOneAdam", 3, 2)])
@on_ranks()
def test_every_rank_names_the_rank_that_starts_from_other_parameters(rank, size, kind, which):
    caught = error_of_the_first_step(rank, kind, which, {"values": True})
    parts = ("parameter 0 of group 1 (shape (7, 9))", "same seed or checkpoint")
    assert_message(caught, f"other values on rank {which}", *parts)

"""Stage 2 of 1-bit Adam and 1-bit LAMB is the float64 simulation of the papers' Algorithm 1, at every step and on every
rank: also with two levels, 16 bits, and coordinates without a variance."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from tests.onebit.optim import simulation as sim
from tests.onebit.optim.contract import give, options, started
from tests.onebit.optim.lamb_simulation import LAMB, UNDECAYED, LambSimulation, Sized
from tests.onebit.runs import Case, bits, take
from tests.ranks import group, run_ranks

OF = {"OneBitAdam": sim.Simulation, "OneBitLamb": LambSimulation}
MISSING = sim.MISSING + sim.MISSING_LATER
ADAM = Case(shapes=sim.SHAPES, steps=108, groups=sim.GROUPS, missing=MISSING, options={"freeze_step": 8})
FLAT = LAMB.but(groups=UNDECAYED)
TIGHT = {"factor_max": 1.5, "factor_min": 0.8, "factor_threshold": 0.05, "bias_correction": False}
CASES = {  # ranks, the case, and what it has
    "Adam alone": (1, ADAM, {}),
    "Adam, 2 ranks": (2, ADAM, {"norm": "l2", "bias_correction": False, "chunks": 2}),
    "Adam, 2 ranks, one scale": (2, ADAM, {"scale": "tensor", "reply": "direct", "chunks": 3}),
    "Adam, 3 ranks": (3, ADAM, {"scale": "tensor", "norm": "l2", "chunks": 2}),
    "Adam, 3 ranks, direct": (3, ADAM, {"reply": "direct", "norm": "unbiased", "bias_correction": False}),
    "Adam, 3 ranks, 2 bits": (3, ADAM, {"reply": 2}),
    "Adam, 4 ranks": (4, ADAM, {"norm": "unbiased", "reply": 2, "chunks": 3}),
    "Adam of nodes": (4, ADAM.but(each=2), {"reply": "direct", "chunks": 2}),
    "LAMB alone": (1, FLAT, {"ratio": "denominator", "scale": "tensor", **TIGHT}),
    "LAMB, 2 ranks": (2, LAMB, {"scale": "tensor", "norm": "l2", "chunks": 2}),
    "LAMB, 2 ranks, 2 bits": (2, LAMB, {"ratio": "denominator", "reply": 2, **TIGHT}),
    "LAMB, 3 ranks": (3, FLAT, {"chunks": 3}),
    "LAMB, 3 ranks, direct": (3, LAMB, {"reply": "direct", "scale": "tensor", "ratio": "denominator"}),
    "LAMB of nodes": (4, LAMB.but(each=2), {"scale": "tensor"}),
    "Adam of bfloat16": (2, ADAM.but(dtype="bfloat16", steps=40), {"master_weights": False}),
    "Adam of float16": (2, ADAM.but(dtype="float16", steps=40), {"master_weights": False}),
    "Adam of a copy of float16": (2, ADAM.but(dtype="float16", steps=40), {"scale": "tensor"}),
    "LAMB of bfloat16": (2, LAMB.but(dtype="bfloat16", steps=40), {"scale": "tensor"}),
    "LAMB of float16": (2, LAMB.but(dtype="float16", steps=40), {}),
}
EVERY = {"none", "limit", "the largest", "as far up as it may", "as far down as it may"}


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_the_simulation(name):
    size, case, own = CASES[name]
    case = options(case, **own)
    reasons = sim.check(case, sim.on_ranks(size, sim.both_stages, case), OF[case.kind])
    assert case.kind == "OneBitAdam" or "reply" in own or case.steps < 100 or reasons == EVERY


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (1, ADAM.but(steps=38)),
        (3, options(ADAM.but(steps=38), scale="tensor")),
        (2, options(LAMB.but(steps=30, seed=3), block_size=32, scale="tensor")),
        (3, options(LAMB.but(steps=30, seed=3), block_size=32)),
    ],
    ids=["Adam alone", "Adam", "LAMB, one scale", "LAMB"],
)
def test_stage_2_follows_a_simulation_that_is_never_synced(size, case):
    """These gradients leave 15 steps until |c| is within rounding of 0 somewhere."""
    recorded = sim.on_ranks(size, sim.both_stages, case)[0]
    assert sim.follow(case, recorded, OF[case.kind](case, size)) >= 15


# Coordinates whose variance is 0 at the freeze: three rows far into stage 2, and one parameter for good

UNTOUCHED = ((0, 3, 20), (2, 7, 10**6))
EMBEDDING = Case(
    shapes=((12, 8), (33,), (7,), (0,)), steps=40, options={"freeze_step": 6, "weight_decay": 0.1}, untouched=UNTOUCHED
)
LAMBS = Sized(g_sizes=(1.0, 1e-2, 1.0, 1.0), shapes=EMBEDDING.shapes, steps=40, untouched=UNTOUCHED)
LAMBS = options(LAMBS, freeze_step=8, weight_decay=0.1)
WITHOUT = {
    "Adam": (1, EMBEDDING, {"scale": "tensor"}),
    "Adam, held": (3, EMBEDDING, {"zero_variance": "hold", "scale": "tensor"}),
    "Adam, 2 ranks, held": (2, EMBEDDING, {"zero_variance": "hold"}),
    "LAMB": (2, LAMBS, {"ratio": "denominator"}),
    "LAMB, one scale": (3, LAMBS, {"scale": "tensor"}),
    "LAMB, held": (2, LAMBS, {"zero_variance": "hold"}),
    "LAMB, held, one scale": (1, LAMBS, {"zero_variance": "hold", "scale": "tensor", "ratio": "denominator"}),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_rows_without_a_gradient_move_with_the_floor_and_stay_with_hold(name):
    """`check` knows of the floor, of what never moves, of what stays out of a scale, and of what a ratio counts."""
    size, case, own = WITHOUT[name]
    case = options(case, **own)
    recorded = sim.on_ranks(size, sim.both_stages, case)
    sim.check(case, recorded, OF[case.kind])
    first, held = recorded[0], own.get("zero_variance") == "hold"
    moved = (first.x[-1][0] != first.x0[0]).all(axis=1)
    assert moved[3:].all()
    assert moved[:3].all() if not held else not (first.x[-1][0] != first.x0[0])[:3].any()
    assert np.array_equal(first.x[-1][2], first.x0[2])
    if case.kind == "OneBitLamb":
        assert all(fields["ratio"][2] == 1 for fields in first.fields)  # no coordinate has a variance
        assert held or _uncounted_quotients(case, size, first)


def _uncounted_quotients(case, size, first):
    """Where the fresh variance has grown from 0 its quotient would be the largest by far, and the ratio has none of
    it."""
    layout, fields = LambSimulation(case, size).layout, first.fields[-1]
    d, fresh = (layout.unflatten(fields[name])[0] for name in ("denominator", "exp_avg_sq"))
    quotient = (1 / (d * (fields["gamma"][0] if "gamma" in fields else 1))) ** 2 / fresh
    return quotient[:24].max() > 2 * quotient[24:].max() and fields["ratio"][0] < 1.2


def test_with_hold_gradients_of_coordinates_without_a_variance_change_nothing():
    """Neither the scale nor any parameter, however large."""
    ends = []
    for largest in (0.0, 1e6):
        case = options(EMBEDDING, zero_variance="hold", scale="tensor")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            params, optimizer = started(case, 6)
            for step in range(7, 20):
                give(case, params, step)
                params[0].grad[:3] = largest
                params[2].grad[:] = largest
                optimizer.step()
        ends.append(bits(params))
    assert ends[0] == ends[1]


def freeze_warnings(rank, size, zero_variance):
    params = EMBEDDING.parameters()
    names = list(zip(("embedding.weight", "a", "b", "c"), params, strict=True))
    optimizer = onebit.OneBitAdam(
        names, freeze_step=6, zero_variance=zero_variance, process_group=group(), block_size=32
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 12):
            take(EMBEDDING, rank, optimizer, params, step)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
def test_one_warning_names_the_parameters_and_counts(zero_variance):
    (text,), other = run_ranks(2, freeze_warnings, zero_variance)
    assert "embedding.weight (24 of 96)" in text
    assert "b (7 of 7)" in text
    assert "a (" not in text and "c (" not in text
    assert ("mean" in text) == (zero_variance == "floor")
    assert not other


def test_no_warning_where_every_coordinate_has_a_variance(recwarn):
    _, optimizer = started(Case(options={"freeze_step": 3}), 7)
    assert optimizer.compressing
    assert [str(w.message) for w in recwarn] == []


# LAMB where parameters, gradients or variances are 0, empty or missing

NOTHING = Sized(
    shapes=((12, 8), (2,), (0,), (33,), (40,), (1,)),
    x_sizes=(1.0, 0.0, 1.0, 0.1, 1.0, 0.5),
    steps=24,
    options={"freeze_step": 1, "weight_decay": 0.1},
    groups=({}, {"betas": (0.8, 0.9), "eps": 1e-3}),
    missing=((1, 0, 3), (2, 0, 1), (5, 1, 0), (7, 0, 3), (7, 1, 3)),
    untouched=((0, 3, 15), (4, 40, 10**6)),  # rows without gradients until stage 2 is well under way; a whole parameter
)
HARD = [
    options(NOTHING, ratio=ratio, scale=scale, zero_variance=zero, bias_correction=scale == "block")
    for (ratio, scale), zero in zip(
        itertools.product(("variance", "denominator"), ("block", "tensor")), ("floor", "hold", "hold", "floor"),
        strict=True,
    )
]  # fmt: skip


def everything_finite(rank, size, case):
    params, optimizer = started(case, 0, rank, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
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
    assert moved == [True, True, False, size > 1, False, True]  # without a gradient until the freeze, d is 0
    return bits(params)


@pytest.mark.parametrize("size", [1, 2])
def test_everything_is_finite_with_parameters_and_gradients_that_are_0_or_missing(size):
    for case in HARD:
        found = sim.on_ranks(size, everything_finite, case)
        assert all(own == found[0] for own in found)


@pytest.mark.parametrize("ratio", ["variance", "denominator"])
def test_one_gradient_element_that_is_not_0_is_enough(ratio):
    """The smallest model that can be frozen at all."""
    case = Sized(shapes=((0,), (3,)), options={"freeze_step": 1, "ratio": ratio})
    params = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))]
    optimizer = case.build(params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(1, 9):
            params[0].grad, params[1].grad = None, None if step == 3 else torch.tensor([0.0, 1e-20, 0.0])
            optimizer.step()
            assert params[1].isfinite().all()
            assert not optimizer.compressing or optimizer.current.states[0]["ratio"].isfinite().all()
    assert optimizer.compressing

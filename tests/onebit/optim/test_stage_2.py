"""Stage 2 of 1-bit Adam and 1-bit LAMB is the float64 simulation of the papers' Algorithm 1, at every step and on every
rank: also with two levels, 16 bits, and elements without a variance."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from tests import oracle
from tests.onebit.optim import simulation as sim
from tests.onebit.optim.contract import options, started
from tests.onebit.optim.simulation import LAMB, LambSimulation, Sized
from tests.onebit.runs import Case, on_ranks, run
from tests.ranks import group

OF = {"OneBitAdam": sim.Simulation, "OneBitLamb": LambSimulation}
MISSING = sim.MISSING + sim.MISSING_LATER
ADAM = Case(shapes=sim.SHAPES, steps=108, groups=sim.GROUPS, missing=MISSING, options={"freeze_step": 8})
FLAT = LAMB.but(groups=tuple({**own, "weight_decay": 0.0} for own in LAMB.groups))
TIGHT = {"factor_max": 1.5, "factor_min": 0.8, "factor_threshold": 0.05, "bias_correction": False}
CASES = {  # ranks, the case, and what it has
    "Adam alone": (1, ADAM, {}),
    "Adam, 2 ranks": (2, ADAM, {"norm": "l2", "bias_correction": False, "chunks": 2}),
    "Adam, 2 ranks, one scale": (2, ADAM, {"scale": "tensor", "reply": "direct", "chunks": 3}),
    "Adam, 3 ranks": (3, ADAM, {"scale": "tensor", "norm": "l2", "chunks": 2}),
    "Adam, 3 ranks, direct": (3, ADAM, {"reply": "direct", "norm": "unbiased", "bias_correction": False}),
    "Adam, 3 ranks, block scales": (3, ADAM, {}),
    "Adam, 4 ranks": (4, ADAM, {"norm": "unbiased", "chunks": 3}),
    "Adam of nodes": (4, ADAM.but(each=2), {"reply": "direct", "chunks": 2}),
    "LAMB alone": (1, FLAT, {"ratio": "denominator", "scale": "tensor", **TIGHT}),
    "LAMB, 2 ranks": (2, LAMB, {"scale": "tensor", "norm": "l2", "chunks": 2}),
    "LAMB, 2 ranks, tight": (2, LAMB, {"ratio": "denominator", "reply": 1, **TIGHT}),
    "LAMB, 3 ranks": (3, FLAT, {"chunks": 3}),
    "LAMB, 3 ranks, direct": (3, LAMB, {"reply": "direct", "scale": "tensor", "ratio": "denominator"}),
    "LAMB of nodes": (4, LAMB.but(each=2), {"scale": "tensor"}),
    "Adam of bfloat16": (2, ADAM.but(dtype="bfloat16", steps=40), {"master_weights": False}),
    "Adam of float16": (2, ADAM.but(dtype="float16", steps=40), {"master_weights": False}),
    "Adam of a copy of float16": (2, ADAM.but(dtype="float16", steps=40), {"scale": "tensor"}),
    "LAMB of bfloat16": (2, LAMB.but(dtype="bfloat16", steps=40), {"scale": "tensor"}),
    "LAMB of float16": (2, LAMB.but(dtype="float16", steps=40), {}),
    "Adam, 2 ranks, shortened": (2, ADAM, {"update_limit": 0.2, "chunks": 2}),
    "Adam, 3 ranks, direct, shortened": (3, ADAM, {"update_limit": 0.3, "reply": "direct", "chunks": 2}),
    "Adam of nodes, shortened": (4, ADAM.but(each=2), {"update_limit": 0.15, "scale": "tensor"}),
    "LAMB, 2 ranks, shortened": (2, LAMB, {"update_limit": 0.2, "scale": "tensor", "chunks": 3}),
    "LAMB of nodes, shortened": (4, LAMB.but(each=2, steps=40), {"update_limit": 0.2}),
}
EVERY = {"none", "limit", "the largest", "as far up as it may", "as far down as it may"}


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_the_simulation(name):
    size, case, own = CASES[name]
    case = options(case, **own)
    reasons = sim.check(case, sim.on_ranks(size, sim.record_run, case), OF[case.kind])
    assert ("shortened" in reasons) == ("update_limit" in own)
    assert case.kind == "OneBitAdam" or "reply" in own or case.steps < 100 or reasons >= EVERY


# Elements whose variance is 0 at the freeze: three rows far into stage 2, and one parameter for good

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
    recorded = sim.on_ranks(size, sim.record_run, case)
    sim.check(case, recorded, OF[case.kind])
    stage_2, held = recorded[0][case.options["freeze_step"] - 1 :], own.get("zero_variance") == "hold"
    frozen, last = stage_2[0], stage_2[-1]
    moved = last.x[0] != frozen.x[0]
    assert moved[3:].all() and (moved[:3] != held).all()
    assert np.array_equal(last.x[2], frozen.x[2])
    if case.kind == "OneBitLamb":
        assert all(after.fields["ratio"][2] == 1 for after in stage_2[1:])  # no element has a variance
        assert held or uncounted_quotients(LambSimulation(case, size).layout, last.fields)


def uncounted_quotients(layout, fields):
    """Where the fresh variance has grown from 0 its quotient would be the largest by far, and the ratio has none of
    it."""
    d, fresh = (layout.unflatten(fields[name])[0] for name in ("denominator", "exp_avg_sq"))
    quotient = (1 / (d * (fields["gamma"][0] if "gamma" in fields else 1))) ** 2 / fresh
    return quotient[:24].max() > 2 * quotient[24:].max() and fields["ratio"][0] < 1.2


@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
@on_ranks(2)
def test_one_warning_of_rank_0_names_the_parameters_and_counts(rank, zero_variance):
    params = EMBEDDING.parameters()
    names = list(zip(("embedding.weight", "a", "b", "c"), params, strict=True))
    optimizer = onebit.OneBitAdam(names, freeze_step=6, zero_variance=zero_variance, process_group=group())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(EMBEDDING, rank, optimizer, params, 1, 11)
    assert len(caught) == (rank == 0)
    for text in (str(w.message) for w in caught):
        assert "embedding.weight (24 of 96)" in text and "b (7 of 7)" in text
        assert "a (" not in text and "c (" not in text
        assert ("mean" in text) == (zero_variance == "floor")


def test_no_warning_where_every_element_has_a_variance(recwarn):
    _, optimizer = started(Case(options={"freeze_step": 3}), 7)
    assert optimizer.compressing
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.parametrize(("size", "scale"), [(1, "block"), (2, "tensor")])
def test_no_layer_is_lost_in_a_run_of_lamb(size, scale):
    """What is left out of a layer's momentum stays of the momentum's size, though layers differ by 10^4."""
    case = options(LAMB.but(groups=({},), steps=50, missing=()), scale=scale, freeze_step=20)
    layout = LambSimulation(case, size).layout
    for own in sim.on_ranks(size, sim.record_run, case):
        frozen, first, last = own[19], own[20], own[-1]
        gamma, momenta = last.fields.get("gamma", np.ones(8)), layout.unflatten(frozen.fields["exp_avg"])
        for flat in (first.e, last.e, last.E):
            parts = zip(layout.unflatten(flat), momenta, gamma, strict=True)
            left_out = [oracle.magnitude(e / g, "l2") / oracle.magnitude(m, "l2") for e, m, g in parts if m.size]
            assert max(left_out) < 10


# LAMB where parameters, gradients or variances are 0, empty or missing


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

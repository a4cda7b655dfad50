"""1-bit Adam and 1-bit LAMB are the float64 simulation of the papers' Algorithm 1, at every step of both stages and on
every rank: also with two levels, 16 bits, and elements without a variance. Stage 1 of 1-bit Adam is AdamW."""

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit.collectives.topology import Topology
from onebit.collectives.transport.protocol import LocalTransport
from tests import internals
from tests.onebit.optim import simulation as sim
from tests.onebit.optim.contract import options, started
from tests.onebit.optim.simulation import LAMB, LambSimulation, Sized
from tests.onebit.runs import Case, arrays, build, on_ranks, on_warnings, run, step_by
from tests.ranks import group

OF = {"OneBitAdam": sim.Simulation, "OneBitLamb": LambSimulation}
MISSING = sim.MISSING + sim.MISSING_LATER
ADAM = Case(shapes=sim.SHAPES, steps=40, groups=sim.GROUPS, missing=MISSING, options={"freeze_step": 8})
FLAT = LAMB.but(groups=tuple({**own, "weight_decay": 0.0} for own in LAMB.groups))
TIGHT = {"factor_max": 1.5, "factor_min": 0.8, "factor_threshold": 0.05, "bias_correction": False}
LIMITS = {"min_coeff": 0.1, "max_coeff": 2.0, "coeff_beta": 0.0, "weight_decay": 0.3}
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
    "LAMB, 3 ranks": (3, FLAT, {"chunks": 3, "coeff_beta": 0.8}),
    "LAMB, 3 ranks, direct": (3, LAMB, {"reply": "direct", "scale": "tensor", "ratio": "denominator"}),
    "LAMB of nodes": (4, LAMB.but(each=2), {"scale": "tensor"}),
    "Adam of bfloat16": (2, ADAM.but(dtype="bfloat16"), {"master_weights": False}),
    "Adam of float16": (2, ADAM.but(dtype="float16"), {"master_weights": False}),
    "Adam of a copy of float16": (2, ADAM.but(dtype="float16"), {"scale": "tensor"}),
    "LAMB of bfloat16": (2, LAMB.but(dtype="bfloat16"), {"scale": "tensor"}),
    "LAMB of float16, other limits": (2, LAMB.but(dtype="float16"), LIMITS),
    "Adam, 2 ranks, shortened": (2, ADAM, {"update_limit": 0.2, "chunks": 2}),
    "Adam, 3 ranks, direct, shortened": (3, ADAM, {"update_limit": 0.3, "reply": "direct", "chunks": 2}),
    "Adam of nodes, shortened": (4, ADAM.but(each=2), {"update_limit": 0.15, "scale": "tensor"}),
    "LAMB, 2 ranks, shortened": (2, LAMB, {"update_limit": 0.2, "scale": "tensor", "chunks": 3}),
    "LAMB of nodes, shortened": (4, LAMB.but(each=2), {"update_limit": 0.2}),
}
GROWN = {"grown": ((13, 40, 3.0), (20, 28, 40.0))}
CASES |= {
    "Adam alone, grown": (1, ADAM.but(**GROWN), {"update_limit": "auto"}),
    "Adam, 4 ranks, grown": (4, ADAM.but(**GROWN), {"update_limit": "auto", "chunks": 2}),
    "Adam of nodes, grown": (4, ADAM.but(each=2, **GROWN), {"update_limit": "auto", "scale": "tensor"}),
    "LAMB, 3 ranks, grown": (3, LAMB.but(**GROWN), {"update_limit": "auto", "chunks": 2}),
    "LAMB of nodes, grown": (4, LAMB.but(each=2, **GROWN), {"update_limit": "auto", "reply": "direct"}),
}
EVERY = {"least", "most", "between", "none", "limit", "the largest", "as far up as it may", "as far down as it may"}
NOT_EVERY = {"LAMB, 3 ranks, direct", "LAMB of float16, other limits", "LAMB of nodes, shortened"}


# Elements whose variance is 0 at the freeze: three rows far into stage 2, and one parameter for good. The simulation
# knows of the floor, of what never moves, of what stays out of a scale, and of what a ratio counts.

UNTOUCHED = ((0, 3, 20), (2, 7, 10**6))
EMBEDDING = Case(
    shapes=((12, 8), (33,), (7,), (0,)), steps=40, options={"freeze_step": 6, "weight_decay": 0.1}, untouched=UNTOUCHED
)
LAMBS = Sized(g_sizes=(1.0, 1e-2, 1.0, 1.0), shapes=EMBEDDING.shapes, steps=40, untouched=UNTOUCHED)
LAMBS = options(LAMBS, freeze_step=8, weight_decay=0.1)
TABLE = {"shapes": ((100, 4), *EMBEDDING.shapes[1:])}  # its blocks are of 128, where others may have 256
CASES |= {
    "Adam, some untouched": (1, EMBEDDING, {"scale": "tensor"}),
    "Adam, held": (3, EMBEDDING, {"zero_variance": "hold", "scale": "tensor"}),
    "Adam, 2 ranks, held": (2, EMBEDDING, {"zero_variance": "hold"}),
    "Adam, a table": (3, EMBEDDING.but(**TABLE), {"block_size": 256}),
    "LAMB, a table": (2, LAMBS.but(**TABLE), {"block_size": 256, "chunks": 2}),
    "LAMB, some untouched": (2, LAMBS, {"ratio": "denominator"}),
    "LAMB, some untouched, one scale": (3, LAMBS, {"scale": "tensor"}),
    "LAMB, held": (2, LAMBS, {"zero_variance": "hold"}),
    "LAMB, held, one scale": (1, LAMBS, {"zero_variance": "hold", "scale": "tensor", "ratio": "denominator"}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_the_simulation(name):
    size, case, own = CASES[name]
    case = options(case, **own)
    reasons = sim.check(case, sim.on_ranks(size, sim.record_run, case), OF[case.kind])
    assert ("shortened" in reasons) == ("update_limit" in own)
    assert ("trusted" in reasons) == ("LAMB" in name and "grown" in name)
    assert case.shapes != LAMB.shapes or name in NOT_EVERY or reasons >= EVERY


def test_limits_of_steps_are_the_simulations():
    """They are the same even if no step of these runs is between them."""
    for kind, of in OF.items():
        algorithm = internals.algorithm(build(kind))
        assert (algorithm.shortened_to, algorithm.trusted_step) == (of.longest, of.trusted)


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (3, "float32"), (2, "bfloat16")])
def test_stage_1_is_adamw(ranks, dtype):
    """AdamW runs in float64, on the averaged gradients. A gradient that is None counts as zero."""
    case = options(ADAM.but(steps=50, dtype=dtype, missing=sim.MISSING), freeze_step=50, weight_decay=0.05)
    params = [nn.Parameter(p.detach().double()) for p in case.parameters()]
    adamw = torch.optim.AdamW([{"params": [p], **h} for p, h in zip(params, sim.hypers(case), strict=True)])
    for step in range(1, case.steps + 1):
        for p, g in zip(params, sim.averaged(case, ranks, step), strict=True):
            p.grad = g
        adamw.step()
    last = sim.on_ranks(ranks, sim.record_run, case)[0][-1]
    for got, want in zip(last.x, arrays([params[p] for p in case.order]), strict=True):
        assert np.abs(got - want).max(initial=0.0) <= 1e-6 * np.abs(want).max(initial=0.0)


@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
@on_ranks(2)
def test_one_warning_of_rank_0_names_the_parameters_and_counts(rank, zero_variance):
    params = EMBEDDING.parameters()
    names = list(zip(("embedding.weight", "a", "b", "c"), params, strict=True))
    optimizer = onebit.OneBitAdam(names, freeze_step=6, zero_variance=zero_variance, process_group=group())
    with on_warnings() as texts:
        run(EMBEDDING, rank, optimizer, params, 1, 11)
    assert len(texts) == (rank == 0)
    for text in texts:
        assert "embedding.weight (24 of 96)" in text and "b (7 of 7)" in text
        assert "a (" not in text and "c (" not in text
        assert ("mean" in text) == (zero_variance == "floor")


def test_no_warning_where_every_element_has_a_variance(recwarn):
    _, optimizer = started(Case(options={"freeze_step": 3}), 7)
    assert optimizer.compressing
    assert [str(w.message) for w in recwarn] == []


# LAMB where parameters, gradients or variances are 0, empty or missing


@pytest.mark.parametrize("ratio", ["variance", "denominator"])
def test_one_gradient_element_that_is_not_0_is_enough(ratio):
    """The smallest model that can be frozen at all."""
    case = Sized(shapes=((0,), (3,)), options={"freeze_step": 1, "ratio": ratio})
    params = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))]
    optimizer = case.build(params)
    with on_warnings("ignore", UserWarning):
        for step in range(1, 9):
            params[0].grad, params[1].grad = None, None if step == 3 else torch.tensor([0.0, 1e-20, 0.0])
            optimizer.step()
            assert params[1].isfinite().all()
            assert not optimizer.compressing or internals.states(optimizer)[0]["ratio"].isfinite().all()
    assert optimizer.compressing


def test_a_parameter_that_is_one_part_has_the_steps_of_a_whole_one():
    """Norms and maxima of whole parameters, which their parts add up to, and those that the kernels find."""
    ends, itself = [], LocalTransport()
    for parts in (None, Topology(itself, itself, shard=itself)):
        torch.manual_seed(0)
        params = [nn.Parameter(x * torch.randn(70)) for x in (0.0, 1.0, 100.0)]
        optimizer = build("OneBitLamb", params, lr=0.1, betas=(0.9, 0.9), freeze_step=4, factor_threshold=0.05)
        for state in internals.states(optimizer):
            state.parts = parts
        for step in range(1, 16):
            step_by(optimizer, lambda p, size=step: size * torch.randn_like(p))
        assert optimizer.compressing
        ends.append([*arrays(params), *(internals.states(optimizer)[0][of].numpy() for of in ("coefficient", "ratio"))])
    for found, expected in zip(*ends, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)

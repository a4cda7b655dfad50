"""Two levels: nodes of several ranks are one rank to the network each. Against the float64 oracle of as many ranks, on
the means of the nodes' gradients, and bit for bit between all ranks."""

import itertools
from dataclasses import replace

import pytest

from tests.limits import HUNG
from tests.onebit.optim import lamb_simulation, simulation
from tests.onebit.optim.lamb_simulation import LAMB
from tests.onebit.optim.simulation import GROUPS, SHAPES, options
from tests.onebit.runs import Case
from tests.ranks import run_ranks_once

ADAM = Case(
    shapes=SHAPES,
    steps=108,
    groups=GROUPS,
    missing=((1, 0, 1), (17, 1, 4), (30, 0, 1), (31, 0, 0), (31, 1, 0), (31, 2, 0), (31, 3, 0)),
    options={"freeze_step": 8},
)
CASES = list(itertools.product(("block", "tensor"), ("direct", 1)))


def run_all(rank, size, cases):
    of = {"OneBitAdam": simulation, "OneBitLamb": lamb_simulation}
    return [of[case.kind].both_stages(rank, size, case) for case in cases]


def test_100_steps_of_two_nodes_equal_the_simulation():
    check_all(2, 2, [(ADAM, "block", "direct"), (LAMB, "tensor", 1)])


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (3, 2), (2, 4)])
def test_100_steps_equal_the_simulation_of_the_nodes(nodes, each):
    kinds = [*CASES, ("block", 2)] if nodes + each == 4 else CASES[:3]
    check_all(nodes, each, [(base, *kind) for base in (ADAM, LAMB) for kind in kinds])


def check_all(nodes, each, choices):
    cases = [
        options(replace(base, each=each), scale=scale, reply=reply, chunks=1 + i % 3)
        for i, (base, scale, reply) in enumerate(choices)
    ]
    runs = run_ranks_once(nodes * each, run_all, (cases,), timeout=HUNG)
    for case, recorded in zip(cases, zip(*runs, strict=True), strict=True):
        check = simulation.check if case.kind == "OneBitAdam" else lamb_simulation.check
        check(case, list(recorded))

"""scan of every backend: sums of squares against float64, and every way not to be finite."""

import numpy as np
import pytest
import torch

from onebit.kernels.data.hyper import LARGEST
from tests.kernels.cases import (
    BF16,
    F16,
    F32,
    GRID,
    ON_BACKENDS,
    Case,
    World,
    assert_close,
    assert_guards,
    numpy,
    use_grain,
)


def scanned(world: World, chunk: int = 0, flag: int = 0, squares: bool = True) -> tuple[int, np.ndarray]:
    span, _ = world.spans()[chunk]
    flags, grads = world.flags(flag), world.grads()
    found = torch.full((span.count,), float("nan"), device=world.device)
    world.passes.scan(span, grads, world.hyper(), flags, found if squares else None)
    assert_guards(grads)
    return int(flags[0]), numpy(found)


@ON_BACKENDS
@GRID
def test_squares_are_those_of_the_scaled_gradients_of_each_block(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    wanted = np.array([(block**2).sum() for block in world.plan.of_blocks(world.plan.flatten(world.scaled_g))])
    for chunk in range(case.chunks):
        flag, squares = scanned(world, chunk)
        assert flag == 0
        span = world.layout.chunk(chunk)
        assert_close(squares, wanted[span.first : span.first + span.count], 4e-6)


@ON_BACKENDS
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("grad", [F32, BF16, F16])
@pytest.mark.parametrize("parameter, element", [(0, 0), (0, 69), (1, 2), (2, 63)])
def test_one_element_that_is_not_finite_sets_the_flag(name, value, grad, parameter, element):
    world = World(Case((70, 3, 64), grad=grad, param=grad, groups=2), name)
    world.g[parameter][element] = value
    assert scanned(world)[0] == 1
    assert scanned(world, squares=False)[0] == 1


@ON_BACKENDS
def test_a_gradient_that_is_too_large_when_scaled_sets_the_flag(name):
    """Group 2 has a gradient scale of 3."""
    world = World(Case((5, 5, 5), groups=3), name)
    world.g[1][3] = 0.7 * LARGEST
    assert scanned(world)[0] == 0
    world.g[2][3] = 0.7 * LARGEST
    assert scanned(world)[0] == 1


@ON_BACKENDS
def test_a_flag_that_was_set_stays_set(name):
    assert scanned(World(Case((70, 3)), name), flag=1)[0] == 1


@ON_BACKENDS
def test_only_the_gradients_of_the_span_are_looked_at(name):
    world = World(Case((160, 40), chunks=2), name)
    world.g[0][5] = np.nan
    assert scanned(world, chunk=0)[0] == 1
    assert scanned(world, chunk=1)[0] == 0


@ON_BACKENDS
def test_gradients_that_are_none_are_finite_and_zero(name):
    flag, squares = scanned(World(Case((40, 3), missing=(0, 1)), name))
    assert flag == 0 and not squares.any()

"""How long a step is, and how far it is made shorter: float64 by NumPy, and the same bits on every backend."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from onebit.kernels.data.layout import Layout
from onebit.kernels.data.limit import LANES
from onebit.kernels.data.wire import NONFINITE
from onebit.kernels.passes import StepLimit, StepSquares
from tests.kernels.agreement import check_limit
from tests.kernels.cases import CASES, F32, ON_BACKENDS, Case
from tests.kernels.compare import assert_close, frozen_bits, numpy
from tests.kernels.world import World

FORMS = {**CASES, "many blocks": Case((32 * (2 * LANES + 5), 40), ranks=3, momentum="packed", senders=3)}
EXACT = 1e-14  # fp64, of a hundred roundings
LEAST, TIMES = 0.25, 2.0
NUMELS = [7, 0, 1000, 2**40, 5, 12, 9, 3]


@pytest.mark.parametrize("replies, weighted", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS.keys())
def test_squares_of_blocks_are_added_up_over_parameters(case: Case, replies: bool, weighted: bool) -> None:
    world, source = World(case), torch.Generator().manual_seed(0)
    layout = world.layout
    values = torch.full((layout.blocks,), float("nan"))
    values[: layout.used_blocks] = torch.rand(layout.used_blocks, generator=source) * 1e30
    weight = torch.rand(layout.parameters, generator=source) if weighted else None
    out = torch.full((layout.parameters,), float("nan"), dtype=torch.float64)
    world.passes.run(StepSquares(layout.all(), values, world.replies if replies else None, weight, out))
    sizes = numpy(world.replies.scales_of(layout.all())).mean(0) if replies else 1
    of_blocks, ends = numpy(values) * sizes**2, [*layout.first, layout.used_blocks]
    wanted = np.array([of_blocks[a:b].sum() for a, b in pairwise(ends)])
    assert_close(numpy(out), wanted if weight is None else wanted * numpy(weight) ** 2, EXACT)


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS.keys())
def test_both_passes_have_the_same_bits_on_every_backend(case: Case) -> None:
    check_limit(case, "triton")


def limited(world: World, by_replies: bool, *bounds: float) -> list[torch.Tensor]:
    """Factors, what is usual, and how many elements were cut: of parameters with every kind of size and of usual."""
    rms = np.array([0.5, 0.0, 4.0, 3.0, 0.0, 100.0, 2.0, 1e-30])
    usual = torch.tensor([0.0, 0.0, -1.0, -8.0, -2.0, 0.7, 1.5, -1e-3], dtype=F32, device=world.device)
    sums = torch.from_numpy(rms**2 * np.maximum(NUMELS, 1)).to(world.device)
    out, shortened = torch.full_like(usual, float("nan")), torch.full((1,), 77, device=world.device)
    numels = torch.tensor(NUMELS, device=world.device)
    replies = world.replies if by_replies else None
    span = Layout([1] * len(NUMELS)).all()
    world.passes.run(StepLimit(span, sums, numels, replies, usual, *bounds, out, shortened))
    return [out.cpu(), usual.cpu(), shortened.cpu()]


@ON_BACKENDS
@pytest.mark.parametrize("flag", [0, NONFINITE])
def test_a_step_is_cut_where_it_is_longer_than_what_is_usual_allows(name: str, flag: int) -> None:
    """What is usual follows from the first step after an update of the variance that moves anything."""
    world = World(CASES["chunks"], name)
    world.replies.flags[-1] = flag
    out, usual, shortened = limited(world, True, LEAST, TIMES, 0.0)
    taken = [0.5, 0.0, 1.0, 3.0, -2.0, 0.7, 1.5, 1e-30]
    assert_close(numpy(usual), [0.0, 0.0, -1.0, -8.0, -2.0, 0.7, 1.5, -1e-3] if flag else taken, 1e-7)
    long = TIMES / 4, TIMES * 0.7 / 100
    unknown = LEAST / 0.5 if flag else 1  # of the first, whose step is a half
    assert_close(numpy(out), [unknown, 1, long[0], 1, 1, long[1], 1, 1], 1e-7)
    assert long[1] * 100 > LEAST and shortened.item() == 1000 + 12 + 7 * bool(flag)


@ON_BACKENDS
def test_a_step_that_is_trusted_keeps_its_length(name: str) -> None:
    """A step of 4 with a usual one of 1 does, one of 100 with 0.7 does not; what is trusted is never shorter than the
    limit."""
    world = World(CASES["chunks"], name)
    for trusted, third in ((4.0, 1.0), (3.9, TIMES / 4), (1.0, TIMES / 4)):
        out, _, shortened = limited(world, True, LEAST, TIMES, trusted)
        assert_close(numpy(out), [1, 1, third, 1, 1, TIMES * 0.7 / 100, 1, 1], 1e-7)
        assert shortened.item() == 12 + 1000 * (third < 1)


@ON_BACKENDS
def test_a_limit_that_is_given_holds_for_all_and_local_steps_leave_what_is_usual(name: str) -> None:
    limit = torch.tensor(0.3, dtype=F32).item()
    out, usual, shortened = limited(World(CASES["chunks"], name), False, limit, 0.0, 0.0)
    assert usual.tolist() == torch.tensor([0.0, 0.0, -1.0, -8.0, -2.0, 0.7, 1.5, -1e-3]).tolist()
    assert_close(numpy(out), [0.6, 1, 0.075, 0.1, 1, 0.003, 0.15, 1], 1e-7)
    assert shortened.item() == 7 + 1000 + 2**40 + 12 + 9


def test_more_parameters_than_are_worked_on_at_a_time_have_the_same_bits_on_every_backend() -> None:
    source, found = torch.Generator().manual_seed(0), []
    sums, usual = 1e3 * torch.rand(2500, generator=source, dtype=torch.float64), torch.randn(2500, generator=source)
    numels = torch.randint(0, 90, (2500,), generator=source)
    for name in ("cpu", "triton"):
        world = World(CASES["senders-96"], name)
        a, b, c = (each.to(world.device) for each in (sums, numels, usual.clone()))
        out, shortened = torch.full_like(c, float("nan")), torch.zeros(1, dtype=torch.int64, device=world.device)
        bounds = LEAST, TIMES, 2 * TIMES
        world.passes.run(StepLimit(Layout([1] * 2500).all(), a, b, world.replies, c, *bounds, out, shortened))
        found.append([frozen_bits(out, c), shortened.item()])
        assert shortened.item() == int(numels[out.cpu() < 1].sum()) > 0
    assert found[0] == found[1]

"""Triton's passes against the CPU's, which are held by a float64 oracle; both have every pass, with one signature.

And the parts of Triton kernels that loop over more blocks than the passes' tests can afford to run.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from onebit.kernels.data.layout import Span
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import NORMS, Messages
from onebit.kernels.gpu import tiles
from onebit.kernels.passes import PASSES, Backend
from onebit.kernels.tuning.workload import Workload
from tests.kernels.cases import BF16, CASES, GPU, GRID, MASKED, ON_BACKENDS, backend
from tests.kernels.compare import assert_all_close, assert_close, frozen_bits, numpy
from tests.kernels.world import World

ROUNDED = 1e-6  # another order of the same sum


@dataclass(frozen=True)
class Pass:
    """How a pass is compared: tensors that are equal bit for bit, those that rounding of a sum is in, and how near x
    comes. x is equal bit for bit where this is 0, but that Triton's interpreter cuts bf16 off where others round."""

    exact: Callable[[World], list[torch.Tensor]] = lambda w: []
    close: Callable[[World], list[torch.Tensor]] = lambda w: []
    x: float = 0.0
    masked: bool = False


def moments(world: World) -> list[torch.Tensor]:
    return [world.exp_avg, world.exp_avg_sq]


def left(world: World) -> torch.Tensor:
    return torch.cat([residual.value for residual in world.residuals])


def of_state(world: World, *names: str) -> list[torch.Tensor]:
    """What LAMB keeps of parameters that have elements."""
    return [getattr(world.state, name).cpu()[torch.tensor(world.case.numels) > 0] for name in names]


def ratios(world: World) -> list[torch.Tensor]:
    return [world.exp_avg_sq, *of_state(world, "ratio", "coefficient")]


COMPARED = {
    "scan": Pass(lambda w: [w.flags], lambda w: [w.squares]),
    "decode": Pass(),
    "adam_warmup": Pass(moments, lambda w: [w.sums]),
    "adam_update": Pass(),
    "lamb_update": Pass(),
    "lamb_warmup": Pass(moments, lambda w: of_state(w, "coefficient", "average"), x=2 * ROUNDED),
    "lamb_statistics": Pass(ratios),
    "lamb_statistics, masked and scaled": Pass(ratios, masked=True),
    "zero_one_full": Pass(lambda w: [w.exp_avg_sq, left(w), w.written_live, w.counts], lambda w: [w.sums]),
    "zero_one_inverses": Pass(close=lambda w: [w.sums]),
    "zero_one_update": Pass(),
    "zero_one_local": Pass(lambda w: [w.exp_avg, left(w)], lambda w: [w.squares]),
    "zero_one_sync": Pass(lambda w: [w.exp_avg] + ([] if w.case.param == BF16 and not w.case.master else [w.anchor])),
}


@pytest.mark.parametrize("each", COMPARED)
@GRID
def test_triton_agrees_with_the_cpu(each, case):
    how = COMPARED[each]
    options = {"masked": how.masked, "zeros": each.startswith("zero_one")}
    ours, theirs = (World(case, name, **options) for name in ("triton", "cpu"))
    for world in (ours, theirs):
        world.run(each.partition(",")[0])
    for got, want in zip(how.exact(ours), how.exact(theirs), strict=True):
        valid = ours.plan.valid if len(want) == ours.elements else slice(None)  # of flat state what is not padding
        assert np.array_equal(numpy(got)[valid] + 0.0, numpy(want)[valid] + 0.0)  # + 0: a scale of 0 may stand for -0
    for got, want in zip(how.close(ours), how.close(theirs), strict=True):
        assert_close(numpy(got), numpy(want), ROUNDED)
    places = 2 * theirs.half_place if case.param == BF16 or how.x else 0.0
    lr = [10 * h.lr if how.x else np.abs(x) for h, x in zip(theirs.hypers, theirs.x, strict=True)]
    assert_all_close(ours.moved(), theirs.moved(), how.x + places, lr)
    assert not ours.state.counter.any()


def assert_same_messages(ours: Messages, theirs: Messages, span: Span) -> np.ndarray:
    """Headers and bits bit for bit, scales to rounding: they are sums. Returns the scales."""
    assert ours.header.tolist() == theirs.header.tolist()
    assert ours.bits_of(span).tolist() == theirs.bits_of(span).tolist()
    scales = numpy(theirs.scales_of(span))
    assert_close(numpy(ours.scales_of(span)), scales, ROUNDED)
    return scales


@MASKED
@GRID
def test_triton_compresses_as_the_cpu_does(case, masked):
    """Residuals are what scales leave out; with a tensor scale they are c, bit for bit."""
    ours, theirs = (World(case, name, masked=masked) for name in ("triton", "cpu"))
    for world in (ours, theirs):
        world.run("compress")
    whole = ours.layout.all()
    size = decoded_size(assert_same_messages(ours.sent, theirs.sent, whole), whole)
    for chunk in ours.chunks():
        assert_same_residuals(ours.residuals[chunk.index], theirs.residuals[chunk.index], size[chunk.part])
    for row in range(ours.rows):
        chunk, rank = divmod(row, case.ranks)
        (got, got_left), (want, want_left) = (world.average(chunk, rank) for world in (ours, theirs))
        shard = ours.layout.shard(chunk, rank)
        size = decoded_size(assert_same_messages(got, want, shard), shard)
        assert_same_residuals(got_left, want_left, size)


def decoded_size(scales: np.ndarray, span: Span) -> np.ndarray:
    """Of every element how large what its block's scale decodes to is."""
    return np.repeat(scales[0], span.lengths())


def assert_same_residuals(ours: Residual, theirs: Residual, size: np.ndarray) -> None:
    if theirs.scale is None:
        assert_close(numpy(ours.value), numpy(theirs.value), ROUNDED, size)
    else:
        assert numpy(ours.value).tolist() == numpy(theirs.value).tolist()
        assert_close(numpy(ours.scale), numpy(theirs.scale), ROUNDED)
        assert not ours.counter.any()


def test_results_do_not_depend_on_how_many_blocks_a_program_takes(use_grain):
    for name in ("three-groups-tensor", "chunks"):
        found = []
        for grain in (1, 3, 64):
            world = World(replace(CASES[name], grain=grain), "triton")
            use_grain(world.case)
            for each in ("compress", "lamb_statistics", "lamb_warmup", "adam_update"):
                world.run(each)
            kept = of_state(world, "coefficient", "average", "ratio")
            found.append(frozen_bits(world.sent, world.residuals, world.params, *moments(world), kept))
        assert found[0] == found[1] == found[2]


@ON_BACKENDS
def test_every_backend_has_every_pass_with_its_signature(name):
    passes = [each for each, of in vars(Backend).items() if inspect.isfunction(of) and not each.startswith("_")]
    assert set(passes) == {*PASSES, "restore"} - {"lamb_update"}
    for function in passes:
        declared = inspect.signature(getattr(Backend, function))
        parameters = list(declared.parameters.values())[1:]  # without self
        assert inspect.signature(getattr(backend(name), function)) == declared.replace(parameters=parameters), function


BLOCKS = 2500  # three rounds of 1024


@triton.jit
def _reduce(partial, blocks, total, largest):
    tl.store(total, tiles.sum_partials(partial, blocks))
    tl.store(largest, tiles.max_partials(partial, blocks))


@triton.jit
def _finish_scale(scale, residual_scale, partial, counted, blocks, NORM: tl.constexpr):
    tiles.finish_scale(scale, residual_scale, partial, counted, blocks, NORM)


@pytest.mark.parametrize("blocks", [1, 1024, BLOCKS])
def test_partial_results_of_any_number_of_blocks_are_summed_compared_and_make_a_scale(blocks):
    """More elements than fp32 can count exactly, some blocks empty."""
    partial = torch.full((BLOCKS + 8,), float("nan"), device=GPU)
    partial[:blocks] = torch.rand(blocks, device=GPU)
    partial[blocks - 1] = 2.0
    total, largest, scale, copy = torch.zeros((4, 1), device=GPU)
    _reduce[(1,)](partial, blocks, total, largest)
    summed = partial[:blocks].double().sum().item()
    assert total.item() == pytest.approx(summed, rel=1e-6)
    assert largest.item() == 2.0
    counted = torch.randint(1, 16385, (BLOCKS + 8,), dtype=torch.int32, device=GPU)
    counted[5::7] = 0
    for norm in ("l1", "l2"):
        _finish_scale[(1,)](scale, copy, partial, counted, blocks, NORM=NORMS[norm])
        wanted = summed / counted[:blocks].sum().item()
        assert scale.item() == pytest.approx(np.sqrt(wanted) if norm == "l2" else wanted, rel=1e-6)
        assert copy.item() == scale.item()


def test_more_messages_than_eight_are_summed_in_their_order_too():
    """Of a tensor scale the residual is c, bit for bit."""
    ours, theirs = (Workload([5000], scale="tensor", ranks=11) for _ in range(2))
    for work, name in ((ours, "triton"), (theirs, "cpu")):
        work.passes(backend(name))["average"].run()
    got, want = (work.outputs()["server_residual"] for work in (ours, theirs))
    assert got.tolist() == want.tolist()

"""compress of every backend against the float64 oracle, and Triton against the CPU."""

import numpy as np
import pytest
import torch

from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import MAGIC, NONFINITE, Messages
from tests import oracle
from tests.kernels.cases import (
    CASES,
    F32,
    FEW_GRID,
    GRID,
    ON_BACKENDS,
    ON_FUSED,
    PAIRS,
    SCALES_AND_NORMS,
    SMALL_GRID,
    Case,
    World,
    assert_close,
    assert_guards,
    decoded_size,
    frozen_bits,
    numpy,
    rounded,
    use_grain,
)
from tests.wire import contents, values_of

ELEMENTWISE = 1e-6  # a handful of fp32 roundings
SUMMED = 4e-6  # and one more for each level of a sum


def residual_scales(world: World, rows: int) -> np.ndarray:
    return np.random.default_rng(5).uniform(0.1, 1.0, rows)


def momentum_of(world: World, chunk: int) -> tuple[torch.Tensor | Messages | None, np.ndarray]:
    """The momentum of a chunk as the case wants it, and as one float64 array over the whole space."""
    match world.case.momentum:
        case "none":
            return None, np.zeros(world.elements)
        case "dense":
            span, _ = world.spans()[chunk]
            return span.of(world.flat(world.m)), world.plan.flatten(world.m)
        case "packed":
            messages = world.all_messages()
            return messages.slice(chunk * world.case.ranks, world.case.ranks), values_of(messages, world.plan)
    raise AssertionError(world.case.momentum)


def compressed(
    world: World, chunk: int, live: np.ndarray | None = None, gamma: np.ndarray | None = None
) -> tuple[Messages, Residual]:
    """What `compress` of the backend makes of a chunk."""
    span, part = world.spans()[chunk]
    scales = residual_scales(world, world.rows)[chunk * world.case.ranks :][: world.case.ranks]
    residual, out = world.residual(span, world.e, scales), world.fresh(world.case.ranks)
    grads, (momentum, _) = world.grads(), momentum_of(world, chunk)
    mask = None if live is None else world.packed(live[part])
    scaling, before = None if gamma is None else world.per_parameter(gamma), frozen_bits(mask)
    world.passes.compress(span, grads, momentum, residual, world.hyper(), world.flags(), out, live=mask, gamma=scaling)
    assert_guards(grads)
    assert frozen_bits(mask) == before
    return out, residual


def expected_c(world: World, gamma: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """c of the whole space in float64, and the size of what was added up to it. gamma scales what is added to m."""
    _, m = momentum_of(world, 0)
    m = [m_p.ravel() for m_p in world.plan.unflatten(m)]
    gamma = np.ones(len(m)) if gamma is None else gamma
    g = [None if g_p is None else gamma_p * g_p for gamma_p, g_p in zip(gamma, world.scaled_g, strict=True)]
    y = world.plan.flatten(oracle.local_momentum(g, m, world.hypers))
    e = world.plan.flatten(world.e)
    if world.case.scale == "tensor":
        scales = rounded(residual_scales(world, world.rows), F32)
        e = e - oracle.sigma(e) * np.repeat(scales, [part.stop - part.start for part in world.plan.shards()])
    size = (
        np.abs(world.plan.flatten(g)) + np.abs(world.plan.flatten(m)) + np.abs(world.plan.flatten(world.e)) + np.abs(e)
    )
    return np.where(world.plan.valid, y + e, 0.0), size


def check_message(
    world: World,
    out: Messages,
    row: int,
    part: slice,
    value: np.ndarray,
    scale: float | None,
    c: np.ndarray,
    size,
    valid,
) -> None:
    """One message, of a part of the space, and the residual it leaves (`value`, `scale`), against the oracle's
    compress(c)."""
    case, lengths = world.case, world.plan.lengths_in(part)
    expected = oracle.compress(c, valid, lengths=lengths, scale=case.scale, norm=case.norm)
    found = contents(out, row, lengths)
    assert out.header[row].tolist() == [MAGIC, 0, world.form.fingerprint, world.layout.shard_blocks]
    assert_close(found.scales, expected.scales, SUMMED)
    bits = found.bits
    sure = expected.sure(ELEMENTWISE * size)
    assert sure.sum() >= (0.65 if case.norm == "rotated" else 0.99) * valid.sum()  # of a rotated block all or nothing
    assert (bits == expected.bits)[sure].all()
    assert case.norm == "rotated" or not bits[~valid].any()
    assert not value[~valid].any()
    left = c if case.scale == "tensor" else expected.error
    reach = size + np.abs(expected.decoded)
    if case.norm == "rotated":  # rounding of one element is in all that it is mixed with
        reach = np.repeat([reach[block].max() for block in oracle.blocks(lengths)], lengths)
    assert_close(value[sure], left[sure], SUMMED, reach[sure])
    if scale is not None:
        assert_close(scale, expected.scales[0], SUMMED)


def check_compress(world: World, live: np.ndarray | None = None, gamma: np.ndarray | None = None) -> None:
    """Every message of every chunk. A coordinate that `live` leaves out counts as padding does."""
    case = world.case
    c, size = expected_c(world, gamma)
    counts = world.plan.valid if live is None else world.plan.valid & live
    c = np.where(counts, c, 0.0)
    for chunk in range(case.chunks):
        out, residual = compressed(world, chunk, live, gamma)
        value, first = numpy(residual.value), world.plan.shard(chunk, 0).start
        for rank in range(case.ranks):
            part = world.plan.shard(chunk, rank)
            own = slice(part.start - first, part.stop - first)
            scale = None if residual.scale is None else float(residual.scale[rank])
            check_message(world, out, rank, part, value[own], scale, c[part], size[part], counts[part])


@ON_BACKENDS
@GRID
def test_compress_agrees_with_the_oracle(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    check_compress(World(case, name))


@ON_BACKENDS
@FEW_GRID
def test_compress_leaves_out_coordinates_that_take_no_part(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    check_compress(world, world.live)


@ON_BACKENDS
@FEW_GRID
def test_compress_scales_what_it_adds_to_scaled_momentum(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    check_compress(world, None, world.gamma)


@ON_BACKENDS
@SCALES_AND_NORMS
def test_all_live_is_no_mask_and_gamma_one_is_no_gamma_bit_for_bit(name, scale, norm):
    case = Case((100, 7, 96, 33), 96, 2, scale=scale, norm=norm, groups=3)
    world = World(case, name)
    live, gamma = np.ones(world.elements, bool), np.ones(len(world.x))
    assert frozen_bits(*compressed(world, 0, live, gamma)) == frozen_bits(*compressed(world, 0))


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_a_coordinate_that_takes_no_part_stays_zero_however_many_steps_go_by(name, scale):
    """NaN included. With a tensor scale the last step's scale would make e = -s of c = 0."""
    world = World(Case((5,), scale=scale, momentum="none"), name)
    world.g, world.e = [np.array([1.0, np.nan, 3.0, np.nan, -2.0])], [np.array([0.0, np.nan, 0.0, 0.0, 0.0])]
    span, residual, out = world.layout.all(), world.residual(world.layout.all(), world.e), world.fresh(1)
    live = world.packed(np.array([1, 0, 1, 0, 1, 1, 1, 1] * 4, bool))
    for step in range(3):
        world.passes.compress(span, world.grads(), None, residual, world.hyper(), world.flags(), out, live=live)
        assert numpy(residual.value)[[1, 3]].tolist() == [0, 0]
        assert not any(
            byte & ~valid for byte, valid in zip(out.bits(0, span).tolist(), [0b10101, 0, 0, 0], strict=True)
        )
        assert step > 0 or out.scales(0, span).item() == pytest.approx(2.0 * 0.5 * (1 - 0.9))


@ON_FUSED
@SMALL_GRID
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "masked and scaled"])
def test_compress_agrees_with_the_cpu_bit_for_bit(name, case, extras, monkeypatch):
    use_grain(monkeypatch, case)
    for chunk in range(case.chunks):
        world = World(case, name)
        given = (world.live, world.gamma) if extras else ()
        ours, ours_left = compressed(world, chunk, *given)
        theirs, theirs_left = compressed(World(case), chunk, *given)
        assert ours.header.tolist() == theirs.header.tolist()
        span = world.layout.chunk(chunk)
        assert ours.bits_of(span).tolist() == theirs.bits_of(span).tolist()
        scales = numpy(theirs.scales_of(span))
        assert_close(numpy(ours.scales_of(span)), scales, ELEMENTWISE)
        if case.scale == "tensor":
            assert numpy(ours_left.value).tolist() == numpy(theirs_left.value).tolist()
            assert_close(numpy(ours_left.scale), numpy(theirs_left.scale), ELEMENTWISE)
        else:
            size = decoded_size(case, scales, span.lengths())
            assert_close(numpy(ours_left.value), numpy(theirs_left.value), ELEMENTWISE, size)


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_a_set_flag_goes_into_every_header_and_nothing_else_changes(name, scale):
    world = World(Case((100, 5), ranks=2, scale=scale, momentum="packed"), name)
    span = world.layout.all()
    residual, out = world.residual(span, world.e, np.array([0.5, 0.25])), world.fresh(2)
    before = frozen_bits(residual)
    momentum = world.all_messages()
    world.passes.compress(span, world.grads(), momentum, residual, world.hyper(), world.flags(NONFINITE), out)
    assert frozen_bits(residual) == before
    header = [MAGIC, NONFINITE, world.form.fingerprint, world.layout.shard_blocks]
    assert out.header.tolist() == [header, header]
    assert bool((out.buffer[:, 16:] == 0xFF).all())


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_a_message_carries_no_flag_where_none_is_set(name, scale):
    world = World(Case((40,), scale=scale), name)
    out, _ = compressed(world, 0)
    assert out.flags.tolist() == [0]


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_either_zero_counts_as_positive(name, scale, zero):
    world = World(Case((6,), scale=scale, momentum="none"), name)
    world.g, world.e = [np.array([zero, 2.0, zero, -2.0, zero, zero])], [np.full(6, zero)]
    out, _ = compressed_from_zero(world)
    assert out.bits(0, world.layout.all()).tolist() == [0b110111, 0, 0, 0]


def compressed_from_zero(world: World) -> tuple[Messages, Residual]:
    """compress with the residual `world.e`, no last scale and no momentum, over the whole space."""
    span = world.layout.all()
    residual, out = world.residual(span, world.e), world.fresh(world.rows)
    world.passes.compress(span, world.grads(), None, residual, world.hyper(), world.flags(), out)
    return out, residual


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_zeros_give_scale_zero_and_no_nan(name, scale):
    world = World(Case((40, 3), ranks=2, scale=scale, norm="l2"), name)
    world.g, world.e = [np.zeros(40), np.zeros(3)], [np.zeros(40), np.zeros(3)]
    out, residual = compressed_from_zero(world)
    assert not bool(out.scales_of(world.layout.all()).any())
    assert not numpy(residual.value)[world.plan.valid].any()


@ON_BACKENDS
def test_gradients_that_are_all_none_count_as_zero(name):
    """b1 m is what is left to compress."""
    world = World(Case((33, 7), missing=(0, 1)), name)
    c, size = expected_c(world)
    out, residual = compressed(world, 0)
    check_message(world, out, 0, world.plan.shard(0, 0), numpy(residual.value), None, c, size, world.plan.valid)


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_a_scale_is_the_mean_over_valid_elements_only(name, scale):
    """3 elements of 32: padding counted would make it 6 / 32."""
    world = World(Case((3,), scale=scale, momentum="none"), name)
    world.g, world.e = [np.array([1.0, -2.0, 3.0])], [np.zeros(3)]
    world.hypers = [oracle.LambHyper(beta1=0.0)]
    out, _ = compressed_from_zero(world)
    # group 0 has beta1 0.9 and a gradient scale of 0.5
    assert_close(numpy(out.scales_of(world.layout.all())), [[2.0 * 0.5 * (1 - 0.9)]], ELEMENTWISE)


@ON_BACKENDS
def test_a_tensor_scale_spans_one_message_and_no_more(name):
    """Two shards, 1000 times apart: each has its own scale."""
    world = World(Case((32, 32), ranks=2, scale="tensor", momentum="none"), name)
    world.g, world.e = [np.full(32, 1.0), np.full(32, -1000.0)], [np.zeros(32)] * 2
    out, _ = compressed_from_zero(world)
    assert_close(numpy(out.scales_of(world.layout.all())), [[0.05, 50.0]], ELEMENTWISE)


def test_the_grid_covers_what_it_says():
    """Every option that a pass branches on is taken with both scales or both momenta somewhere."""
    cases = CASES.values()
    assert {(case.scale, case.norm) for case in cases} == set(PAIRS)
    assert {case.momentum for case in cases} == {"none", "dense", "packed"}
    assert {case.ranks for case in cases} == {1, 2, 3}
    assert {case.param for case in cases} >= {torch.float32, torch.bfloat16, torch.float16}

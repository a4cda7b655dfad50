"""average and decode of every backend against the float64 oracle, and Triton against the CPU."""

import numpy as np
import pytest

from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import MAGIC, NONFINITE, Messages
from tests import oracle
from tests.kernels.cases import (
    BF16,
    F32,
    FEW_GRID,
    GRID,
    ON_BACKENDS,
    ON_FUSED,
    SCALES_AND_NORMS,
    SMALL_GRID,
    Case,
    World,
    assert_close,
    assert_guards,
    decoded_rows,
    decoded_size,
    frozen_bits,
    numpy,
    rounded,
    stored,
    use_grain,
)
from tests.kernels.test_passes_compress import ELEMENTWISE, check_message
from tests.wire import values_of


def averaged(
    world: World, received: Messages, chunk: int, rank: int, live: np.ndarray | None = None
) -> tuple[Messages, Residual]:
    shard = world.layout.shard(chunk, rank)
    residual = world.residual(shard, world.e, np.array([0.3]))
    out = world.fresh(1)
    mask = None if live is None else world.packed(live[world.plan.shard(chunk, rank)])
    world.passes.average(shard, received, residual, out, live=mask)
    return out, residual


def expected_average(world: World, received: Messages, part: slice) -> tuple[np.ndarray, np.ndarray]:
    e = world.plan.flatten(world.e)[part]
    if world.case.scale == "tensor":
        e = e - oracle.sigma(e) * rounded(np.array(0.3), F32)
    values = decoded_rows(received, world.plan.lengths_in(part))
    valid = world.plan.valid[part]
    return np.where(valid, values.mean(0) + e, 0.0), np.abs(values).sum(0) + np.abs(e) + 0.3


def check_average(world: World, live: np.ndarray | None = None) -> None:
    """Every shard of every chunk. A coordinate that `live` leaves out counts as padding does."""
    case = world.case
    counts = world.plan.valid if live is None else world.plan.valid & live
    for chunk in range(case.chunks):
        for rank in range(case.ranks):
            part = world.plan.shard(chunk, rank)
            received = world.received(chunk, rank, seed=rank)
            c, size = expected_average(world, received, part)
            out, residual = averaged(world, received, chunk, rank, live)
            scale = None if residual.scale is None else float(residual.scale[0])
            c = np.where(counts[part], c, 0.0)
            check_message(world, out, 0, part, numpy(residual.value), scale, c, size, counts[part])


@ON_BACKENDS
@GRID
def test_average_agrees_with_the_oracle(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    check_average(World(case, name))


@ON_BACKENDS
@FEW_GRID
def test_average_leaves_out_coordinates_that_take_no_part(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    check_average(world, world.live)


@ON_FUSED
@SMALL_GRID
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_average_agrees_with_the_cpu_bit_for_bit(name, case, masked, monkeypatch):
    use_grain(monkeypatch, case)
    world, other = World(case, name), World(case)
    live = world.live if masked else None
    for rank in range(case.ranks):
        last = case.chunks - 1
        shard, received = world.layout.shard(last, rank), world.received(last, rank, seed=rank)
        ours, ours_left = averaged(world, received, last, rank, live)
        theirs, theirs_left = averaged(other, other.received(last, rank, seed=rank), last, rank, live)
        assert ours.header.tolist() == theirs.header.tolist()
        assert ours.bits_of(shard).tolist() == theirs.bits_of(shard).tolist()
        scales = numpy(theirs.scales_of(shard)[0])
        assert_close(numpy(ours.scales_of(shard)[0]), scales, ELEMENTWISE)
        size = decoded_size(case, scales, shard.lengths())
        assert_close(numpy(ours_left.value), numpy(theirs_left.value), ELEMENTWISE, size)


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("flagged", [0, 2])
def test_average_passes_a_flag_on_and_keeps_its_residual(name, scale, flagged):
    """Whatever else a flagged message holds, NaN included."""
    world = World(Case((100, 5), ranks=3, scale=scale), name)
    received, shard = world.received(0, 1), world.layout.shard(0, 1)
    received.flags[flagged] = NONFINITE
    received.scales(flagged, shard).fill_(float("nan"))
    residual, out = world.residual(shard, world.e, np.array([0.5])), world.fresh(1)
    before = frozen_bits(residual)
    world.passes.average(shard, received, residual, out)
    assert frozen_bits(residual) == before
    assert out.header.tolist() == [[MAGIC, NONFINITE, world.form.fingerprint, world.layout.shard_blocks]]
    assert bool((out.buffer[:, 16:] == 0xFF).all())


@ON_BACKENDS
def test_opposite_signs_average_to_a_zero_that_counts_as_positive(name):
    world = World(Case((16,), ranks=2), name)
    world.e = [np.zeros(16)]
    received, shard = world.received(0, 0), world.layout.shard(0, 0)
    for row, byte in enumerate((0b00001111, 0b00111100)):
        received.scales(row, shard).fill_(0.75)
        received.bits(row, shard).fill_(byte)
    out, residual = averaged(world, received, 0, 0)
    assert out.bits(0, shard).tolist() == [0b00111111, 0b00111111, 0, 0]
    assert_close(numpy(out.scales(0, shard)), [0.75 * 4 / 8], 0)
    assert_close(numpy(residual.value)[:8], [-0.375] * 2 + [0.375] * 2 + [-0.375] * 4, 0, 1)


@ON_BACKENDS
@GRID
def test_decode_writes_each_sign_times_its_scale_and_nothing_else(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    messages = world.all_messages()
    values = world.plan.unflatten(values_of(messages, world.plan))
    out = world.params()
    for chunk, (span, part) in enumerate(world.spans()):
        before = world.plan.flatten([numpy(t) for t in out.tensors])
        world.passes.decode(span, messages.slice(chunk * case.ranks, case.ranks), out)
        after = world.plan.flatten([numpy(t) for t in out.tensors])
        before[part] = after[part]
        assert (after == before).all()
    for tensor, value in zip(out.tensors, values, strict=True):
        assert numpy(tensor).tolist() == stored(value, case.param, name).tolist()
    assert_guards(out)


@ON_BACKENDS
def test_a_flagged_message_decodes_to_nan_as_an_uncompressed_mean_would(name):
    world = World(Case((64, 40), ranks=2), name)
    messages, out = world.all_messages(), world.params()
    messages.flags[0] = NONFINITE
    world.passes.decode(world.layout.all(), messages, out)
    assert np.isnan(numpy(out.tensors[0])).all()
    assert numpy(out.tensors[1]).tolist() == values_of(messages, world.plan)[64:104].tolist()
    assert_guards(out)


@ON_BACKENDS
def test_decode_passes_over_a_tensor_that_is_none(name):
    world = World(Case((64, 33), param=BF16), name)
    out = world.params()
    out.bind_tensors([None, out.tensors[1]])
    messages = world.all_messages()
    world.passes.decode(world.layout.all(), messages, out)
    assert numpy(out.tensors[1]).tolist() == stored(values_of(messages, world.plan)[64:97], BF16, name).tolist()


@ON_BACKENDS
@SCALES_AND_NORMS
def test_all_live_is_no_mask_bit_for_bit(name, scale, norm):
    world = World(Case((100, 7, 96, 33), 96, 2, scale=scale, norm=norm, groups=3), name)
    live, received = np.ones(world.elements, bool), world.received(0, 1)
    assert frozen_bits(*averaged(world, received, 0, 1, live)) == frozen_bits(*averaged(world, received, 0, 1))

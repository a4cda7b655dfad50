"""Replies of 2 bits an element: average against the float64 oracle, Triton against the CPU, and all that read them."""

import numpy as np
import pytest
import torch

from onebit.kernels import cpu
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import ABOVE, MAGIC, NONFINITE
from onebit.kernels.tuning.workload import Workload
from tests import oracle
from tests.kernels.cases import (
    FEW_GRID,
    ON_BACKENDS,
    ON_FUSED,
    SMALL_GRID,
    Case,
    World,
    assert_close,
    backend,
    decoded_rows,
    device_of,
    frozen_bits,
    numpy,
    use_grain,
)
from tests.kernels.test_passes_average import expected_average
from tests.kernels.test_passes_compress import ELEMENTWISE, SUMMED
from tests.kernels.test_passes_copies import NUMELS, assert_same, outputs
from tests.wire import contents, values_of

READERS = {
    "block": {"ranks": 2},
    "tensor": {"ranks": 3, "scale": "tensor", "norm": "l2", "masked": True, "scaled": True},
    "wide": {"ranks": 1, "block_size": 96},
    "fp16": {"ranks": 2, "dtype": torch.float16, "master": False},
}


def averaged(world, received, chunk, rank, live=None):
    """What a server replies in 2 bits, and what that leaves out."""
    shard, form = world.layout.shard(chunk, rank), world.form.with_bits(2)
    part = world.plan.flatten(world.e)[world.plan.shard(chunk, rank)]
    residual = Residual.zeros(shard, form, world.device)
    residual.value.copy_(torch.from_numpy(part))
    out = form.empty(1, world.device)
    out.buffer.fill_(0xFF)
    mask = None if live is None else world.packed(live[world.plan.shard(chunk, rank)])
    world.passes.average(shard, received, residual, out, live=mask)
    return out, residual


def check_reply(world, received, chunk, rank, live):
    part = world.plan.shard(chunk, rank)
    e = world.plan.flatten(world.e)[part]
    lengths = world.plan.lengths_in(part)
    values = decoded_rows(received, lengths)
    counts = world.plan.valid[part] if live is None else (world.plan.valid & live)[part]
    c = np.where(counts, values.mean(0) + e, 0.0)
    size = np.abs(values).sum(0) + np.abs(e)
    out, residual = averaged(world, received, chunk, rank, live)
    expected = oracle.compress_two_bits(c, counts, lengths=lengths)
    assert out.header[0].tolist() == [MAGIC + 1, 0, out.format.fingerprint, world.layout.shard_blocks]
    found = contents(out, 0, lengths)
    positive, large = found.bits, found.large
    sure = expected.sure(ELEMENTWISE * size) & ~expected.unsure_blocks(ELEMENTWISE * size)
    assert sure.sum() >= 0.95 * counts.sum()
    assert (positive == expected.bits)[sure].all() and (large == expected.large)[sure].all()
    assert not positive[~counts].any() and not large[~counts].any()
    left = numpy(residual.value)
    assert not left[~counts].any()
    assert_close(left[sure], expected.error[sure], SUMMED, (size + np.abs(expected.decoded))[sure])
    certain = ~expected.unsure_blocks(ELEMENTWISE * size)[np.cumsum([0, *lengths[:-1]])]
    assert_close(found.scales[certain], expected.scales[certain], SUMMED)
    both = found.values
    assert_close((both + left)[counts], c[counts], SUMMED, (size + np.abs(both))[counts])  # nothing is lost


@ON_BACKENDS
@FEW_GRID
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_a_reply_agrees_with_the_oracle(name, case, masked, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    for chunk in range(case.chunks):
        for rank in range(case.ranks):
            received = world.received(chunk, rank, seed=rank)
            check_reply(world, received, chunk, rank, world.live if masked else None)


@ON_FUSED
@SMALL_GRID
def test_a_reply_agrees_with_the_cpu_bit_for_bit(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    world, other = World(case, name), World(case)
    for rank in range(case.ranks):
        last = case.chunks - 1
        shard = world.layout.shard(last, rank)
        ours, ours_left = averaged(world, world.received(last, rank, seed=rank), last, rank)
        theirs, theirs_left = averaged(other, other.received(last, rank, seed=rank), last, rank)
        assert ours.header.tolist() == theirs.header.tolist()
        assert ours.bits_of(shard).tolist() == theirs.bits_of(shard).tolist()
        assert_close(numpy(ours.scales_of(shard)), numpy(theirs.scales_of(shard)), ELEMENTWISE)
        _, size = expected_average(other, other.received(last, rank, seed=rank), other.plan.shard(last, rank))
        assert_close(numpy(ours_left.value), numpy(theirs_left.value), ELEMENTWISE, size.max() + np.zeros(len(size)))


@ON_BACKENDS
def test_a_flag_is_passed_on_and_keeps_what_is_left_out(name):
    world = World(Case((100, 5), ranks=3), name)
    received = world.received(0, 1)
    received.flags[1] = NONFINITE
    out, residual = averaged(world, received, 0, 1)
    assert out.header.tolist() == [[MAGIC + 1, NONFINITE, out.format.fingerprint, world.layout.shard_blocks]]
    assert bool((out.buffer[:, 16:] == 0xFF).all())
    e = world.plan.flatten(world.e)[world.plan.shard(0, 1)]
    assert_close(numpy(residual.value), e, ELEMENTWISE, np.abs(e).max() + np.zeros(len(e)))


@ON_BACKENDS
def test_a_block_whose_elements_are_all_of_one_size_has_no_large_ones(name):
    world = World(Case((16,), ranks=1), name)
    world.e = [np.where(np.arange(16) % 3 == 0, -0.5, 0.5)]
    received, shard = world.received(0, 0), world.layout.all()
    received.scales(0, shard).zero_()
    out, residual = averaged(world, received, 0, 0)
    found = contents(out, 0, [32])
    assert found.scales.tolist() == [[0.5, 0.0]]
    assert not found.large.any() and found.bits[:16].tolist() == [i % 3 != 0 for i in range(16)]
    assert not numpy(residual.value).any()


@ON_BACKENDS
def test_what_is_large_is_above_the_bound(name):
    sizes = np.array([1.0] * 12 + [1.25, 1.3, 3.0, -4.0])
    world = World(Case((16,), ranks=1), name)
    world.e = [sizes]
    received, shard = world.received(0, 0), world.layout.all()
    received.scales(0, shard).zero_()
    out, _ = averaged(world, received, 0, 0)
    least = ABOVE * np.abs(sizes).mean()
    assert 1.3 < least < 3
    found = contents(out, 0, [32])
    assert found.large[:16].tolist() == (np.abs(sizes) > least).tolist()
    assert_close(found.scales[0], [(12 + 1.25 + 1.3) / 14, 3.5], SUMMED)


@ON_FUSED
@pytest.mark.parametrize("options", READERS.values(), ids=READERS.keys())
def test_readers_agree_with_the_cpu(name, options):
    options = {"block_size": 32, "reply_bits": 2, **options}
    ours = outputs(Workload(NUMELS, device_of(name), **options), backend(name))
    theirs = outputs(Workload(NUMELS, **options), cpu)
    assert_same(ours, theirs, half=options.get("dtype") == torch.float16)


@ON_BACKENDS
@pytest.mark.parametrize("options", READERS.values(), ids=READERS.keys())
def test_what_is_decoded(name, options):
    work = Workload(NUMELS, device_of(name), **{"block_size": 32, "reply_bits": 2, **options})
    work.passes(backend(name))["decode"].run()
    plan = oracle.Layout(tuple(NUMELS), work.layout.block_size, work.layout.ranks)
    values = plan.unflatten(values_of(work.replies(), plan))
    for wanted, got in zip(values, work.decoded().tensors, strict=True):
        np.testing.assert_allclose(got.cpu().double().numpy(), wanted, rtol=1e-3 if got.itemsize == 2 else 1e-6)


@ON_BACKENDS
def test_a_flagged_reply_decodes_to_nan_and_moves_nothing(name):
    work = Workload([64], device_of(name), ranks=1, block_size=32, reply_bits=2)
    work.replies().flags.fill_(NONFINITE)
    before = frozen_bits(work.params())
    passes = work.passes(backend(name))
    passes["decode"].run()
    passes["adam_update"].run()
    passes["lamb_statistics"].run()
    assert bool(torch.isnan(work.decoded().tensors[0]).all())
    assert frozen_bits(work.params()) == before

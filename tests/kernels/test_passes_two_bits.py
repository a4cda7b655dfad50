"""Replies of 2 bits an element: average against the float64 oracle and the reference, and all that read them."""

import numpy as np
import pytest
import torch

from onebit.kernels import reference
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
    decoded,
    device_of,
    frozen_bits,
    numpy,
    use_grain,
)
from tests.kernels.test_passes_average import expected_average
from tests.kernels.test_passes_compress import ELEMENTWISE, SUMMED
from tests.kernels.test_passes_copies import NUMELS, assert_same, outputs

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


def unpacked(out):
    """bool [2, elements]: signs, and which are large."""
    size = out.format.block_size
    bits = np.unpackbits(out.bits[0].cpu().numpy(), axis=-1, bitorder="little") == 1
    return bits[:, :size].ravel(), bits[:, size:].ravel()


def check_reply(world, received, chunk, rank, live):
    part = world.plan.shard(chunk, rank)
    e = world.plan.flatten(world.e)[part]
    values = decoded(received).reshape(received.rows, -1)
    counts = world.plan.valid[part] if live is None else (world.plan.valid & live)[part]
    c = np.where(counts, values.mean(0) + e, 0.0)
    size = np.abs(values).sum(0) + np.abs(e)
    out, residual = averaged(world, received, chunk, rank, live)
    expected = oracle.compress_two_bits(c, counts, block_size=world.case.block_size)
    assert out.header[0].tolist() == [MAGIC + 1, 0, out.format.fingerprint, world.form.shard_blocks]
    positive, large = unpacked(out)
    sure = expected.sure(ELEMENTWISE * size) & ~expected.unsure_blocks(ELEMENTWISE * size)
    assert sure.sum() >= 0.95 * counts.sum()
    assert (positive == expected.bits)[sure].all() and (large == expected.large)[sure].all()
    assert not positive[~counts].any() and not large[~counts].any()
    left = numpy(residual.value)
    assert not left[~counts].any()
    assert_close(left[sure], expected.error[sure], SUMMED, (size + np.abs(expected.decoded))[sure])
    certain = ~expected.unsure_blocks(ELEMENTWISE * size).reshape(-1, world.case.block_size)[:, 0]
    scales = numpy(out.scales[0]).reshape(-1, 2)
    assert_close(scales[certain], expected.scales[certain], SUMMED)
    both = np.where(positive, 1, -1) * np.where(large, *(s.repeat(world.case.block_size) for s in scales.T[::-1]))
    assert_close((both + left)[counts], c[counts], SUMMED, (size + np.abs(both))[counts])  # nothing is lost


@ON_BACKENDS
@FEW_GRID
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_a_reply_agrees_with_the_oracle(name, case, masked, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    for chunk in range(case.chunks):
        for rank in range(case.ranks):
            received = world.random_messages(case.ranks, seed=rank)
            check_reply(world, received, chunk, rank, world.live if masked else None)


@ON_FUSED
@SMALL_GRID
def test_a_reply_agrees_with_the_reference_bit_for_bit(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    world, other = World(case, name), World(case)
    for rank in range(case.ranks):
        ours, ours_left = averaged(world, world.random_messages(case.ranks, seed=rank), case.chunks - 1, rank)
        theirs, theirs_left = averaged(other, other.random_messages(case.ranks, seed=rank), case.chunks - 1, rank)
        assert ours.header.tolist() == theirs.header.tolist()
        assert ours.bits.tolist() == theirs.bits.tolist()
        assert_close(numpy(ours.scales), numpy(theirs.scales), ELEMENTWISE)
        _, size = expected_average(other, other.random_messages(case.ranks, seed=rank), other.plan.shard(0, rank))
        assert_close(numpy(ours_left.value), numpy(theirs_left.value), ELEMENTWISE, size.max() + np.zeros(len(size)))


@ON_BACKENDS
def test_a_flag_is_passed_on_and_keeps_what_is_left_out(name):
    world = World(Case((100, 5), ranks=3), name)
    received = world.random_messages(3)
    received.flags[1] = NONFINITE
    out, residual = averaged(world, received, 0, 1)
    assert out.header.tolist() == [[MAGIC + 1, NONFINITE, out.format.fingerprint, out.format.shard_blocks]]
    assert bool((out.buffer[:, 16:] == 0xFF).all())
    e = world.plan.flatten(world.e)[world.plan.shard(0, 1)]
    assert_close(numpy(residual.value), e, ELEMENTWISE, np.abs(e).max() + np.zeros(len(e)))


@ON_BACKENDS
def test_a_block_whose_elements_are_all_of_one_size_has_no_large_ones(name):
    world = World(Case((16,), ranks=1), name)
    world.e = [np.where(np.arange(16) % 3 == 0, -0.5, 0.5)]
    received = world.random_messages(1)
    received.scales.zero_()
    out, residual = averaged(world, received, 0, 0)
    assert numpy(out.scales).tolist() == [[0.5, 0.0]]
    positive, large = unpacked(out)
    assert not large.any() and positive[:16].tolist() == [i % 3 != 0 for i in range(16)]
    assert not numpy(residual.value).any()


@ON_BACKENDS
def test_what_is_large_is_above_the_bound(name):
    sizes = np.array([1.0] * 12 + [1.25, 1.3, 3.0, -4.0])
    world = World(Case((16,), ranks=1), name)
    world.e = [sizes]
    received = world.random_messages(1)
    received.scales.zero_()
    out, _ = averaged(world, received, 0, 0)
    least = ABOVE * np.abs(sizes).mean()
    assert 1.3 < least < 3
    _, large = unpacked(out)
    assert large[:16].tolist() == (np.abs(sizes) > least).tolist()
    assert_close(numpy(out.scales)[0], [(12 + 1.25 + 1.3) / 14, 3.5], SUMMED)


@ON_FUSED
@pytest.mark.parametrize("options", READERS.values(), ids=READERS.keys())
def test_readers_agree_with_the_reference(name, options):
    options = {"block_size": 32, "reply_bits": 2, **options}
    ours = outputs(Workload(NUMELS, device_of(name), **options), backend(name))
    theirs = outputs(Workload(NUMELS, **options), reference)
    assert_same(ours, theirs, half=options.get("dtype") == torch.float16)


@ON_BACKENDS
@pytest.mark.parametrize("options", READERS.values(), ids=READERS.keys())
def test_what_is_decoded(name, options):
    work = Workload(NUMELS, device_of(name), **{"block_size": 32, "reply_bits": 2, **options})
    work.passes(backend(name))["decode"].run()
    messages, size = work.replies(), work.layout.block_size
    bits = np.unpackbits(messages.bits.cpu().numpy(), axis=-1, bitorder="little").reshape(-1, 2, size)
    small, large = messages.scale_of_blocks().cpu().double().numpy().T[..., None]
    values = ((bits[:, 0] * 2.0 - 1) * np.where(bits[:, 1] == 1, large, small)).ravel()
    for first, numel, got in zip(work.layout.first, NUMELS, work.decoded().tensors, strict=True):
        wanted = values[first * size : first * size + numel]
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

"""quantize, average_codes, dequantize: the CPU's against the float64 oracle, every backend's with odd values."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.wire import MAGIC, NONFINITE
from onebit.kernels.passes import AverageCodes
from tests import oracle
from tests.kernels.cases import BF16, F32, GRID, HALF_PLACE, ON_BACKENDS, Case
from tests.kernels.compare import assert_close, assert_guards, frozen_bits, numpy
from tests.kernels.world import World
from tests.wire import contents

ELEMENTWISE = 1e-6  # a handful of fp32 roundings
BITS = pytest.mark.parametrize("bits", [4, 8])


def check_message(world, out, row, part, left, c, size):
    """One message, of a part of the space, and the residual it leaves, against the oracle's of c."""
    lengths, valid, bits = world.plan.lengths_in(part), world.plan.valid[part], world.form.bits
    expected, found = oracle.quantize(c, valid, lengths=lengths, bits=bits), contents(out, row, lengths)
    assert out.header[row].tolist() == [MAGIC - 1 + bits, 0, out.format.fingerprint, world.layout.shard_blocks]
    sure = expected.sure(ELEMENTWISE * size)
    assert sure[valid].sum() >= 0.98 * valid.sum() - 1
    assert (found.bits == expected.bits)[sure].all()
    assert not found.bits[~valid].any() and not left[~valid].any()
    there = np.concatenate([np.arange(-(-world.layout.block_size // 256)) * 256 < length for length in lengths])
    assert_close(found.scales[there], expected.scales, ELEMENTWISE)
    assert not found.scales[~there].any()
    assert np.abs(found.bits).max() <= 2 ** (bits - 1) - 1
    within = HALF_PLACE[BF16] * np.abs(expected.scale) / 2 + ELEMENTWISE * (size + np.abs(found.values))
    assert (np.abs(found.values + left - expected.c) <= within).all()  # nothing is lost


@BITS
@GRID
def test_quantize_agrees_with_the_oracle(case, bits):
    world = World(case, bits=bits)
    before = np.concatenate([np.nan_to_num(numpy(residual.value)) for residual in world.residuals])
    g = world.plan.flatten(world.scaled_g)
    world.run("quantize")
    assert_guards(world.grads)
    for chunk in world.chunks():
        left = numpy(world.residuals[chunk.index].value)
        for rank in range(case.ranks):
            part, row = world.plan.shard(chunk.index, rank), chunk.rows.start + rank
            own = left[part.start - chunk.part.start : part.stop - chunk.part.start]
            size = np.abs(g[part]) + np.abs(before[part])
            check_message(world, world.sent, row, part, own, g[part] + before[part], size)


@BITS
@GRID
def test_average_of_codes_agrees_with_the_oracle(case, bits):
    world = World(case, bits=bits)
    for row, part in enumerate(world.plan.shards()):
        chunk, rank = divmod(row, case.ranks)
        received, lengths = world.received(chunk, rank), world.plan.lengths_in(part)
        values = np.stack([contents(received, i, lengths).values for i in range(case.ranks)])
        before = np.nan_to_num(numpy(world.residual(world.layout.shard(chunk, rank), row).value))
        out, residual = world.average(chunk, rank, received)
        size = np.abs(values).sum(0) + np.abs(before)
        check_message(world, out, 0, part, numpy(residual.value), values.mean(0) + before, size)


@BITS
@GRID
def test_dequantize_writes_each_code_times_its_scale_and_nothing_else(case, bits):
    world = World(case, bits=bits)
    values = world.replied()
    for chunk in world.chunks():
        before = world.plan.flatten([numpy(t) for t in world.params.tensors])
        world.run("dequantize", chunk.index)
        after = world.plan.flatten([numpy(t) for t in world.params.tensors])
        before[chunk.part] = after[chunk.part]
        assert (after == before).all()
    size = 2.0 ** (bits - 1) * 2  # of a code times a scale
    for tensor, value in zip(world.params.tensors, values, strict=True):
        assert_close(numpy(tensor), value, ELEMENTWISE + HALF_PLACE[case.param], size if case.senders > 1 else 0.0)
    assert_guards(world.params)


@ON_BACKENDS
@BITS
def test_a_flag_goes_into_every_header_decodes_to_nan_and_nothing_else_changes(name, bits):
    world = World(Case((300, 5), 64, ranks=3), name, bits=bits)
    world.flags.fill_(NONFINITE)
    before = frozen_bits(world.residuals)
    world.run("quantize")
    assert frozen_bits(world.residuals) == before
    assert world.sent.flags.tolist() == [NONFINITE] * 3 and bool((world.sent.payload == 0xFF).all())
    received = world.received(0, 1)
    received.flags[2] = NONFINITE
    out, residual = world.average(0, 1, received)
    assert frozen_bits(residual) == frozen_bits(world.residual(world.layout.shard(0, 1), 1))
    assert out.flags.tolist() == [NONFINITE] and bool((out.payload == 0xFF).all())
    world.replies.flags.fill_(NONFINITE)
    world.run("dequantize")
    assert all(np.isnan(numpy(tensor)).all() for tensor in world.params.tensors)
    assert_guards(world.params)


@ON_BACKENDS
@BITS
def test_odd_values_have_a_scale_and_a_code(name, bits):
    """Zeros of either sign, values next to nothing, ties, and the largest that are finite to us. Groups do not meet."""
    most = 2 ** (bits - 1) - 1
    for values, expected in (
        ([0.0, -0.0] * 150, ([0.0, 0.0], 0)),
        ([2.0**-101, -(2.0**-120)] * 150, ([0.0, 0.0], 0)),
        ([2.0**-100] * 300, ([2.0**-100 / most] * 2, most)),
        ([2.0**40, -(2.0**40)] * 150, ([2.0**40 / most] * 2, most)),
        ([most] * 256 + [0.5, 1.5, -2.5], ([1.0, 2.5 / most], None)),
        ([most, 0.5, 1.5, -2.5], ([1.0], [most, 0, 2, -2])),  # ties to even
    ):
        world = World(Case((len(values),), 512, momentum="none"), name, bits=bits)
        world.e = [np.zeros(len(values))]
        grads = world.pointers([np.array(values, np.float64)], F32, "gradient")
        world.run("quantize", grad=grads, hyper=hyper_table([Hyper()], world.device))
        found = contents(world.sent, 0, world.plan.lengths)
        scales, codes = expected
        assert_close(found.scales[: len(scales)], scales, ELEMENTWISE)
        if codes is not None:
            own = found.bits[: len(values)]
            assert (np.abs(own) == codes).all() if isinstance(codes, int) else own.tolist() == codes
        left = numpy(world.residuals[0].value)[: len(values)]
        assert_close(found.values[: len(values)] + left, values, HALF_PLACE[BF16])
        assert np.isfinite(left).all()


@ON_BACKENDS
@BITS
def test_residuals_are_kept_as_they_were(name, bits):
    world = World(Case((300, 7), 96, ranks=2), name, bits=bits)
    residual = world.residuals[0]
    before = torch.full_like(residual.value, torch.nan)
    world.residuals[0] = replace(residual, before=before)
    was = frozen_bits(residual.value)
    world.run("quantize")
    assert frozen_bits(before) == was != frozen_bits(residual.value)
    shard, received = world.layout.shard(0, 1), world.received(0, 1)
    residual = world.residual(shard, 1)
    was, before = frozen_bits(residual.value), torch.full_like(residual.value, torch.nan)
    world.passes.run(AverageCodes(shard, received, replace(residual, before=before), world.fresh(1)))
    assert frozen_bits(before) == was != frozen_bits(residual.value)

"""compress, average, decode, restore: the CPU's against the float64 oracle, and on every backend what odd values do."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.kept import Kept
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import MAGIC, NONFINITE, Messages
from onebit.kernels.passes import Decode
from onebit.kernels.tuning.workload import Workload
from tests import oracle
from tests.kernels.cases import BF16, F32, GRID, HALF_PLACE, MASKED, ON_BACKENDS, SCALES, Case, backend, device_of
from tests.kernels.compare import assert_close, assert_guards, frozen_bits, numpy, stored
from tests.kernels.world import World
from tests.wire import contents, values_of

ELEMENTWISE = 1e-6  # a handful of fp32 roundings
SUMMED = 4e-6  # and one more for each level of a sum
FORMS = pytest.mark.parametrize("scale, norm", [
    ("block", "l1"), ("block", "l2"), ("block", "unbiased"), ("tensor", "l1"), ("tensor", "l2"),
])  # fmt: skip


def expected_c(world: World) -> tuple[np.ndarray, np.ndarray]:
    """c of the whole space in float64, and the size of what was added up to it. gamma scales what is added to m."""
    m = np.zeros(world.elements)
    if world.momentum is not None:
        packed = isinstance(world.momentum, Messages)
        m = values_of(world.momentum, world.plan) if packed else world.plan.flatten(world.m)
    g = [None if g is None else gamma * g for gamma, g in zip(world.gamma, world.scaled_g, strict=True)]
    y = world.plan.flatten(oracle.local_momentum(g, world.plan.unflatten(m), world.hypers))
    e = before = world.plan.flatten(world.e)
    if world.case.scale == "tensor":
        e = e - oracle.sigma(e) * np.repeat(world.scales64, [part.stop - part.start for part in world.plan.shards()])
    size = np.nan_to_num(np.abs(world.plan.flatten(g)) + np.abs(m) + np.abs(before) + np.abs(e))
    return np.where(world.counted, y + e, 0.0), size


def check_message(world, out, row, part, left, scale, c, size):
    """One message, of a part of the space, and the residual it leaves (`left`, `scale`), against the oracle's of c."""
    lengths, counts = world.plan.lengths_in(part), world.counted[part]
    expected = oracle.compress(c, counts, lengths=lengths, scale=out.format.scale, norm=out.format.norm)
    found, sure = contents(out, row, lengths), expected.sure(ELEMENTWISE * size)
    assert out.header[row].tolist() == [MAGIC, 0, out.format.fingerprint, world.layout.shard_blocks]
    assert sure.sum() >= 0.99 * counts.sum()
    assert (found.bits == expected.bits)[sure].all()
    assert not found.bits[~counts].any()
    assert_close(found.scales, expected.scales, SUMMED)
    assert not left[~counts].any()
    reach = size + np.abs(expected.decoded)
    assert_close(left[sure], (expected.error if scale is None else c)[sure], SUMMED, reach[sure])
    if scale is not None:
        assert_close(scale, expected.scales[0], SUMMED)
    else:  # nothing is lost
        assert_close((found.values + left)[counts], c[counts], SUMMED, (size + np.abs(found.values))[counts])


@MASKED
@GRID
def test_compress_agrees_with_the_oracle(case, masked):
    world = World(case, masked=masked)
    c, size = expected_c(world)
    world.run("compress")
    assert_guards(world.grads)
    for chunk in world.chunks():
        residual = world.residuals[chunk.index]
        for rank in range(case.ranks):
            part, row = world.plan.shard(chunk.index, rank), chunk.rows.start + rank
            left = numpy(residual.value)[part.start - chunk.part.start : part.stop - chunk.part.start]
            scale = None if residual.scale is None else float(residual.scale[rank])
            check_message(world, world.sent, row, part, left, scale, c[part], size[part])


@MASKED
@GRID
def test_average_agrees_with_the_oracle(case, masked):
    world = World(case, masked=masked)
    for row, part in enumerate(world.plan.shards()):
        chunk, rank = divmod(row, case.ranks)
        received, lengths = world.received(chunk, rank), world.plan.lengths_in(part)
        values = np.stack([contents(received, i, lengths).values for i in range(case.ranks)])
        e = world.plan.flatten(world.e)[part]
        if case.scale == "tensor":
            e = e - oracle.sigma(e) * world.scales64[row]
        out, residual = world.average(chunk, rank, received)
        scale = None if residual.scale is None else float(residual.scale[0])
        c = np.where(world.counted[part], values.mean(0) + e, 0.0)
        size = np.nan_to_num(np.abs(values).sum(0) + np.abs(e) + world.scales64[row])
        check_message(world, out, 0, part, numpy(residual.value), scale, c, size)


@GRID
def test_decode_writes_each_sign_times_its_scale_and_nothing_else(case):
    world = World(case)
    values = world.replied()
    for chunk in world.chunks():
        before = world.plan.flatten([numpy(t) for t in world.params.tensors])
        world.run("decode", chunk.index)
        after = world.plan.flatten([numpy(t) for t in world.params.tensors])
        before[chunk.part] = after[chunk.part]
        assert (after == before).all()
    for tensor, value in zip(world.params.tensors, values, strict=True):
        if case.senders == 1:
            assert numpy(tensor).tolist() == stored(value, case.param, "cpu").tolist()
        else:
            assert_close(numpy(tensor), value, ELEMENTWISE + HALF_PLACE[case.param], 1)
    assert_guards(world.params)


@ON_BACKENDS
@SCALES
def test_a_set_flag_goes_into_every_header_and_nothing_else_changes(name, scale):
    """Whatever else a flagged message holds, NaN included."""
    world = World(Case((100, 5), ranks=3, scale=scale, momentum="packed"), name)
    world.flags.fill_(NONFINITE)
    before = frozen_bits(world.residuals)
    world.run("compress")
    assert frozen_bits(world.residuals) == before
    for flagged in range(3):
        received = world.received(0, 1)
        received.flags[flagged] = NONFINITE
        received.scales(flagged, world.layout.shard(0, 1)).fill_(float("nan"))
        out, residual = world.average(0, 1, received)
        assert frozen_bits(residual) == frozen_bits(world.residual(world.layout.shard(0, 1), 1))
        assert out.header.tolist() == [[MAGIC, NONFINITE, out.format.fingerprint, world.layout.shard_blocks]]
        assert bool((out.buffer[:, 16:] == 0xFF).all())
    assert world.sent.header.tolist() == [[MAGIC, NONFINITE, world.form.fingerprint, world.layout.shard_blocks]] * 3
    assert bool((world.sent.buffer[:, 16:] == 0xFF).all())


@ON_BACKENDS
@FORMS
def test_zeros_of_either_sign_are_positive_and_give_scale_zero_and_no_nan(name, scale, norm):
    world = World(Case((40, 3), ranks=2, scale=scale, norm=norm, momentum="none"), name)
    world.g = world.e = [np.resize([0.0, -0.0, -0.0], n) for n in (40, 3)]
    world.scales64 = np.zeros(2)
    world.run("compress")
    assert not bool(world.sent.scales_of(world.layout.all()).any())
    assert not numpy(world.residuals[0].value)[world.plan.valid].any()
    assert np.unpackbits(world.sent.bits_of(world.layout.all())[0].cpu().numpy()).sum() == 43


@ON_BACKENDS
def test_a_flagged_message_decodes_to_nan_and_a_tensor_that_is_none_is_passed_over(name):
    """NaN, as an uncompressed mean would have."""
    world = World(Case((64, 40, 33), ranks=3, param=BF16, senders=2), name)
    world.replies.flags[1] = NONFINITE
    kept = world.params.tensors[1].clone()
    out = Pointers(world.layout, world.device, BF16, "parameter")
    out.bind_tensors([world.params.tensors[0], None, world.params.tensors[2]])
    world.passes.run(Decode(world.layout.all(), world.replies, out))
    assert np.isnan(numpy(world.params.tensors[0])).all()
    assert torch.equal(world.params.tensors[1], kept)
    assert_close(numpy(world.params.tensors[2]), world.replied()[2], ELEMENTWISE + world.half_place, 1)
    assert_guards(world.params)


@ON_BACKENDS
@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": "tensor"}, {"block_size": 96}])
def test_compress_and_average_keep_residuals_as_they_were(name, options, flagged):
    kept, plain = (Workload([300, 7, 2049], device_of(name), ranks=2, kept=k, **options) for k in (True, False))
    before = {r: getattr(kept, r).value.clone() for r in ("residual", "server_residual")}
    for work in (kept, plain):
        if flagged:
            work.flags.fill_(1)
            work.received.flags[1] = 1
        work.passes(backend(name))["compress"].run()
        work.passes(backend(name))["average"].run()
    for residual, was in before.items():
        written = getattr(kept, residual)
        assert torch.equal(written.before, was)
        assert torch.equal(written.value, was) == flagged
        assert torch.equal(written.value, getattr(plain, residual).value)
    assert torch.equal(kept.sent.buffer, plain.sent.buffer)
    assert torch.equal(kept.reply.buffer, plain.reply.buffer)


@ON_BACKENDS
@pytest.mark.parametrize("dtype, count", [
    (torch.int32, 4), (torch.uint8, 1000), (torch.float32, 8192), (torch.float32, 20_001), (torch.uint8, 20_004),
])  # fmt: skip
def test_restore_copies_bits_where_the_flag_is_set(name, dtype, count):
    """It copies what is not a number, too, and several tensors at once."""
    whole = (torch.arange(count + 8, dtype=torch.int64, device=device_of(name)) % 100).to(dtype)
    now, kept = whole[4:-4], torch.full((count,), 77, dtype=dtype, device=whole.device)
    if dtype == torch.float32:
        kept.view(torch.int32)[::7] = 0x7FC01234
    expected, flags = frozen_bits(whole), torch.zeros(1, dtype=torch.int32, device=whole.device)
    others = [(torch.zeros(n, device=whole.device), torch.ones(n, device=whole.device)) for n in (3000, 0, 5)]
    all_kept = Kept([others[0], others[1], (now, kept), others[2]])
    backend(name).restore(all_kept, flags)
    assert frozen_bits(whole) == expected and not any(bool(other.any()) for other, _ in others)
    flags.fill_(1)
    outside = frozen_bits(whole[:4], whole[-4:])
    backend(name).restore(all_kept, flags)
    assert frozen_bits(now) == frozen_bits(kept) and all(bool(other.all()) for other, _ in others)
    assert frozen_bits(whole[:4], whole[-4:]) == outside


VALUES = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=100).map(
    lambda values: np.array(values, np.float32)
)


class Compressor(World):
    """compress with beta1 = 0 and no momentum, so that c is the gradient and the residual alone."""

    def __init__(self, name: str, numel: int, scale: str = "block", norm: str = "l1", block_size: int = 32) -> None:
        super().__init__(Case((numel,), block_size, scale=scale, norm=norm, momentum="none"), name)
        self.e, self.scales64 = [np.zeros(numel)], np.zeros(1)

    def __call__(self, values: np.ndarray, live: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
        """What was sent, decoded, and what was left out."""
        grads, hyper = self.pointers([values], F32, "gradient"), hyper_table([Hyper()], self.device)
        self.run("compress", grad=grads, hyper=hyper, live=None if live is None else live.to(self.device))
        left = self.residuals[0].value.cpu().numpy()[: len(values)]
        return contents(self.sent, 0, self.plan.lengths).values[: len(values)].astype(np.float32), left


@ON_BACKENDS
@given(VALUES)
@settings(max_examples=20)
def test_the_residual_is_c_minus_what_was_sent_in_one_fp32_subtraction(name, values):
    """It is so one step later with a tensor scale."""
    sent, left = Compressor(name, len(values))(values)
    assert np.array_equal(left, values - sent)
    tensor = Compressor(name, len(values), "tensor")
    sent, left = tensor(values)
    assert np.array_equal(left, values)
    _, left = tensor(np.zeros_like(values))
    assert np.array_equal(left, values - sent)


@ON_BACKENDS
def test_an_unbiased_scale_is_bounded_where_few_elements_are_not_zero(name):
    """||c||_2^2 / ||c||_1 would be 3: what all 32 would be moved by. The bound is of what takes part: half a block."""
    values = np.zeros(64, np.float32)
    values[[5, 50]] = 3.0, 100.0
    live = torch.from_numpy(np.packbits(np.arange(64) < 48, bitorder="little"))
    for extra, mask, second in ((0, None, 2 * 100 / np.sqrt(32)), (0, live, 0.0), (3, live, 2 * 3 / np.sqrt(16))):
        values[33] = extra
        compress = Compressor(name, 64, norm="unbiased")
        assert np.isfinite(compress(values, mask)).all()
        scales = compress.sent.scales(0, compress.layout.all()).tolist()
        assert scales == [pytest.approx(2 * 3 / np.sqrt(32)), pytest.approx(second)]

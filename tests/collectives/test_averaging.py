"""The uncompressed mean, and the comparison of parameters, over real ranks."""

import contextlib
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch

from onebit.collectives import averaging
from onebit.collectives.agreement import agree_on_values
from onebit.collectives.averaging import average_
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import LocalTransport
from onebit.kernels.data.layout import Layout
from tests.onebit.runs import on_ranks
from tests.ranks import group, run_ranks

SCALES = (4.0, 1024.0, 0.5)
SHAPES = ((3, 5), (400,), (), (0,), (17, 2), (1,))
NUMEL = 15 + 400 + 1 + 34 + 1
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def tensors(rank, dtype=F32):
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=source).to(dtype) for shape in SHAPES]


@dataclass(frozen=True)
class Mean:
    """An average to take."""

    dtype: torch.dtype = F32
    bucket_bytes: int = 2**20
    scales: tuple[float, ...] = (1.0,) * 4  # the ranks'
    wire: torch.dtype | None = None


def averaged(rank, size, means):
    """Each, in the ranks' common scale, and the bytes that were to be added up."""
    found, transport = [], transport_for(group())
    for mean in means:
        scale = mean.scales[rank]
        given = [t * scale for t in tensors(rank, mean.dtype)]
        given[4] = given[4].t()  # not contiguous
        factor = torch.tensor([1 / scale]) if mean.scales == SCALES else None
        buckets = patch.object(averaging, "BUCKET_BYTES", mean.bucket_bytes)
        with buckets, patch.object(transport, "all_sum", wraps=transport.all_sum) as add:
            average_(given, transport, factor, wire_dtype=mean.wire)
        sent = sum(call.args[0].nbytes for call in add.call_args_list)
        found.append(([(t / scale).double().numpy() for t in given], sent))
    return found


def check(size, means):
    """Every rank has each mean, the same. The bytes of each."""
    found = run_ranks(size, averaged, means)
    for mean, ranks in zip(means, zip(*found, strict=True), strict=True):
        rounding = 1e-6 if mean.dtype == F32 and mean.wire is None else 2e-2
        given = [[t.double().numpy() for t in tensors(rank, mean.dtype)] for rank in range(size)]
        for p, of_ranks in enumerate(zip(*given, strict=True)):
            expected = np.mean(of_ranks, 0)
            for values, _ in ranks:
                close = {"rtol": rounding, "atol": rounding}
                np.testing.assert_allclose(values[p], expected.T if p == 4 else expected, **close)
                assert values[p].tobytes() == ranks[0][0][p].tobytes()
    return [sent for _, sent in found[0]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_mean_over_ranks(size):
    """Buckets hold a tensor, a few, or all; ranks with scales of their own divide by their own."""
    means = [Mean(dtype, nbytes) for dtype in (F32, BF16) for nbytes in (1, 100, 2**20)]
    check(size, means + [Mean(bucket_bytes=100, scales=SCALES)] * (size == 3))


@pytest.mark.parametrize("dtype, wire, sizes", [
    (F32, BF16, [4, 4, 2, 2]), (F32, F16, [4, 4, 2, 2]), (BF16, F16, [2, 4, 2, 4])
])  # fmt: skip
def test_a_narrower_dtype_travels_instead(dtype, wire, sizes):
    """Half the bytes, and the mean within its rounding; what is as narrow already travels as it is, scaled in fp32."""
    means = [Mean(dtype, scales=scales, wire=via) for via in (None, wire) for scales in (Mean.scales, SCALES)]
    assert check(3, means) == [each * NUMEL for each in sizes]


class Adding(LocalTransport):
    """Two ranks with equal values."""

    size = 2

    def __init__(self):
        self.given, self.under_way, self.most = [], 0, 0

    def all_sum(self, values, phase):
        self.given.append(values.clone())
        values.mul_(2)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return self

    def wait(self):
        self.under_way -= 1


def test_tensors_of_two_dtypes_travel_apart_two_buckets_at_a_time_and_are_divided_before():
    """A sum of halves could leave their range."""
    transport, given = Adding(), [torch.ones(3), torch.ones(2).bfloat16(), torch.ones(4).bfloat16(), torch.ones(1)]
    average_(given, transport)
    assert [(t.dtype, t.tolist()) for t in transport.given] == [(F32, 3 * [0.5]), (BF16, 6 * [0.5]), (F32, [0.5])]
    assert all(bool((t == 1).all()) for t in given) and (transport.most, transport.under_way) == (2, 0)


@on_ranks(2)
def test_what_has_16_bits_keeps_what_a_scale_has_saved(rank):
    """A gradient whose true size float16 does not hold, as GradScaler has it."""
    given = torch.tensor([1e-8 * 2.0**16]).half()
    average_([given], transport_for(group()), torch.tensor([2.0**-16]), wire_dtype=F16)
    assert float(given) == pytest.approx(1e-8 * 2.0**16, rel=1e-3)


ODD = [  # where (rank, tensor, element) differ, and what is said
    ([], ""),
    ([(1, 4, 33)], "number 4 has other values on rank 1 than"),
    ([(0, 1, 0)], "number 1 has other values on rank 0 than"),
    ([(2, 1, 399), (2, 0, 3)], "number 0 has other values on rank 2 than on the rest, and so have 1 more"),
]


@on_ranks(3)
def test_a_difference_in_one_element_is_an_error_on_every_rank(rank):
    for odd, says in ODD:
        given = tensors(7)
        for who, tensor, element in odd:
            given[tensor].view(-1)[element] += 1e-6 * (who == rank)
        with pytest.raises(ValueError, match=says) if odd else contextlib.nullcontext():
            agree_on_values(transport_for(group()), given, lambda i: f"number {i}")


@on_ranks(2)
def test_of_two_ranks_that_differ_rank_0_is_right(rank):
    for its in (0.0, 2.0):  # on rank 1: a smaller checksum than that of ones, and a larger one
        with pytest.raises(ValueError, match="number 0 has other values on rank 1 than on the rest"):
            agree_on_values(transport_for(group()), [torch.full((3,), its if rank else 1.0)], lambda i: f"number {i}")


def test_a_slice_is_cut_into_parts_of_nearly_equal_size():
    layout = Layout([5000, 63, 3000], block_size=64)
    (parts,) = averaging.buckets_of_slices([layout.all()], 1000)
    assert sum(part.elements for part in parts) == layout.elements
    assert all(abs(part.elements - layout.elements / 9) <= 2 * 64 for part in parts) and len(parts) == 9

"""The uncompressed mean, and the comparison of parameters, over real ranks."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from onebit.collectives.agreement import agree_on_values
from onebit.collectives.averaging import average_
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import Done, LocalTransport
from tests.collectives.work import bare_transport, error_of
from tests.ranks import group, run_ranks

SCALES = (4.0, 1024.0, 0.5)
SHAPES = ((3, 5), (400,), (), (0,), (17, 2), (1,))


def tensors(rank: int, dtype: str) -> list[Tensor]:
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=source).to(getattr(torch, dtype)) for shape in SHAPES]


@dataclass(frozen=True)
class Mean:
    """An average to take."""

    dtype: str = "float32"
    bucket_bytes: int = 2**20
    scales: tuple[float, ...] | None = None  # the ranks'
    wire: str | None = None


def averaged(rank: int, size: int, means: list[Mean]) -> list[tuple[list[np.ndarray], int]]:
    """Each, in the ranks' common scale, and the bytes that were to be added up."""
    return [take(each, rank) for each in means]


def take(mean: Mean, rank: int) -> tuple[list[np.ndarray], int]:
    scale = mean.scales[rank] if mean.scales else 1.0
    given = [t * scale for t in tensors(rank, mean.dtype)]
    factor = torch.tensor([1 / scale]) if mean.scales else None
    given[4] = given[4].t()  # not contiguous
    transport = transport_for(group())
    wire = mean.wire and getattr(torch, mean.wire)
    with patch.object(transport, "all_sum", wraps=transport.all_sum) as add:
        average_(given, transport, factor, bucket_bytes=mean.bucket_bytes, wire_dtype=wire)
    sent = sum(call.args[0].nbytes for call in add.call_args_list)
    return [(t / scale).double().numpy() for t in given], sent


def check(size: int, means: list[Mean]) -> list[int]:
    """Every rank has each mean, the same. The bytes of each."""
    found = run_ranks(size, averaged, means)
    for mean, ranks in zip(means, zip(*found, strict=True), strict=True):
        rounding = 1e-6 if mean.dtype == "float32" and mean.wire is None else 2e-2
        for p in range(len(SHAPES)):
            expected = np.mean([tensors(rank, mean.dtype)[p].double().numpy() for rank in range(size)], 0)
            for values, _ in ranks:
                close = {"rtol": rounding, "atol": rounding}
                np.testing.assert_allclose(values[p], expected.T if p == 4 else expected, **close)
                assert values[p].tobytes() == ranks[0][0][p].tobytes()
    return [sent for _, sent in found[0]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_mean_over_ranks(size: int) -> None:
    """In buckets of a tensor, of a few, and of all."""
    check(size, [Mean(dtype, nbytes) for dtype in ("float32", "bfloat16") for nbytes in (1, 100, 2**20)])


def test_ranks_with_scales_of_their_own_get_the_mean_in_their_own() -> None:
    check(3, [Mean(bucket_bytes=100, scales=SCALES)])


@pytest.mark.parametrize(("dtype", "wire"), [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16")])
def test_a_narrower_dtype_travels_instead(dtype: str, wire: str) -> None:
    """Half the bytes, and the mean within its rounding; what is as narrow already travels as it is, scaled in fp32."""
    numel = sum(t.numel() for t in tensors(0, dtype))
    means = [Mean(dtype, scales=scales, wire=via) for via in (None, wire) for scales in (None, SCALES)]
    sizes = [4, 4, 2, 2] if dtype == "float32" else [2, 4, 2, 4]
    assert check(3, means) == [each * numel for each in sizes]


class Dividing(LocalTransport):
    """Two ranks with equal values, and a collective for means."""

    size = 2

    def __init__(self) -> None:
        self.given: list[tuple[str, Tensor]] = []

    def all_mean(self, values: Tensor, phase: str) -> Done:
        self.given.append(("mean", values.clone()))
        return Done()

    def all_sum(self, values: Tensor, phase: str) -> Done:
        self.given.append(("sum", values.clone()))
        values.mul_(2)
        return Done()


@pytest.mark.parametrize(
    ("dtype", "wire", "called"), [("float32", None, "mean"), ("float32", "bfloat16", "sum"), ("bfloat16", None, "sum")]
)
def test_what_a_collective_divides_is_not_divided_before(dtype: str, wire: str | None, called: str) -> None:
    """Only fp32: a 1 / ranks of 16 bits is not exact, and sums of halves could leave their range."""
    transport, given = Dividing(), tensors(0, dtype)
    before = [t.clone() for t in given]
    average_(given, transport, bucket_bytes=100, wire_dtype=wire and getattr(torch, wire))
    assert {kind for kind, _ in transport.given} == {called}
    if wire is None:
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    sent = torch.cat([t.float() for _, t in transport.given])
    whole = torch.cat([t.reshape(-1) for t in before]).to(transport.given[0][1].dtype).float()
    assert torch.equal(sent, whole if called == "mean" else whole / 2)


def test_tensors_of_two_dtypes_travel_apart() -> None:
    transport, given = Dividing(), [torch.ones(3), torch.ones(2).bfloat16(), torch.ones(4).bfloat16(), torch.ones(1)]
    average_(given, transport)
    assert [(kind, t.dtype, t.numel()) for kind, t in transport.given] == [
        ("mean", torch.float32, 3), ("sum", torch.bfloat16, 6), ("mean", torch.float32, 1)
    ]  # fmt: skip


def test_nccl_has_a_collective_for_means(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda values, op, group, async_op: asked.append(op) or Done())
    transport = bare_transport({"cpu": "nccl"})
    work = transport.all_mean(torch.ones(3), "test")
    assert work is not None and asked == [dist.ReduceOp.AVG]
    transport.backends = {"cpu": "gloo"}
    assert transport.all_mean(torch.ones(3), "test") is None and len(asked) == 1


def small_and_scaled(rank: int, size: int) -> float:
    """A gradient whose true size float16 does not hold, as GradScaler has it."""
    given = torch.tensor([1e-8 * 2.0**16]).half()
    average_([given], transport_for(group()), torch.tensor([2.0**-16]), wire_dtype=torch.float16)
    return float(given)


def test_what_has_16_bits_keeps_what_a_scale_has_saved() -> None:
    assert run_ranks(2, small_and_scaled) == [pytest.approx(1e-8 * 2.0**16, rel=1e-3)] * 2


ODD: list[tuple[list[tuple[int, int, int]], str]] = [
    ([], ""),
    ([(1, 4, 33)], "number 4 has other values on rank 1 than"),
    ([(0, 1, 0)], "number 1 has other values on rank 0 than"),
    ([(2, 1, 399), (2, 0, 3)], "number 0 has other values on rank 2 than on the rest, and so have 1 more"),
]


def compared(rank: int, size: int) -> list[str]:
    """The errors of this rank where (rank, tensor, element) differ."""
    errors = []
    for odd, _ in ODD:
        given = tensors(7, "float32")
        for who, tensor, element in odd:
            if who == rank:
                given[tensor].view(-1)[element] += 1e-6
        text: list[str] = []
        with error_of(text):
            agree_on_values(transport_for(group()), given, lambda i: f"number {i}")
        errors.append("".join(text))
    return errors


def test_a_difference_in_one_element_is_an_error_on_every_rank() -> None:
    for texts in run_ranks(3, compared):
        for text, (odd, says) in zip(texts, ODD, strict=True):
            assert says in text and bool(text) == bool(odd)
    for texts in run_ranks(2, compared):
        assert "rank 1" in texts[2]  # of two that differ

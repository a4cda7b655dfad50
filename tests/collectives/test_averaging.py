"""The uncompressed mean, and the comparison of parameters, over real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from onebit.collectives.agreement import agree_on_values, checksums
from onebit.collectives.averaging import average_
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import Done, LocalTransport
from onebit.collectives.transport.torch import TorchTransport
from tests.ranks import group, run_ranks

SHAPES = ((3, 5), (400,), (), (0,), (17, 2), (1,))


def tensors(rank: int, dtype: str) -> list[Tensor]:
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=source).to(getattr(torch, dtype)) for shape in SHAPES]


def averaged(
    rank: int, size: int, dtype: str, bucket_bytes: int, scales: list[float] | None, wire: str | None = None
) -> tuple[list[np.ndarray], int]:
    """The means, in the ranks' common scale, and the bytes that were to be added up."""
    given = tensors(rank, dtype)
    factor = None
    if scales is not None:
        given = [t * scales[rank] for t in given]
        factor = torch.tensor([1 / scales[rank]])
    given[4] = given[4].t()  # not contiguous
    transport = transport_for(group())
    sums = []
    with pytest.MonkeyPatch.context() as patch:
        add = transport.all_sum
        patch.setattr(transport, "all_sum", lambda flat, phase: sums.append(flat.nbytes) or add(flat, phase))
        average_(given, transport, factor, bucket_bytes=bucket_bytes, wire_dtype=wire and getattr(torch, wire))
    return [(t / (scales[rank] if scales else 1)).double().numpy() for t in given], sum(sums)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
def test_the_mean_over_ranks(size: int, dtype: str, bucket_bytes: int) -> None:
    found = run_ranks(size, averaged, dtype, bucket_bytes, None)
    check(found, size, dtype)


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


def test_nccl_has_a_collective_for_means(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda values, op, group, async_op: asked.append(op) or Done())
    transport = TorchTransport.__new__(TorchTransport)
    transport.group, transport.rank, transport.size, transport.name = None, 0, 2, "nccl"
    transport.backends = {"cpu": "nccl"}
    work = transport.all_mean(torch.ones(3), "test")
    assert work is not None and asked == [dist.ReduceOp.AVG]
    transport.backends = {"cpu": "gloo"}
    assert transport.all_mean(torch.ones(3), "test") is None and len(asked) == 1


def test_ranks_with_scales_of_their_own_get_the_mean_in_their_own() -> None:
    found = run_ranks(3, averaged, "float32", 100, [4.0, 1024.0, 0.5])
    check(found, 3, "float32")


@pytest.mark.parametrize(("dtype", "wire"), [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16")])
@pytest.mark.parametrize("scales", [None, [4.0, 1024.0, 0.5]])
def test_a_narrower_dtype_travels_instead(dtype: str, wire: str, scales: list[float] | None) -> None:
    """Half the bytes, and the mean within its rounding; what is as narrow already travels as it is."""
    found = run_ranks(3, averaged, dtype, 2**20, scales, wire)
    check(found, 3, dtype, wire)
    for (means, sent), (_, as_it_is) in zip(found, run_ranks(3, averaged, dtype, 2**20, scales), strict=True):
        usual = 4 if dtype == "float32" or scales else 2
        assert as_it_is == usual * sum(m.size for m in means)
        assert sent == (2 if dtype == "float32" else usual) * sum(m.size for m in means)


def small_and_scaled(rank: int, size: int) -> float:
    """A gradient whose true size float16 does not hold, as GradScaler has it."""
    given = torch.tensor([1e-8 * 2.0**16]).half()
    average_([given], transport_for(group()), torch.tensor([2.0**-16]), wire_dtype=torch.float16)
    return float(given)


def test_what_has_16_bits_keeps_what_a_scale_has_saved() -> None:
    assert run_ranks(2, small_and_scaled) == [pytest.approx(1e-8 * 2.0**16, rel=1e-3)] * 2


def check(answers: list[tuple[list[np.ndarray], int]], size: int, dtype: str, wire: str | None = None) -> None:
    rounding = 1e-6 if dtype == "float32" and wire is None else 2e-2
    found = [means for means, _ in answers]
    for p in range(len(SHAPES)):
        mean = np.mean([tensors(rank, dtype)[p].double().numpy() for rank in range(size)], 0)
        for one in found:
            np.testing.assert_allclose(one[p], mean.T if p == 4 else mean, rtol=rounding, atol=rounding)
            assert one[p].tobytes() == found[0][p].tobytes()


def compared(rank: int, size: int, other: list[tuple[int, int, int]]) -> str:
    """The error of this rank where (rank, tensor, element) differ."""
    given = tensors(7, "float32")
    for who, tensor, element in other:
        if who == rank:
            given[tensor].view(-1)[element] += 1e-6
    try:
        agree_on_values(transport_for(group()), given, lambda i: f"number {i}")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([], ""),
        ([(1, 4, 33)], "number 4 has other values on rank 1 than"),
        ([(0, 1, 0)], "number 1 has other values on rank 0 than"),
        ([(2, 1, 399), (2, 0, 3)], "number 0 has other values on rank 2 than on the rest, and so have 1 more"),
    ],
)
def test_a_difference_in_one_element_is_an_error_on_every_rank(other: list[Any], message: str) -> None:
    for text in run_ranks(3, compared, other):
        assert message in text
        assert bool(text) == bool(other)


def test_two_ranks_that_differ_blame_the_second() -> None:
    for text in run_ranks(2, compared, [(0, 1, 0)]):
        assert "rank 1" in text


def test_checksums_tell_places_apart() -> None:
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])
    assert len(set(checksums([a, b, -a, a.bfloat16(), a[:2]]).tolist())) == 5
    assert checksums([a])[0] == checksums([a.clone()])[0]
    agree_on_values(LocalTransport(), [a, b], str)

"""Models of many small parameters: what they send, and what is kept of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onebit import CompressedAllReduce
from tests.onebit.optim.test_memory import living
from tests.onebit.runs import build, kinds, on_ranks
from tests.ranks import group

LARGE = 1_000_000
BLOCK = 4 + 32 // 8  # bytes of a scale and of 32 elements


def part_of(kind: str, numels: list[int], **options: object) -> Any:
    """After the first steps."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(n)) for n in numels]
    optimizer = build(kind, params, freeze_step=1, **options)
    for _ in range(4):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    (part,) = optimizer.current.parts
    return part


@kinds
def test_what_5000_parameters_of_10_elements_send_and_keep(kind: str) -> None:
    """40 kB a message, where blocks of 2,048 were 1.3 MB and fp32 gradients are 200; kilobytes, not megabytes."""
    before = living()
    part = part_of(kind, [10] * 5000)
    assert part.state.layout.elements == 32 * 5000
    assert part.reducer.exchange.sent.buffer.nbytes <= 5000 * BLOCK + 40
    for p in part.state.params:
        before[p.untyped_storage().data_ptr()], p.grad = 0, None
    kept = sum(size for where, size in living().items() if where not in before)
    assert 32 * 5000 * 12 < kept < 32 * 5000 * 24


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_large_and_small_parameters_together_send_what_each_would(rank: int, size: int) -> None:
    """1 M elements in blocks of 2,048 and 100 of 10: 128 kB, one bit an element and 64 for each small one. With two
    ranks, of which each has all, a message is half of it."""
    expected = LARGE * (1 + 1 / 64) / 8 + 100 * BLOCK
    part = part_of("OneBitAdam", [LARGE, *[10] * 100], process_group=group())
    sent = int(part.reducer.exchange.sent.buffer.shape[1]) // (2 if size == 2 else 1)
    assert expected / size <= sent <= expected / size + 40 + 260 * (size > 2)


@on_ranks(2)
def test_an_all_reduce_of_many_small_tensors(rank: int) -> list[Tensor]:
    """Each tensor has a block and a scale of its own, so that equal elements come back as they are."""
    tensors = [torch.full((10,), float(rank + i)) for i in range(500)]
    average = CompressedAllReduce([10] * 500, chunks=1, process_group=group())
    average(tensors)
    assert average.exchange is not None and average.exchange.sent.buffer.nbytes <= 500 * BLOCK + 40
    assert all(torch.allclose(own, torch.full((10,), i + 0.5)) for i, own in enumerate(tensors))
    return tensors

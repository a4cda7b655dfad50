"""Models of many small parameters: blocks that fit them, and what a larger block_size is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from onebit import CompressedAllReduce
from onebit.kernels.data.layout import BLOCK_SIZE, Layout
from onebit.kernels.data.wire import Format, bytes_of_blocks, fitting_block_size
from tests.onebit.runs import build, kinds
from tests.ranks import group, run_ranks

MANY = [10] * 500


def stepped(kind: str, numels: list[int], steps: int = 2, gradient: Any = torch.ones_like, **options: object) -> Any:
    params = [nn.Parameter(torch.ones(n)) for n in numels]
    optimizer = build(kind, params, freeze_step=1, **options)
    for _ in range(steps):
        for p in params:
            p.grad = gradient(p)
        optimizer.step()
    return optimizer


def said(kind: str, caplog: pytest.LogCaptureFixture, numels: list[int], **options: object) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="onebit"):
        stepped(kind, numels, **options)
    return [record.getMessage() for record in caplog.records if "whole blocks" in record.getMessage()]


def sent(numels: list[int], block_size: int) -> int:
    """Bytes of a message, without its header and what aligns its parts."""
    form = Format.of(Layout(numels, block_size=block_size))
    return form.shard_blocks * (4 + form.block_bytes)


@pytest.mark.parametrize(
    ("numels", "size"),
    [
        (MANY, 32),
        ([60] * 800, 64),
        ([100] * 1000, 128),
        ([1000] * 1000, 1024),
        ([1_000_000, *MANY], 256),  # 159 kB, and 260 with blocks of 2,048
        ([10] * 100, BLOCK_SIZE),  # 26 kB: not worth it
        ([2049] * 100, BLOCK_SIZE),
        ([2049] * 1000, 256),
        ([2048] * 1000, BLOCK_SIZE),
        ([25_000_000, *MANY], BLOCK_SIZE),
        ([5], BLOCK_SIZE),
        ([0], BLOCK_SIZE),
    ],
    ids=lambda value: str(value)[:20],
)
def test_auto_is_the_size_of_the_fewest_bytes_where_that_is_worth_it(numels: list[int], size: int) -> None:
    assert fitting_block_size(numels) == size
    usual, least = (bytes_of_blocks(numels, s) for s in (BLOCK_SIZE, size))
    assert least == sent(numels, size) or sum(numels) == 0
    if size != BLOCK_SIZE:
        assert least == min(sent(numels, 2**k) for k in range(5, 12)) and usual > least + 2**16 and usual > 1.25 * least
    else:
        best = min(sent(numels, 2**k) for k in range(5, 12))
        assert usual <= best + max(2**16, best / 4) + 260


@kinds
def test_optimizers_take_blocks_that_fit(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """500 parameters of 10 elements: 4 kB a message and 32 elements each in memory, where it was 130 kB and 2,048."""
    optimizer = stepped(kind, MANY, steps=8)
    assert optimizer.setup.block_size == 32 and said(kind, caplog, MANY) == []
    (state,) = optimizer.current.states
    assert state.layout.elements == 32 * 500
    (reducer,) = (part.reducer for part in optimizer.current.parts)
    assert reducer.exchange.sent.buffer.nbytes < 4200


def test_a_group_that_is_added_before_the_freeze_counts() -> None:
    optimizer = build("OneBitAdam", [nn.Parameter(torch.ones(3000))], freeze_step=5)
    assert optimizer.setup.block_size == BLOCK_SIZE
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(10)) for _ in range(1000)]})
    for p in (p for each in optimizer.param_groups for p in each["params"]):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.setup.block_size == optimizer.current.states[0].layout.block_size == 32


def carried(optimizer: Any) -> list[torch.Tensor]:
    """Of each parameter what the next message is made of beside its gradient: beta1 m + e."""
    (part,) = optimizer.current.parts
    momentum = part.reducer.momentum()
    left_out = part.reducer.exchange.residuals["residual"].left_out()
    return [0.9 * m + part.state.cut(left_out, i) for i, m in enumerate(momentum)]


@kinds
def test_a_state_in_larger_blocks_goes_on_in_fitting_ones(kind: str) -> None:
    """As one that was saved before there were fitting ones: of momentum and residuals nothing is lost."""
    torch.manual_seed(0)
    before = stepped(kind, MANY, steps=8, block_size=BLOCK_SIZE, gradient=torch.randn_like)
    params = before.param_groups[0]["params"]
    after = build(kind, [nn.Parameter(p.detach().clone()) for p in params], freeze_step=1)
    after.load_state_dict(before.state_dict())
    assert after.setup.block_size == 32 and after.steps == 8 and after.compressing
    for there, here in zip(carried(before), carried(after), strict=True):
        assert float(there.abs().max()) > 1e-3
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-7)
    for p in after.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    after.step()
    assert after.skipped_steps == 0 and after.current.states[0].layout.block_size == 32


@kinds
def test_a_block_size_that_is_given_stays_and_is_told_of_a_better_one(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = said(kind, caplog, MANY, block_size=BLOCK_SIZE)
    assert "500 parameters have 5,000 elements" in text and "blocks of 2,048, 130 kB a message" in text
    assert 'fp32 gradients are 20 kB. block_size=32, or "auto", makes it 4 kB' in text
    assert (sent(MANY, 2048), sent(MANY, 32)) == (130_000, 4_000)


@pytest.mark.parametrize(
    ("numels", "options"),
    [
        (MANY, {"block_size": 32}),
        ([10] * 100, {"block_size": BLOCK_SIZE}),  # 26 kB
        ([*MANY, 30_000], {"block_size": BLOCK_SIZE}),  # 134 kB, and fp32 gradients 140
        ([2049] * 100, {"block_size": BLOCK_SIZE}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_others_are_not(numels: list[int], options: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    assert said("OneBitAdam", caplog, numels, **options) == []


def averaged(rank: int, size: int) -> tuple[list[torch.Tensor], int]:
    tensors = [torch.full((10,), float(rank + i)) for i in range(500)]
    average = CompressedAllReduce([10] * 500, chunks=1, process_group=group())
    average(tensors)
    assert average.exchange is not None
    return tensors, average.exchange.layout.block_size


def test_an_all_reduce_of_many_small_tensors_takes_them_too() -> None:
    """Each tensor has a block and a scale of its own, so that equal elements come back as they are."""
    (first, size), (second, _) = run_ranks(2, averaged)
    assert size == 32
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b) and torch.allclose(a, torch.full((10,), i + 0.5)), i


def test_a_word_that_is_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be a multiple of 32"):
        build("OneBitAdam", block_size="small")
    with pytest.raises(ValueError, match="block_size must be a multiple of 32"):
        CompressedAllReduce(10, block_size="small")  # type: ignore[arg-type]

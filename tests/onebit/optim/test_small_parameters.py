"""What a model of many small parameters is told with its first step."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from onebit.kernels.data.layout import Layout
from onebit.kernels.data.wire import Format
from tests.onebit.runs import build, kinds


def said(kind: str, caplog: pytest.LogCaptureFixture, numels: list[int], **options: int) -> list[str]:
    params = [nn.Parameter(torch.ones(n)) for n in numels]
    optimizer = build(kind, params, freeze_step=10, **options)
    with caplog.at_level(logging.WARNING, logger="onebit"):
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
    return [record.getMessage() for record in caplog.records]


def sent(numels: list[int], block_size: int) -> int:
    """Bytes of a message, without its header and what aligns its parts."""
    form = Format.of(Layout(numels, block_size=block_size))
    return form.shard_blocks * (4 + form.block_bytes)


@kinds
def test_many_small_parameters_are_told_a_block_size(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    numels = [10] * 500
    (text,) = said(kind, caplog, numels)
    assert "500 parameters have 5,000 elements" in text and "blocks of 2,048, 130 kB a message" in text
    assert "fp32 gradients are 20 kB. block_size=32 makes it 4 kB" in text
    assert (sent(numels, 2048), sent(numels, 32)) == (130_000, 4_000)


@pytest.mark.parametrize(
    ("numels", "options"),
    [
        ([10] * 500, {"block_size": 32}),
        ([10] * 100, {}),  # 26 kB
        ([10] * 500 + [30_000], {}),  # less than fp32 gradients
        ([2049] * 100, {}),
    ],
    ids=str,
)
def test_others_are_not(numels: list[int], options: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    assert said("OneBitAdam", caplog, numels, **options) == []


def test_the_best_block_size_is_that_of_the_fewest_bytes(caplog: pytest.LogCaptureFixture) -> None:
    numels = [60] * 800
    (text,) = said("OneBitAdam", caplog, numels)
    best = min((2**k for k in range(5, 11)), key=lambda size: sent(numels, size))
    assert f"block_size={best} " in text and best == 64

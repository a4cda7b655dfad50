"""What elastic=True keeps beside: bytes an element."""

from __future__ import annotations

import pytest
import torch

from tests.onebit.optim.test_memory import living
from tests.onebit.runs import build, parameters
from tests.ranks import group, run_ranks

SHAPES = ((1024, 512), (300, 1024), (3,))
NUMEL = sum(torch.Size(s).numel() for s in SHAPES)


def kept(rank: int, size: int, elastic: bool, reply: str | int) -> float:
    """Bytes an element after two compressed steps."""
    params, source = parameters(*SHAPES), torch.Generator().manual_seed(rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=source)
    before = living()
    options = {"freeze_step": 2, "chunks": 2, "reply": reply, "process_group": group()}
    optimizer = build("OneBitAdam", params, elastic=elastic, **options)
    for _ in range(4):
        optimizer.step()
    return sum(n for where, n in living().items() if where not in before) / NUMEL


@pytest.mark.parametrize(("reply", "residuals"), [(1, 4 + 4 / 3), ("direct", 4)])
def test_elastic_keeps_residuals_and_messages_once_more(reply: str | int, residuals: float) -> None:
    with_it, without = (run_ranks(3, kept, elastic, reply)[0] for elastic in (True, False))
    assert residuals < with_it - without < residuals + 0.6

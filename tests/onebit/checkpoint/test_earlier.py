"""States of version 1, in which every block was as long as block_size, go on as if they had been saved now."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onebit.checkpoint.names import BITS
from tests.onebit.runs import bits, build, kinds

SIZES = (1, 31, 64, 65, 200, 0, 7)
BLOCK = 64


def stepped(optimizer: Any, first: int, stop: int) -> Any:
    for step in range(first, stop):
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.step()
    return optimizer


def in_equal_blocks(own: Tensor, numel: int, per_element: int) -> Tensor:
    """The bits of one parameter as version 1 had them: uint8 [blocks, per_element * block_size / 8]."""
    blocks, rows, start = -(-numel // BLOCK), [], 0
    for b in range(blocks):
        length = min(BLOCK, -(-(numel - b * BLOCK) // 32) * 32) // 8
        planes = np.zeros((per_element, BLOCK // 8), np.uint8)
        for plane in planes:
            plane[:length] = own[start : start + length]
            start += length
        rows.append(planes.ravel())
    return torch.from_numpy(np.array(rows, np.uint8).reshape(blocks, per_element * BLOCK // 8))


def as_version_1(state: dict[str, Any], per_element: int) -> dict[str, Any]:
    state = copy.deepcopy(state)
    numbers = state["param_groups"][0]["onebit"]
    assert numbers["version"] == 2 and numbers["compressing"]
    numbers["version"] = 1
    for i, own in state["state"].items():
        own[BITS] = in_equal_blocks(own[BITS], SIZES[i], per_element)
    return state


@kinds
@pytest.mark.parametrize("options", [{}, {"reply": 2}, {"scale": "tensor"}], ids=str)
def test_it_goes_on_bit_for_bit(kind: str, options: dict[str, Any]) -> None:
    options = {"freeze_step": 2, "block_size": BLOCK, "chunks": 1, "reply": 1, **options}
    params = [nn.Parameter(torch.ones(n)) for n in SIZES]
    optimizer = stepped(build(kind, params, **options), 0, 9)
    state = as_version_1(optimizer.state_dict(), 2 if options["reply"] == 2 else 1)
    again = build(kind, [nn.Parameter(p.detach().clone()) for p in params], **options)
    again.load_state_dict(state)
    ends = [bits([p for g in each.param_groups for p in g["params"]])
            for each in (stepped(optimizer, 9, 14), stepped(again, 9, 14))]  # fmt: skip
    assert ends[0] == ends[1]


def test_bits_of_another_shape_are_refused() -> None:
    params = [nn.Parameter(torch.ones(n)) for n in SIZES]
    optimizer = stepped(build("OneBitAdam", params, freeze_step=2, block_size=BLOCK), 0, 6)
    state = as_version_1(optimizer.state_dict(), 1)
    state["state"][3][BITS] = state["state"][3][BITS][:, :-1]
    with pytest.raises(ValueError, match="momentum_bits"):
        build("OneBitAdam", [nn.Parameter(torch.ones(n)) for n in SIZES], block_size=BLOCK).load_state_dict(state)

"""The parts of Triton kernels that loop over more blocks than the passes' tests can afford to run."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from onebit.kernels.data.wire import NORMS
from onebit.kernels.gpu import tiles
from tests.kernels.cases import GPU

BLOCKS = 2500  # three rounds of 1024


@triton.jit
def _reduce(partial, blocks, total, largest):
    tl.store(total, tiles.sum_partials(partial, blocks))
    tl.store(largest, tiles.max_partials(partial, blocks))


@triton.jit
def _finish_scale(scale, residual_scale, partial, counted, blocks, NORM: tl.constexpr):
    tiles.finish_scale(scale, residual_scale, partial, counted, blocks, NORM)


@pytest.mark.parametrize("blocks", [1, 1024, BLOCKS])
def test_partial_results_of_any_number_of_blocks_are_summed_compared_and_make_a_scale(blocks):
    """More elements than fp32 can count exactly, some blocks empty."""
    partial = torch.full((BLOCKS + 8,), float("nan"), device=GPU)
    partial[:blocks] = torch.rand(blocks, device=GPU)
    partial[blocks - 1] = 2.0
    total, largest, scale, copy = torch.zeros((4, 1), device=GPU)
    _reduce[(1,)](partial, blocks, total, largest)
    summed = partial[:blocks].double().sum().item()
    assert total.item() == pytest.approx(summed, rel=1e-6)
    assert largest.item() == 2.0
    counted = torch.randint(1, 16385, (BLOCKS + 8,), dtype=torch.int32, device=GPU)
    counted[5::7] = 0
    for norm in ("l1", "l2"):
        _finish_scale[(1,)](scale, copy, partial, counted, blocks, NORM=NORMS[norm])
        wanted = summed / counted[:blocks].sum().item()
        assert scale.item() == pytest.approx(np.sqrt(wanted) if norm == "l2" else wanted, rel=1e-6)
        assert copy.item() == scale.item()

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
def _finish_scale(scale, residual_scale, partial, counted, blocks, NORM: tl.constexpr):
    tiles.finish_scale(scale, residual_scale, partial, counted, blocks, NORM)


@triton.jit
def _reduce(partial, blocks, total, largest):
    tl.store(total, tiles.sum_partials(partial, blocks))
    tl.store(largest, tiles.max_partials(partial, blocks))


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_scale_of_a_message_counts_all_its_blocks(norm):
    """More than fp32 can count exactly, some blocks empty."""
    partial = torch.rand(BLOCKS + 8, device=GPU)
    counted = torch.randint(0, 16385, (BLOCKS + 8,), dtype=torch.int32, device=GPU)
    counted[5::7] = 0
    scale, copy = torch.zeros(1, device=GPU), torch.zeros(1, device=GPU)
    _finish_scale[(1,)](scale, copy, partial, counted, BLOCKS, NORM=NORMS[norm])
    wanted = partial[:BLOCKS].double().sum().item() / counted[:BLOCKS].sum().item()
    wanted = np.sqrt(wanted) if norm == "l2" else wanted
    assert scale.item() == pytest.approx(wanted, rel=1e-6)
    assert copy.item() == scale.item()


@pytest.mark.parametrize("blocks", [1, 1024, BLOCKS])
def test_partial_results_of_any_number_of_blocks_are_summed_and_compared(blocks):
    partial = torch.full((BLOCKS + 8,), float("nan"), device=GPU)
    partial[:blocks] = torch.rand(blocks, device=GPU)
    partial[blocks - 1] = 2.0
    total, largest = torch.zeros(1, device=GPU), torch.zeros(1, device=GPU)
    _reduce[(1,)](partial, blocks, total, largest)
    assert total.item() == pytest.approx(partial[:blocks].double().sum().item(), rel=1e-6)
    assert largest.item() == 2.0

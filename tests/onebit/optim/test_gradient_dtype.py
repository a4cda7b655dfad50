"""Stage 1 with gradients of 16 bits on the wire, with and without DDP: rounding, range, and stage 2 after it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit import runs
from tests.onebit.runs import arrays, bits
from tests.ranks import group, run_ranks

FREEZE = 6


def trained(rank, size, kind, ddp, wire, dtype=torch.float32, factor=1.0, too_large=0):
    """The averaged gradients of the last step of stage 1, the parameters at its end and after stage 2. In step
    `too_large` rank 1's gradients are finite in fp32 and too large for fp16: it is skipped."""
    torch.manual_seed(0)
    net = model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    own = {"lr": 1e-2, "eps": 1e-4, "freeze_step": FREEZE, "block_size": 32, "gradient_dtype": wire}
    optimizer = runs.build(kind, net.parameters(), process_group=group(), **own)
    if ddp:
        model = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
        onebit.attach(model, optimizer)
    for step in range(1, FREEZE + 5):
        before, source = bits(net.parameters()), torch.Generator().manual_seed(100 * step + rank)
        x, y = (torch.randn(8, n, generator=source).to(dtype) for n in (10, 3))
        optimizer.zero_grad()
        larger = 1e8 if step == too_large and rank == 1 else factor
        ((model(x) - y) ** 2).mean().mul(larger).backward()
        optimizer.step()
        assert (bits(net.parameters()) == before) == (step == too_large)
        if step == FREEZE:
            grads, warm = [p.grad.detach().clone() for p in net.parameters()], arrays(net.parameters())
    assert optimizer.compressing and optimizer.skipped_steps == (too_large > 0)
    return grads, warm, bits(net.parameters())


@pytest.mark.parametrize(
    ("kind", "ddp", "wire"),
    [
        ("OneBitAdam", False, torch.float16),
        ("OneBitAdam", True, torch.bfloat16),
        ("OneBitLamb", False, torch.bfloat16),
        ("ZeroOneAdam", True, torch.float16),
    ],
)
def test_the_mean_is_rounded_to_the_dtype_and_little_else_changes(kind, ddp, wire):
    plain, found = (run_ranks(3, trained, kind, ddp, dtype) for dtype in (None, wire))
    for (grads, warm, end), (exact, plainly_warm, _) in zip(found, plain, strict=True):
        assert all(torch.equal(g, g.to(wire).float()) for g in grads)
        assert not all(torch.equal(g, g.to(wire).float()) for g in exact)
        for ours, theirs in zip(warm, plainly_warm, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-3)
        assert end == found[0][2]


@pytest.mark.parametrize("ddp", [False, True])
def test_parameters_of_16_bits_are_left_as_they_are_and_what_is_beyond_the_range_skips_the_step(ddp):
    """float16 would not hold gradients as large as the first two runs'."""
    half, bf16 = torch.float16, torch.bfloat16
    ways = ((half, bf16, 1e8), (None, bf16, 1e8), (half, torch.float32, 1.0, 3))
    narrow, plain, skipped = ([end for *_, end in run_ranks(2, trained, "OneBitAdam", ddp, *way)] for way in ways)
    assert narrow[0] == plain[0] and skipped[0] == skipped[1]

"""Stage 1 with gradients of 16 bits on the wire, with and without DDP: rounding, range, and stage 2 after it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit import runs as optimizers
from tests.onebit.runs import arrays, bits, kinds
from tests.ranks import group, run_ranks

FREEZE = 6
HOW = pytest.mark.parametrize("how", ["alone", "DDP"])
WIRE = pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def build(kind, how, dtype=torch.float32, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    common = {"lr": 1e-2, "eps": 1e-4, "freeze_step": FREEZE, "block_size": 32, "process_group": group()}
    optimizer = optimizers.build(kind, net.parameters(), **common, **options)
    if how == "alone":
        return net, net, optimizer
    model = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    onebit.attach(model, optimizer)
    return net, model, optimizer


def backward(model, optimizer, rank, step, factor=1.0):
    source = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(8, 10, generator=source).to(dtype), torch.randn(8, 3, generator=source).to(dtype)
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().mul(factor).backward()


def trained(rank, size, kind, how, wire, dtype=torch.float32, factor=1.0):
    """The averaged gradients of the last step of stage 1, and the parameters at its end and after stage 2."""
    net, model, optimizer = build(kind, how, dtype, gradient_dtype=wire)
    for step in range(1, FREEZE + 5):
        backward(model, optimizer, rank, step, factor)
        optimizer.step()
        assert optimizer.compressing == (step > FREEZE)
        if step == FREEZE:
            grads = [p.grad.detach().clone() for p in net.parameters()]
            warm = arrays(net.parameters())
    return grads, warm, bits(net.parameters())


@WIRE
@HOW
@kinds
def test_the_mean_is_rounded_to_the_dtype_and_little_else_changes(kind, how, wire):
    plain = run_ranks(3, trained, kind, how, None)
    found = run_ranks(3, trained, kind, how, wire)
    for (grads, warm, end), (exact, plainly_warm, _) in zip(found, plain, strict=True):
        assert all(torch.equal(g, g.to(wire).float()) for g in grads)
        assert not all(torch.equal(g, g.to(wire).float()) for g in exact)
        for ours, theirs in zip(warm, plainly_warm, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-3)
        assert end == found[0][2]


@HOW
def test_parameters_that_have_16_bits_already_are_left_as_they_are(how):
    def ends(wire):  # float16 would not hold gradients as large
        return [end for *_, end in run_ranks(2, trained, "OneBitAdam", how, wire, torch.bfloat16, 1e8)]

    assert ends(torch.float16) == ends(None)


def too_large(rank, size, how):
    """Rank 1's gradients at step 3 are finite in fp32 and too large for fp16."""
    net, model, optimizer = build("OneBitAdam", how, gradient_dtype=torch.float16)
    for step in range(1, 5):
        before = bits(net.parameters())
        backward(model, optimizer, rank, step, factor=1e8 if (rank, step) == (1, 3) else 1.0)
        optimizer.step()
        assert (bits(net.parameters()) == before) == (step == 3)
    return optimizer.skipped_steps, bits(net.parameters())


@HOW
def test_a_gradient_beyond_the_range_of_float16_skips_the_step_on_every_rank(how):
    found = run_ranks(2, too_large, how)
    assert [skipped for skipped, _ in found] == [1, 1]
    assert found[0][1] == found[1][1]

"""Parameters of fp16, with fp32 copies, in both stages."""

import torch

from tests.onebit.runs import Case, bits, kinds
from tests.ranks import group, run_ranks


def target(parameter, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + parameter))


def distance(params):
    return sum(float((p.detach().float() - target(i, p.shape)).square().sum()) for i, p in enumerate(params))


def train_fp16(rank, size, kind):
    """By gradients of half the squared distance to a target, which has another noise on every rank and at every step.
    The distance at the start, at the freeze and at the end; how often a parameter moved; its bits."""
    more = {"max_coeff": 2.0} if kind == "OneBitLamb" else {}
    case = Case(kind, dtype="float16", options={"freeze_step": 20, "lr": 2e-2, **more})
    params = case.parameters()
    optimizer = case.build(params, group())
    distances, moved, finer = [distance(params)], [0] * len(params), 0
    for step in range(1, 41):
        before = [p.detach().clone() for p in params]
        for i, p in enumerate(params):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + 10 * rank + i))
            p.grad = (p.detach().float() - target(i, p.shape) + 0.1 * noise).half()
        optimizer.step()
        assert optimizer.compressing == (step > 20)
        masters = [optimizer.state[p]["master"] for p in params]
        for i, (p, master, old) in enumerate(zip(params, masters, before, strict=True)):
            assert p.dtype == torch.float16 and master.dtype == torch.float32
            assert torch.equal(p, master.half()), f"parameter {i} is not its master copy rounded, step {step}"
            moved[i] += bool((p != old).any())
            finer += bool((master != p.float()).any())
        if step in (20, 40):
            distances.append(distance(params))
    assert optimizer.skipped_steps == 0
    return distances, moved, finer, bits(params), bits(masters)


@kinds
def test_fp16_parameters_train_into_stage_2_and_are_their_master_copies_rounded(kind):
    found = run_ranks(2, train_fp16, kind)
    (start, freeze, end), moved, finer, _, _ = found[0]
    assert end < 0.9 * freeze < 0.9 * 0.9 * start
    assert min(moved) > 30
    assert finer > 150, "the master copies hold no more than fp16 does"
    assert found[1] == found[0]

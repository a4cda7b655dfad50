"""Models trained by either optimizer, with and without DDP, in one dtype or two."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.optim.simulation import assert_close, group_or_none, on_ranks
from tests.onebit.runs import Case, arrays, bits, build, kinds, take
from tests.ranks import group, run_ranks

SAMPLES = 12  # of the whole batch


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model, step, rank, size, dtype=torch.float32):
    """The mean over a rank's part of the batch."""
    data = torch.Generator().manual_seed(step)
    part = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)
    x = torch.randn(SAMPLES, 10, generator=data, dtype=torch.float64)[part].to(dtype)
    y = torch.randn(SAMPLES, 3, generator=data, dtype=torch.float64)[part].to(dtype)
    return ((model(x) - y) ** 2).mean()


def train(rank, size, steps, kind, wrapped):
    """What a rank's model comes to: under DDP with attach, or without DDP."""
    model = net()
    options = {
        "lr": 1e-2,
        "eps": 1e-4,
        "weight_decay": 0.05,
        "freeze_step": 10**6,
        "process_group": group_or_none(size),
    }
    optimizer = build(kind, model.parameters(), **options)
    run = model
    if wrapped:
        run = DistributedDataParallel(model, process_group=group(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        onebit.attach(run, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(run, step, rank, size).backward()
        before = bits(p.grad for p in model.parameters())
        optimizer.step()
        assert not wrapped or bits(p.grad for p in model.parameters()) == before, "DDP has done that already"
    return arrays(model.parameters()), bits(model.parameters())


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "DDP"])
@pytest.mark.parametrize("size", [2, 3])
@kinds
def test_ranks_in_stage_1_are_one_process_on_the_whole_batch(kind, size, wrapped):
    (expected, _), *_ = on_ranks(1, train, 30, kind, False)
    found = on_ranks(size, train, 30, kind, wrapped)
    for parameters, their_bits in found:
        assert_close(parameters, expected)
        assert their_bits == found[0][1]


@pytest.mark.parametrize(("size", "wrapped"), [(1, False), (2, False), (2, True), (3, True)])
def test_a_model_in_stage_1_trains_as_with_adamw(size, wrapped):
    model = net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.05)
    for step in range(50):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1, torch.float64).backward()
        optimizer.step()
    for found, _ in on_ranks(size, train, 50, "OneBitAdam", wrapped):
        assert_close(found, arrays(model.parameters()))


@kinds
def test_lr_as_a_tensor_is_lr_as_a_number(kind):
    """In both stages, with a scheduler: halves are exact in either precision."""
    ends = []
    for lr in (1e-2, torch.tensor(1e-2)):
        case = Case(kind, steps=12, options={"lr": lr, "freeze_step": 6, "weight_decay": 0.1})
        params = case.parameters()
        optimizer = case.build(params)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 2))
        for step in range(1, case.steps + 1):
            take(case, 0, optimizer, params, step)
            schedule.step()
        assert optimizer.compressing
        ends.append(bits(params))
    assert ends[0] == ends[1]


def fp16_step(rank, params, optimizer, step):
    """Gradients of half the squared distance to a target, which has another noise on every rank and at every step."""
    for i, p in enumerate(params):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + 10 * rank + i))
        p.grad = (p.detach().float() - target(i, p.shape) + 0.1 * noise).half()
    optimizer.step()


def target(parameter, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + parameter))


def distance(params):
    return sum(float((p.detach().float() - target(i, p.shape)).square().sum()) for i, p in enumerate(params))


def train_fp16(rank, size, kind):
    """The distance to the target at the start, at the freeze and at the end; how often a parameter moved; its bits."""
    more = {"max_coeff": 2.0} if kind == "OneBitLamb" else {}
    case = Case(kind, dtype="float16", options={"freeze_step": 20, "lr": 2e-2, **more})
    params = case.parameters()
    optimizer = case.build(params, group())
    distances, moved, finer = [distance(params)], [0] * len(params), 0
    for step in range(1, 41):
        before = [p.detach().clone() for p in params]
        fp16_step(rank, params, optimizer, step)
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


def mixed(rank, size, kind, one_optimizer):
    """A model of two dtypes in one optimizer, or in one for each."""
    cases = [Case(kind, shapes=((40, 3), (5,)), dtype=d, options={"freeze_step": 4}) for d in ("float32", "bfloat16")]
    params = [case.parameters() for case in cases]
    if one_optimizer:
        both = [{"params": [params[0][0], params[1][0]]}, {"params": [params[1][1], params[0][1]]}]
        options = {"lr": 1e-2, "block_size": 64, "freeze_step": 4, "reply": 1, "process_group": group()}
        optimizers = [build(kind, both, **options)]
    else:
        optimizers = [case.build(own, group()) for case, own in zip(cases, params, strict=True)]
    for step in range(1, 13):
        for case, own in zip(cases, params, strict=True):
            for p, g in zip(own, case.gradients(rank, step), strict=True):
                p.grad = g
        for optimizer in optimizers:
            optimizer.step()
    return bits([*params[0], *params[1]])


@kinds
def test_a_model_of_two_dtypes_is_two_models(kind):
    one_optimizer, two_optimizers = (run_ranks(2, mixed, kind, t) for t in (True, False))
    assert one_optimizer == two_optimizers
    assert one_optimizer[0] == one_optimizer[1]

"""States that were saved under other circumstances: by another optimizer later in a run, while parameters were frozen,
or in another memory format."""

import copy
import warnings

import pytest
import torch
from torch import nn

import onebit
from onebit.optim.schedule import VarianceSchedule
from tests.ranks import group, run_ranks

SHAPE, LR, BETAS, EPS = (8, 16), 1e-2, (0.9, 0.99), 1e-8


def gradient(step):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)) + 0.5


def take(optimizer, p, *steps):
    """How far they went."""
    before = p.detach().clone()
    for step in steps:
        p.grad = gradient(step)
        optimizer.step()
    return (p.detach() - before).double()


def from_adamw(steps, **options):
    """0/1 Adam with AdamW's state of so many steps, and that state."""
    p = nn.Parameter(torch.zeros(SHAPE))
    adamw = torch.optim.AdamW([p], lr=LR, betas=BETAS, weight_decay=0.0)
    take(adamw, p, *range(1, steps + 1))
    optimizer = onebit.ZeroOneAdam([p], lr=LR, block_size=32, variance_floor=0.0, **options)
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    return optimizer, p, {name: value.clone().double() for name, value in adamw.state[p].items()}


@pytest.mark.parametrize("last", [None, 3, 60])
@pytest.mark.parametrize("steps", [3, 5, 60, 200])
def test_adamws_variance_is_divided_by_its_own_weight(steps, last):
    optimizer, p, theirs = from_adamw(steps, var_freeze_step=last)
    wanted = theirs["exp_avg_sq"] / (1 - BETAS[1] ** steps)
    mine = optimizer.state[p]["exp_avg_sq"].double() / VarianceSchedule(4, last).weight(steps, BETAS[1])
    torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("steps", [6, 8, 12, 16, 20])
def test_a_full_step_right_after_adamws_state_has_its_momentum(steps):
    """It is a dense one: m was never sent."""
    optimizer, p, theirs = from_adamw(steps)
    schedule = VarianceSchedule(4)
    assert schedule.is_full(steps + 1)
    moved = take(optimizer, p, steps + 1)
    assert not optimizer.compressing
    g, b, weight = gradient(steps + 1).double(), *(of(steps + 1, BETAS[1]) for of in (schedule.decay, schedule.weight))
    m = BETAS[0] * theirs["exp_avg"] + (1 - BETAS[0]) * g
    before = theirs["exp_avg_sq"] / (1 - BETAS[1] ** steps) * schedule.weight(steps, BETAS[1])
    v = b * before + (1 - b) * g * g
    wanted = -LR * m / (1 - BETAS[0] ** (steps + 1)) / ((v / weight).sqrt() + EPS)
    torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=1e-6)
    take(optimizer, p, steps + 2)
    assert optimizer.compressing


@pytest.mark.parametrize("first_local", [21, 101])
def test_local_steps_right_after_adamws_state_have_its_momentum(first_local):
    """A rank moves as AdamW with that variance would. What it has to send is what it has moved by."""
    options = {"var_freeze_step": 10, "local_step_scaler": first_local - 11, "local_step_clipper": 8}
    optimizer, p, theirs = from_adamw(100, **options)
    root = (theirs["exp_avg_sq"] / (1 - BETAS[1] ** 100)).sqrt()
    m, way, start = theirs["exp_avg"], torch.zeros(SHAPE, dtype=torch.float64), p.detach().clone().double()
    for step in range(101, 140):
        kind = optimizer.schedule.kind
        m = BETAS[0] * m + (1 - BETAS[0]) * gradient(step).double()
        way -= LR * m / (1 - BETAS[0] ** step) / (root + EPS)
        take(optimizer, p, step)
        if kind == "sync":
            break
        assert kind == "local"
        torch.testing.assert_close(p.detach().double() - start, way, rtol=1e-4, atol=1e-6)
    else:
        raise AssertionError("there was no sync")
    sent, wanted = (p.detach().double() - start) * (root + EPS), way * (root + EPS)
    along = (sent * wanted).view(-1, 32).sum(1)  # an unbiased scale: what is left out is orthogonal
    torch.testing.assert_close(along, wanted.square().view(-1, 32).sum(1), rtol=1e-3, atol=1e-6)


def test_a_schedule_that_was_another_is_an_error_before_the_freeze_too():
    def built(scaler):
        p = nn.Parameter(torch.zeros(SHAPE))
        return p, onebit.ZeroOneAdam([p], lr=LR, var_update_scaler=scaler)

    for steps, scaler, fits in ((90, 4, False), (6, 4, False), (5, 4, True), (90, 100, True)):  # 5: both decided alike
        (p, saved), (_, other) = built(100), built(scaler)
        take(saved, p, *range(1, steps + 1))
        assert not saved.compressing
        if fits:
            other.load_state_dict(saved.state_dict())
            assert other.steps == steps
        else:
            with pytest.raises(ValueError, match="var_update_scaler=100"):
                other.load_state_dict(saved.state_dict())


def steps_of(params, optimizer, *gradients):
    for value in gradients:
        for p in params:
            p.grad = torch.full_like(p, value)
        optimizer.step()


@pytest.mark.parametrize("frozen", [slice(None), slice(0, 500)], ids=["all", "the small ones"])
def test_a_state_saved_while_parameters_are_frozen_goes_on(frozen):
    def built():
        params = [*(nn.Parameter(torch.ones(10)) for _ in range(500)), nn.Parameter(torch.ones(100, 100))]
        return params, onebit.OneBitAdam(params, lr=1e-2, freeze_step=1)

    (params, optimizer), (others, again) = built(), built()
    steps_of(params, optimizer, 0.1, 0.2)
    for p in params[frozen]:
        p.requires_grad_(False)
    state = copy.deepcopy(optimizer.state_dict())
    for p in params[frozen]:
        p.requires_grad_(True)
    for p, value in zip(others, params, strict=True):
        p.data.copy_(value)
    again.load_state_dict(state)
    steps_of(params, optimizer, 0.3, 0.4)
    steps_of(others, again, 0.3, 0.4)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_lambs_coefficients_of_before_a_group_was_added_are_not_saved():
    params = [nn.Parameter(torch.ones(40)) for _ in range(3)]
    optimizer = onebit.OneBitLamb(params[:2], lr=1e-3, freeze_window=32)
    steps_of(params[:2], optimizer, *[1.0] * 20)
    optimizer.add_param_group({"params": params[2:]})
    steps_of(params, optimizer, *[1.0] * 5)
    again = onebit.OneBitLamb([{"params": params[:2]}, {"params": params[2:]}], lr=1e-3, freeze_window=32)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(40):
        steps_of(params, optimizer, 1.0)
        steps_of(params, again, 1.0)
    assert optimizer.freeze_ratio == again.freeze_ratio is not None


def residuals_in_another_format(rank, size, folder):
    """Norms of what was left out: as it was, loaded as it was, loaded into channels_last; and how many warnings."""

    def build(memory_format):
        torch.manual_seed(0)
        model = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=memory_format)
        options = {"freeze_step": 3, "reply": 1, "block_size": 64, "process_group": group()}
        return model, onebit.OneBitAdam(model.parameters(), **options)

    def left_out(optimizer):
        (own,) = optimizer.diagnostics().values()
        return [own["residual_norm"], own["server_residual_norm"]]

    model, optimizer = build(torch.contiguous_format)
    for step in range(8):
        model.weight.grad = torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.step()
    onebit.save(folder, model, optimizer)
    found = [left_out(optimizer)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for memory_format in (torch.contiguous_format, torch.channels_last):
            model, other = build(memory_format)
            onebit.load(folder, model, other)
            found.append(left_out(other))
    return found, sum("residual" in str(warning.message) for warning in caught)


def test_residuals_come_along_into_another_memory_format(tmp_path):
    for (before, same, other), warned in run_ranks(2, residuals_in_another_format, tmp_path):
        assert before == same and warned == 0
        assert min(before) > 0 and other[1] == pytest.approx(before[1], rel=1e-5)
        assert other[0] > 0.5 * before[0]

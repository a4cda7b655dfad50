"""update_limit: steps are as long as Adam's where gradients have grown and the variance does not see them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit.optim.limit import USUAL
from onebit.report.skips import SHORTENED_FOR
from tests import internals
from tests.onebit.runs import on_warnings, step_by

LOCAL = {"var_freeze_step": 60, "local_step_scaler": 20, "local_step_clipper": 8}
RUNS = {
    "LAMB": ("OneBitLamb", {"freeze_step": 200}),
    "1-bit Adam": ("OneBitAdam", {"freeze_step": 40}),
    "1-bit LAMB": ("OneBitLamb", {"freeze_step": 40}),
    "0/1 Adam": ("ZeroOneAdam", {"var_freeze_step": 60}),
    "0/1 Adam, local steps": ("ZeroOneAdam", LOCAL),
}
LIMITED = [name for name in RUNS if name != "LAMB"]
EVENTS = {
    "a hundred times": lambda step: 100.0 if step > 100 else 1.0,
    "thirty times for a while": lambda step: 30.0 if 100 < step <= 150 else 1.0,
}


def embedding_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 1))


def trained(name: str, event: Any, **more: Any) -> float:
    """The loss at the end of 200 steps, of which gradients grow in some, with a rate that falls to 0."""
    net, source = embedding_net(), torch.Generator().manual_seed(1)
    kind, own = RUNS.get(name, ("AdamW", {}))
    of = torch.optim.AdamW if kind == "AdamW" else getattr(onebit, kind)
    optimizer = of(net.parameters(), lr=3e-3, **own, **more)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 200)
    target, losses = torch.randn(40, generator=source), []
    for step in range(1, 201):
        x = torch.randint(0, 40, (64, 3), generator=source)
        loss = (net(x)[:, 0] - target[x].sum(1)).square().mean()
        optimizer.zero_grad()
        (loss * event(step)).backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return float(np.mean(losses[-10:]))


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", LIMITED)
def test_gradients_that_grow_lose_no_run(name: str, event: str) -> None:
    found = trained(name, EVENTS[event])
    assert found < trained("LAMB" if "LAMB" in name else "AdamW", EVENTS[event]) + 0.05


def test_a_full_step_that_is_skipped_leaves_the_limit_as_it_is() -> None:
    """A limit that is due anew would be that of the next step, however long."""
    p = nn.Parameter(torch.zeros(200))
    optimizer, found = onebit.ZeroOneAdam([p], var_update_scaler=1, block_size=32), []
    for step in range(1, 30):
        skips = optimizer.schedule.kind == "full" and step > 10 and not found
        p.grad = torch.full((200,), float("nan")) if skips else torch.randn(200)
        before = [state[USUAL.name].tolist() for state in internals.states(optimizer) if USUAL.name in state]
        optimizer.step()
        if skips:
            found = [before, [state[USUAL.name].tolist() for state in internals.states(optimizer)]]
    assert found[0] == found[1] and found[0][0][0] > 0


def test_the_limit_is_by_the_variance_of_the_last_full_step() -> None:
    p, source, lengths = nn.Parameter(torch.zeros(200)), torch.Generator().manual_seed(0), []
    optimizer = onebit.ZeroOneAdam([p], lr=1.0, update_limit=0.1, var_update_scaler=1, block_size=32)
    for step in range(1, 40):
        before, by_messages = p.detach().clone(), optimizer.schedule.kind == "1 bit"
        p.grad = step**2 * torch.randn(200, generator=source)
        optimizer.step()
        lengths += [float((p.detach() - before).square().mean().sqrt())] * by_messages
    assert len(lengths) > 20 and lengths == pytest.approx([0.1] * len(lengths), rel=1e-5)


def test_what_is_usual_is_found_anew_where_a_load_makes_messages_of_another_shape() -> None:
    def built(block_size: int) -> Any:
        return onebit.OneBitAdam([nn.Parameter(torch.zeros(200))], freeze_step=2, block_size=block_size)

    def usual(optimizer: Any) -> float:
        return float(internals.states(optimizer)[0][USUAL.name])

    optimizer, source = built(32), torch.Generator().manual_seed(0)
    for _ in range(4):
        step_by(optimizer, lambda p: torch.randn(p.shape, generator=source))
    assert usual(optimizer) > 0
    for block_size, expected in ((32, usual(optimizer)), (64, 0.0)):
        other = built(block_size)
        other.load_state_dict(optimizer.state_dict())
        assert usual(other) == expected


def test_where_it_acts_on_most_of_a_model_for_long_is_said_once() -> None:
    net = nn.Linear(20, 20, bias=False)
    optimizer = onebit.OneBitAdam(net.parameters(), lr=1e-6, freeze_step=10)
    with on_warnings() as texts:
        for step in range(2 * SHORTENED_FOR + 30):
            step_by(optimizer, lambda p, size=1000.0 if step >= 20 else 1.0: size * torch.randn_like(p))
            said = [text for text in texts if "gradients have grown" in text]
            assert len(said) == (step >= 20 + SHORTENED_FOR)
    assert "update_limit" in said[0] and "Clip gradients" in said[0]


def test_each_local_step_has_the_limit_by_its_own_size() -> None:
    """The first by gradients that have grown has it, and the one after a step that was left out."""
    p, source, lengths = nn.Parameter(torch.zeros(200)), torch.Generator().manual_seed(0), []
    schedule = {"var_freeze_step": 6, "local_step_scaler": 4, "local_step_clipper": 4}
    optimizer, since_sync = onebit.ZeroOneAdam([p], lr=1.0, update_limit=0.1, **schedule), 0
    for step in range(80):
        before, p.grad = p.detach().clone(), 10**since_sync * torch.randn(200, generator=source)
        if since_sync == 1 and step % 3:
            p.grad[0] = float("nan")
        optimizer.step()
        since_sync = 1 if optimizer.synchronized else since_sync + 1
        if step > 30 and not optimizer.synchronized:
            lengths.append(float((p.detach() - before).square().mean().sqrt()))
    moved = [length for length in lengths if length]
    assert len(lengths) > len(moved) > 20 and moved == pytest.approx([0.1] * len(moved), rel=1e-5)


PAUSES = ["zeros", "skipped", "no rate", "synchronized"]


@pytest.mark.parametrize("pause", PAUSES)
def test_a_pause_makes_no_sync_after_it_shorter_for_good(pause: str) -> None:
    """What is usual stays after syncs that hardly move. The first one at a greater distance takes sqrt(2) off."""
    p, source = nn.Parameter(torch.zeros(200)), torch.Generator().manual_seed(0)
    schedule = {"var_freeze_step": 6, "local_step_scaler": 16, "local_step_clipper": 4}  # syncs: 24, 26, ..., 38, 42
    optimizer, usual = onebit.ZeroOneAdam([p], lr=0.1, **schedule), {}
    for step in range(1, 71):
        paused = 28 < step <= 42 or 50 < step <= 60
        p.grad = 1 + 0.1 * torch.randn(200, generator=source)
        if paused and pause == "zeros":
            p.grad.zero_()
        if paused and pause == "skipped":
            p.grad[0] = float("nan")
        optimizer.param_groups[0]["lr"] = 0.0 if paused and pause == "no rate" else 0.1
        optimizer.step()
        if paused and pause == "synchronized" and not optimizer.synchronized:
            optimizer.synchronize()
        usual[step] = float(internals.states(optimizer)[0]["usual_step"]) if optimizer.compressing else 0.0
    assert 0.9 < usual[28] == usual[38] < 1.1 and usual[42] == usual[70]
    assert usual[28] / usual[42] == pytest.approx(2**0.5) or (pause == "synchronized" and usual[42] > 0.85)


def test_numbers_that_fp32_does_not_hold_make_no_parameter_nan() -> None:
    source = torch.Generator().manual_seed(0)
    tiny = nn.Parameter(torch.zeros(2000))
    optimizer = onebit.OneBitAdam([tiny], lr=1.0, eps=0.0, freeze_step=3)
    for _ in range(8):
        g = torch.randn(2000, generator=source)
        tiny.grad = 1e-18 * (g + g.sign())  # whose squares fp32 still holds, but not the squares of 1 / them
        optimizer.step()
    assert tiny.isfinite().all() and internals.states(optimizer)[0][USUAL.name].isfinite().all()

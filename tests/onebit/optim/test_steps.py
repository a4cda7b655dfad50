"""Steps that are not taken, gradients that are scaled, accumulated or clipped: in both stages, on real ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.collectives.transport.protocol import LocalTransport
from tests.onebit.runs import Case, adam_first, arrays, bits, build, kinds, parameters, run, snapshot, take, unchanged
from tests.ranks import group, run_ranks

STAGES = pytest.mark.parametrize("freeze_step", [50, 3], ids=["stage 1", "stage 2"])


def skipping(rank: int, size: int, case: Case, at: int) -> dict[str, Any]:
    """A run whose step `at` meets something that is not finite, and one that never sees that step."""
    params = case.parameters()
    optimizer = case.build(params, group())
    run(case, rank, optimizer, params, 1, at - 1)
    optimizer.begin_step()  # the freeze, where it is due, is not part of the skipped step
    before = snapshot(optimizer.state_dict()), bits(params)
    take(case, rank, optimizer, params, at)
    after = snapshot(optimizer.state_dict()), bits(params)
    run(case, rank, optimizer, params, at + 1, case.steps)
    without = case.but(bad=()).parameters()
    other = case.build(without, group())
    for step in range(1, case.steps + 1):
        if step != at:
            take(case, rank, other, without, step)
    return {
        "unchanged": unchanged(before[0], after[0]) and before[1] == after[1],
        "skipped": optimizer.skipped_steps,
        "as if it never came": bits(params) == bits(without) and unchanged(optimizer.state_dict(), other.state_dict()),
        "finite": all(bool(torch.isfinite(p).all()) for p in params),
        "residuals finite": all(bool(t.isfinite().all()) for own in optimizer.state.values() for t in own.values()),
        "params": bits(params),
    }


@kinds
@STAGES
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**43])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bad_gradient_on_one_rank_skips_the_step_everywhere(
    kind: str, freeze_step: int, value: float, dtype: str
) -> None:
    case = Case(kind, dtype=dtype, steps=8, options={"freeze_step": freeze_step}, bad=((6, 1, value),))
    found = run_ranks(3, skipping, case, 6)
    for one in found:
        assert one["unchanged"]
        assert one["skipped"] == 1
        assert one["as if it never came"]
        assert one["finite"]
        assert one["residuals finite"]
        assert one["params"] == found[0]["params"]


@kinds
@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_bad_gradient_around_the_freeze(kind: str, scale: str, at: int) -> None:
    """The last step of stage 1, the first of stage 2 and the one after."""
    options = {"freeze_step": 3, "scale": scale, "chunks": 2}
    case = Case(kind, steps=8, options=options, bad=((at, 0, math.nan),))
    for one in run_ranks(2, skipping, case, at):
        assert one["unchanged"]
        assert one["as if it never came"]
        assert one["finite"]


def scaled(rank: int, size: int, case: Case, at: int, unscale: bool) -> dict[str, Any]:
    """GradScaler, with an inf on rank 1 at one step, against a run without scaling and without that step."""
    params, plain = case.parameters(), case.parameters()
    optimizer, other = case.build(params, group()), case.build(plain, group())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    scaler.scale(torch.zeros(()))
    scales, kept = [], True
    for step in range(1, case.steps + 1):
        factor = scaler.get_scale()
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = None if g is None else g * factor
        if step == at:
            optimizer.begin_step()
            before = snapshot(optimizer.state_dict()), bits(params)
            if rank == 1:
                params[0].grad.view(-1)[0] = math.inf
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == at:
            kept = unchanged(before[0], snapshot(optimizer.state_dict())) and before[1] == bits(params)
        else:
            take(case, rank, other, plain, step)
        scales.append(scaler.get_scale())
    return {
        "kept": kept,
        "params": bits(params),
        "plain": bits(plain),
        "skipped": optimizer.skipped_steps,
        "scales": scales,
    }


@kinds
@STAGES
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_ called"])
def test_grad_scaler_with_an_inf_on_one_rank(kind: str, freeze_step: int, unscale: bool) -> None:
    """Scales are powers of 2, so that the run equals one without scaling bit for bit."""
    case = Case(kind, steps=9, options={"freeze_step": freeze_step})
    found = run_ranks(2, scaled, case, 6, unscale)
    for one in found:
        assert one["kept"]
        assert one["skipped"] == 1
        assert one["params"] == one["plain"] == found[0]["params"]
    assert found[0]["scales"] == found[1]["scales"]
    assert found[0]["scales"][5] == found[0]["scales"][4] / 2  # all back off where one has met inf
    assert found[0]["scales"][3] == 2.0**11  # and all grow


def scaled_without_gradients(rank: int, size: int, kind: str, infinite: bool) -> list[float]:
    """Rank 0 has none at all in a step."""
    params = parameters((3, 2), (5,))
    optimizer = build(kind, params, freeze_step=2, process_group=group())
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3), []
    scaler.scale(torch.zeros(()))
    for step in range(1, 8):
        for p in params:
            p.grad = None if (step, rank) == (5, 0) else torch.full_like(p, scaler.get_scale() * (rank + step))
        if infinite and (step, rank) == (5, 1):
            params[0].grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@adam_first
@pytest.mark.parametrize("infinite", [False, True])
def test_grad_scaler_on_a_rank_without_gradients(kind: str, infinite: bool) -> None:
    one, other = run_ranks(2, scaled_without_gradients, kind, infinite)
    assert one == other and one[4:] == ([2.0**10] * 3 if infinite else [2.0**11, 2.0**12, 2.0**12])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batch(rank: int, step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 9, generator=source), torch.randn(rows, 3, generator=source)


def accumulating(rank: int, size: int, kind: str, micro: int, options: dict[str, Any], how: str) -> list[np.ndarray]:
    """10 steps of `micro` backward passes each, over the same 8 samples a step."""
    net = Net()
    optimizer = build(kind, net.parameters(), lr=1e-2, block_size=32, process_group=group(), **options)
    model: nn.Module = net
    if how != "alone":
        model = DistributedDataParallel(net, process_group=group(), bucket_cap_mb=0.0002)
        onebit.attach(model, optimizer)
    for step in range(10):
        x, y = batch(rank, step)
        for i, (a, b) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
            loss = nn.functional.mse_loss(model(a), b) / micro
            if how == "no_sync" and i < micro - 1:
                with model.no_sync():
                    nn.functional.mse_loss(model(a), b).div(micro).backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.compressing == (options["freeze_step"] < 10)
    return arrays(list(net.parameters()))


@kinds
@STAGES
def test_accumulating_gradients_equals_one_backward_pass(kind: str, freeze_step: int) -> None:
    """With no_sync, without it, and without DDP. A sign may turn by rounding, so few elements may differ in stage 2."""
    options = {"freeze_step": freeze_step}
    whole = run_ranks(2, accumulating, kind, 1, options, "alone")
    for micro, how in ((4, "alone"), (4, "no_sync"), (4, "every pass"), (1, "every pass")):
        if (how, freeze_step) == ("every pass", 50) and micro == 4:
            continue  # DDP averages partial sums again and again: torch's rule, not ours
        for one, other in zip(whole, run_ranks(2, accumulating, kind, micro, options, how), strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=f"{micro} {how}")


def clipping(rank: int, size: int, case: Case, max_norm: float) -> dict[str, Any]:
    """Against a run whose gradients were multiplied beforehand by the coefficient that numpy finds."""
    params, plain = case.parameters(), case.parameters()
    optimizer, other = case.build(params, group()), case.build(plain, group())
    norms, expected = [], []
    for step in range(1, case.steps + 1):
        everyone = [[g.double().numpy() for g in case.gradients(r, step) if g is not None] for r in range(size)]
        if optimizer.compressing or step > case.options["freeze_step"]:
            square = np.mean([sum((g**2).sum() for g in own) for own in everyone])
        else:
            square = sum((np.mean(gs, 0) ** 2).sum() for gs in zip(*everyone, strict=True))
        coefficient = min(1.0, max_norm / (math.sqrt(square) + 1e-6))
        for p, q, g in zip(params, plain, case.gradients(rank, step), strict=True):
            p.grad, q.grad = g, None if g is None else g * coefficient
        norms.append(float(optimizer.clip_grad_norm_(max_norm)))
        expected.append(math.sqrt(square))
        optimizer.step()
        other.step()
    return {
        "norms": norms,
        "expected": expected,
        "params": arrays(params),
        "plain": arrays(plain),
        "bits": bits(params),
    }


@kinds
@STAGES
@pytest.mark.parametrize("max_norm", [3.0, 1e6])
def test_clipping_by_norm(kind: str, freeze_step: int, max_norm: float) -> None:
    found = run_ranks(2, clipping, Case(kind, steps=6, options={"freeze_step": freeze_step}), max_norm)
    for one in found:
        np.testing.assert_allclose(one["norms"], one["expected"], rtol=1e-5)
        for a, b in zip(one["params"], one["plain"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert one["bits"] == found[0]["bits"]


@kinds
def test_zero_grad_drops_a_clip_coefficient_that_no_step_used(kind: str) -> None:
    case = Case(kind, steps=3, options={"freeze_step": 50})
    clipped, plain = case.parameters(), case.parameters()
    one, other = case.build(clipped), case.build(plain)
    for p, g in zip(clipped, case.gradients(0, 9), strict=True):
        p.grad = g
    one.clip_grad_norm_(1e-3)
    one.zero_grad()
    run(case, 0, one, clipped, 1, 3)
    run(case, 0, other, plain, 1, 3)
    assert bits(clipped) == bits(plain)


def before_step_2(case: Case) -> tuple[list[nn.Parameter], Any, bytes]:
    """Parameters with the gradients of step 2, the optimizer after step 1, and the parameters' bits."""
    params = case.parameters()
    optimizer = case.build(params)
    take(case, 0, optimizer, params, 1)
    for p, g in zip(params, case.gradients(0, 2), strict=True):
        p.grad = g
    return params, optimizer, bits(params)


@kinds
def test_clipping_does_not_hide_gradients_that_are_not_finite(kind: str) -> None:
    params, optimizer, before = before_step_2(Case(kind, options={"freeze_step": 1}, bad=((2, 0, math.nan),)))
    assert math.isnan(optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    assert bits(params) == before
    assert optimizer.skipped_steps == 1


@kinds
def test_gradients_changed_after_clipping_are_checked_again(kind: str) -> None:
    params, optimizer, before = before_step_2(Case(kind, options={"freeze_step": 1}))
    optimizer.clip_grad_norm_(1.0)
    params[0].grad.mul_(math.nan)
    optimizer.step()
    assert bits(params) == before


@kinds
@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_max_norm_that_is_not_positive_is_an_error(kind: str, max_norm: float) -> None:
    case = Case(kind)
    with pytest.raises(ValueError, match="max_norm"):
        case.build(case.parameters()).clip_grad_norm_(max_norm)


@kinds
def test_a_closure_runs_with_gradients_on(kind: str) -> None:
    case = Case(kind)
    params = case.parameters()
    optimizer = case.build(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


class Counting(LocalTransport):
    """Counts what a step sends."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_to_all(self, out: torch.Tensor, sent: torch.Tensor, phase: str) -> Any:
        self.calls.append("all_to_all")
        return super().all_to_all(out, sent, phase)

    def all_gather(self, out: torch.Tensor, sent: torch.Tensor, phase: str) -> Any:
        self.calls.append("all_gather")
        return super().all_gather(out, sent, phase)

    def all_max(self, values: torch.Tensor, phase: str) -> None:
        self.calls.append(f"all_max of {values.numel()}")


@kinds
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_step_of_stage_2_is_two_collectives_a_chunk_and_one_number(kind: str, chunks: int) -> None:
    case, transport = Case(kind, options={"freeze_step": 2, "chunks": chunks}), Counting()
    params = case.parameters()
    optimizer = case.build(params, transport)
    run(case, 0, optimizer, params, 1, 4)
    transport.calls.clear()
    take(case, 0, optimizer, params, 5)
    assert sorted(transport.calls) == ["all_gather"] * chunks + ["all_max of 1"] + ["all_to_all"] * chunks

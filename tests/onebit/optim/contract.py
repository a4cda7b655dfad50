"""What holds for every optimizer, as work for ranks: each tries one case, and returns where the rank's parameters end.

tests/onebit/optim/test_contract.py has the library's optimizers do it, test_own_algorithm.py one of a user's.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from onebit.optim.flat_state import pieces
from onebit.optim.param_groups import is_compressed
from tests import internals
from tests.onebit.optim.simulation import group_or_none
from tests.onebit.runs import Case, arrays, bits, clip_as_asked, on_warnings, run, same, snapshot, take, unchanged
from tests.oracle.mean_norm import MeanNorm


def options(case: Any, **more: Any) -> Any:
    return case.but(options={**case.options, **more})


def started(case: Case, steps: int, rank: int = 0, size: int = 1) -> tuple[list[nn.Parameter], Any]:
    """Build an optimizer and take so many steps."""
    params, optimizer = case.made(group_or_none(size))
    run(case, rank, optimizer, params, 1, steps)
    return params, optimizer


def give(case: Case, params: list[nn.Parameter], step: int, rank: int = 0) -> None:
    """The gradients of a step."""
    for p, g in zip(params, case.gradients(rank, step), strict=True):
        p.grad = g


def backward(case: Case, rank: int, optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    """The same gradients, by autograd."""
    optimizer.zero_grad()
    grads = case.gradients(rank, step)
    terms = [(p * g).sum() for p, g in zip(params, grads, strict=True) if g is not None and p.numel()]
    sum(terms[1:], terms[0]).backward()


def skips(rank: int, size: int, case: Case, tries: tuple[tuple[int, int, float], ...]) -> bytes:
    """Skip some steps, (step, rank, value), before which that rank's gradient has a value that is not finite: the step
    is not taken, nothing changes, and the run is one that never saw it."""
    (params, optimizer), before = started(case, 0, rank, size), {step: of for step, *of in tries}
    for step in range(1, case.steps + 1):
        if step in before:
            optimizer.begin_step()  # the freeze, where it is due, is no part of the skipped step
            before_it, values, schedule = memory(optimizer), bits(params), _schedule(optimizer)
            backward(case.but(bad=((step, *before[step]),)), rank, optimizer, params, step)
            clip_as_asked(case, optimizer)
            optimizer.step()
            assert bits(params) == values, f"the step before step {step} was taken"
            assert same(before_it, memory(optimizer)), f"before step {step}"
            assert _schedule(optimizer) == schedule
        backward(case, rank, optimizer, params, step)
        clip_as_asked(case, optimizer)
        optimizer.step()
    assert optimizer.skipped_steps == len(tries) and optimizer.compressing
    assert optimizer.tried_steps == case.steps + len(tries)
    others, other = started(case, case.steps, rank, size)
    assert bits(params) == bits(others) and same(memory(optimizer), memory(other))
    for each in (optimizer, other):
        each.synchronize()
    assert unchanged(optimizer.state_dict(), other.state_dict())
    assert all(bool(p.isfinite().all()) for p in params)
    return bits(params)


def memory(optimizer: Any) -> Any:
    """What a run goes on from on this rank, as it is: a state of one process alone is what it goes on from then."""
    optimizer.catch_up()
    reached = internals.progress(optimizer)
    found: list[Any] = [{k: v for k, v in reached.items() if k not in ("skipped_steps", "wire_bytes")}]
    for state in internals.states(optimizer):
        found.append({name: state[name] for name in state.fields if name != "residual"})
    for reducer, exchange in zip(internals.reducers(optimizer), internals.exchanges(optimizer), strict=True):
        found.append(reducer.momentum())
        kept = [(exchange.layout.parts(exchange.node.rank, exchange.node.size), exchange.residual)]
        if exchange.server_residual is not None:
            kept.append((reducer.served_spans, exchange.server_residual))
        for spans, residual in kept:
            left_out = residual.left_out()
            found += [[e for _, e in pieces(spans, left_out, i)] for i in range(len(reducer.state.params))]
    return snapshot(found)


def resumes(rank: int, size: int, case: Case, stops: tuple[int, ...], states: bool = True) -> bytes:
    """Synchronize after each of these steps, so that ranks have one state. All load what rank 0 has written to a file:
    the same state at once, and the same run to its end. Skipped steps (`case.bad`) are part of it. states: whether
    states are compared; a load clears what a mask holds."""
    with on_warnings("ignore", message="elements without a variance"):
        (params, optimizer), files = started(case, 0, rank, size), {}
        for step in range(1, case.steps + 1):
            take(case, rank, optimizer, params, step)
            if step in stops:
                optimizer.synchronize()
                files[step] = io.BytesIO()
                torch.save([[p.detach() for p in params], optimizer.state_dict(), _schedule(optimizer)], files[step])
        optimizer.synchronize()
        for stop, file in files.items():
            own, first = _read(optimizer, file.getvalue()), _read(optimizer, from_rank_0(file.getvalue(), size))
            assert same(own, first), f"ranks have other states after step {stop}"
            values, state, schedule = first
            again = [nn.Parameter(v) for v in values]
            other = case.build(again, group_or_none(size))
            other.load_state_dict(state)
            assert not states or same(snapshot(other.state_dict()), own[1])
            assert _schedule(other) == schedule
            for step in range(stop + 1, case.steps + 1):
                take(case, rank, other, again, step)
                if step in stops:
                    other.synchronize()
            other.synchronize()
            assert bits(again) == bits(params), f"resumed after step {stop}"
            if states:
                assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict())), f"after step {stop}"
        return bits(params)


def from_rank_0(value: Any, size: int) -> Any:
    """What rank 0 has, on every rank."""
    sent = [value]
    if size > 1:
        dist.broadcast_object_list(sent, src=0, group=group_or_none(size))
    return sent[0]


def _read(optimizer: Any, content: bytes) -> Any:
    """What `resumes` has written."""
    with torch.serialization.safe_globals([type(_schedule(optimizer))]):
        return torch.load(io.BytesIO(content), weights_only=True)


def clips(rank: int, size: int, case: Case, max_norm: float) -> bytes:
    """The norm is that of the equations, a second clip finds what the first has left, and steps are those of gradients
    that were multiplied beforehand. Every third step is not clipped."""
    (params, optimizer), (plain, other) = (started(case, 0, rank, size) for _ in range(2))
    apart, coefficients = [not is_compressed(case.groups[case.group_of(p)]) for p in range(len(params))], []
    mean_norm = MeanNorm(size // case.each)
    for step in range(1, case.steps + 1):
        give(case, params, step, rank)
        coefficient = 1.0
        if step % 3:
            found = float(optimizer.clip_grad_norm_(max_norm))
            full = internals.coming_kind(optimizer) == "full"
            squares = _squares(case, size, step, [full or own for own in apart])
            norm = mean_norm.norm(squares, full)
            mean_norm.take(squares, full)
            np.testing.assert_allclose(found, norm, rtol=1e-5)
            np.testing.assert_allclose(float(optimizer.clip_grad_norm_(math.inf)), min(norm, max_norm), rtol=1e-4)
            coefficient = min(1.0, max_norm / (norm + 1e-6))
            coefficients.append(coefficient)
        for p, g in zip(plain, case.gradients(rank, step), strict=True):
            p.grad = None if g is None else g * coefficient
        optimizer.step()
        other.step()
    assert optimizer.compressing and (max(coefficients) < 1 or min(coefficients) == 1)
    for a, b in zip(arrays(params), arrays(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return bits(params)


def scales(rank: int, size: int, case: Case, unscale: bool) -> tuple[bytes, list[float]]:
    """Compare every step with a GradScaler to the one without. Also returns the rank's scales; powers of 2, which
    change no bit."""
    (params, optimizer), (plain, other) = (started(case, 0, rank, size) for _ in range(2))
    scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4), []
    scaler.scale(torch.zeros(()))
    for step in range(1, case.steps + 1):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = None if g is None else g * scaler.get_scale()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        take(case, rank, other, plain, step)
        assert bits(params) == bits(plain), f"step {step}"
        found.append(scaler.get_scale())
    assert optimizer.skipped_steps == other.skipped_steps and optimizer.compressing
    assert optimizer.tried_steps == case.steps  # also on a rank that left a local step out
    return bits(params), found


def _squares(case: Case, size: int, step: int, averaged: list[bool]) -> float:
    """The square of the averaged gradient where it is averaged, elsewhere the mean of the ranks' squares."""
    nodes = [case.node_gradients(node, step) for node in range(size // case.each)]
    square = 0.0
    for mean, of in zip(averaged, zip(*nodes, strict=True), strict=True):
        own = [np.asarray(g, dtype=np.float64) for g in of]
        square += float((np.mean(own, 0) ** 2).sum() if mean else np.mean([(g**2).sum() for g in own]))
    return square


def _schedule(optimizer: Any) -> Any:
    """What the coming steps of 0/1 Adam are."""
    return getattr(optimizer, "schedule", None)

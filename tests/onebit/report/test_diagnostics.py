"""What diagnostics say, against the state they speak of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from tests import internals
from tests.checkpoints import Run
from tests.onebit.runs import Case, on_ranks, step_by
from tests.ranks import group


def sizes(state: Any, i: int, m: torch.Tensor) -> float:
    """The mean over blocks of the mean size of those elements that have a variance."""
    takes_part = (state.view("denominator" if "denominator" in state else "exp_avg_sq", i) != 0).view(-1).split(64)
    blocks = zip(m.view(-1).split(64), takes_part, strict=True)
    return float(np.mean([float(part[live].abs().mean()) for part, live in blocks]))


@pytest.mark.parametrize(
    ("kind", "scale", "reply"),
    [
        ("OneBitAdam", "block", 1),
        ("OneBitAdam", "tensor", 1),
        ("OneBitLamb", "block", "direct"),
        ("OneBitLamb", "block", 1),
        ("ZeroOneAdam", "tensor", 1),
    ],
)
@on_ranks(3)
def test_norms_and_scales(rank: int, kind: str, scale: str, reply: Any) -> None:
    options = {"freeze_step": 4, "scale": scale, "chunks": 2, "reply": reply, "zero_variance": "hold"}
    case = Case(kind, options=options, untouched=((0, 2, 8),) if kind == "OneBitLamb" and reply == 1 else ())
    run = Run(case, 0, rank, group())
    optimizer, params = run.optimizer, run.params
    first = {"variance_norm": 0.0, **({"coefficient": 1.0} if kind == "OneBitLamb" else {})}
    assert all(own == first for own in optimizer.diagnostics().values())
    run.on(1, 3)

    def said(name: str) -> list[float]:
        return [own[name] for own in optimizer.diagnostics().values()]

    def norms(tensors: list[torch.Tensor]) -> list[float]:
        return [float(tensor.norm()) for tensor in tensors]

    variances = [optimizer.state[p]["exp_avg_sq"] for p in params]
    np.testing.assert_allclose(said("variance_norm"), norms(variances), rtol=1e-5)
    assert not any("residual_norm" in own for own in optimizer.diagnostics().values())
    if kind == "OneBitLamb":
        assert said("coefficient") == internals.states(optimizer)[0]["coefficient"].tolist()
    run.on(4, 8)
    [reducer], [exchange] = internals.reducers(optimizer), internals.exchanges(optimizer)
    state, e = reducer.state, exchange.residual.left_out()
    left_out = [state.cut(e, i) for i in range(len(params))]
    assert all(optimizer.state[p]["residual"].shape == p.shape for p in params)
    np.testing.assert_allclose(said("residual_norm"), norms(left_out), rtol=1e-5)
    assert all(size > 0 for size in said("momentum_scale"))
    if reply != "direct":  # whose scales are those of messages, and not of their mean
        expected = [sizes(state, i, m) for i, m in enumerate(reducer.momentum())]
        np.testing.assert_allclose(said("momentum_scale"), expected, rtol=1e-5)
    assert all(("ratio" in own) == (kind == "OneBitLamb") for own in optimizer.diagnostics().values())
    server, squares = exchange.gathered_server_residual(), torch.tensor(said("server_residual_norm")).square()
    internals.topology(optimizer).replicas.all_sum(squares, "adding up shards in a test").wait()
    by_servers = [state.cut(torch.zeros_like(e) if server is None else server, i) for i in range(len(params))]
    np.testing.assert_allclose(squares.sqrt(), norms(by_servers), rtol=5e-5)


def test_a_parameter_without_elements_has_numbers() -> None:
    params = [nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(5))]
    optimizer = onebit.OneBitAdam(params, freeze_step=1)
    for _ in range(3):
        step_by(optimizer)
    assert all(math.isfinite(x) for row in optimizer.diagnostics().values() for x in row.values())

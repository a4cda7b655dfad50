"""What is lost with a rank that died: what its residuals held, which no other rank knows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from onebit.elastic.members import Members
from onebit.kernels.log import to_log
from onebit.optim.run import Run


def warn_of_losses(run: Run, members: Members) -> None:
    """One log line, on the first rank that stays, which tells how large its own residuals are. run: before."""
    setup, state, ranks, gone = run.setup, run.state, members.ranks_before, members.gone
    if not gone or not state.reducers or members.everyone.rank != members.stayers[0]:
        return
    exchanges = [reducer.exchange for reducer in state.reducers]
    dense = state.momentum_at == "exp_avg"
    parts = ((part, reducer) for part in state.parts if (reducer := part.reducer) is not None)
    m = _norm([m for p, r in parts for m in (p.last_momentum(setup.algorithm) if dense else r.momentum())])
    own = [exchange.residual.left_out() for exchange in exchanges]
    served = [exchange.server_residual.left_out() for exchange in exchanges if exchange.server_residual is not None]
    names = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
    text = (
        f"{names} of {ranks} did not come along, and what compression had left out there is lost: the residual, which "
        f"counts 1 / {setup.topology.nodes} in the mean. Rank {setup.topology.residual_index}, which stays, has one of "
        f"{_size(own, m)}"
    )
    if served:
        text += f", and one of {_size(served, m)} for the part that it averages"
    if not state.synchronized:
        text += f". The {state.local_steps_taken} steps that they took since the last exchange are lost, too"
    to_log(logging.WARNING, "%s", text)


def _norm(parts: Sequence[Tensor]) -> float:
    return float(torch.stack([part.double().square().sum() for part in parts]).sum().sqrt())


def _size(parts: Sequence[Tensor], m: float) -> str:
    norm = _norm(parts)
    return f"{norm / m:.2g} times the momentum's norm" if m > 0 else f"norm {norm:.2g} (there is no last momentum)"

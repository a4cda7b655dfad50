"""One state of those of all ranks, and where momentum is between two steps.

A save makes one state of those of all ranks (`merge`), from which the run goes on as one that loads it:

    e_i = mean_j(e_j) + E;  E = 0;  exp_avg = m;  no message
    and as the next step begins, if it sends 1 bit an element:  e_i = e_i + beta1 m

The sum beta1 m + e is what it was. Until that step has ended, `separate_momentum` takes m out of e again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onebit.optim.algorithm import Kind
from onebit.optim.fields import FOLDED_MOMENTUM, LAST_MOMENTUM, MOMENTUM, RESIDUAL
from onebit.optim.memory_order import flattened, in_shape
from onebit.optim.param_groups import betas_of
from onebit.optim.setup import Setup
from onebit.optim.state import Part, State


def merge(setup: Setup, state: State) -> None:
    """Make one state of those of all ranks, as it is saved and loaded. A collective call of stage 2.

    Where it does not end, since a rank died, this rank has its own residuals still, or the mean, piece by piece.
    Messages are as they were: others may need them to finish the exchange before, see onebit.elastic.halfway.
    """
    separate_momentum(setup, state)
    for part in state.compressed_parts:
        assert part.reducer is not None
        exchange = part.reducer.exchange
        exchange.merge_residuals(setup.options.gradient_dtype)
        if part.state.slices > 1:
            part.gathered = exchange.gathered_residual().cpu()
    for part in state.compressed_parts:
        _make_momentum_dense(setup, part)
    state.merged, state.momentum_at = True, "exp_avg"


def _make_momentum_dense(setup: Setup, part: Part) -> None:
    """Move m to the field "exp_avg": no message has it any more."""
    state, reducer = part.state, part.reducer
    assert reducer is not None
    if LAST_MOMENTUM.name in state:
        state.rename(LAST_MOMENTUM.name, MOMENTUM)
    elif MOMENTUM.name not in state:
        setup.algorithm.last_momentum(state, reducer, state.add(MOMENTUM))
    reducer.exchange.clear_replies(torch.zeros(1, dtype=torch.int32, device=state.device))
    part.local = None


def separate_momentum(setup: Setup, state: State) -> None:
    """Take m out of the residual again, where no step was taken since it was added."""
    if state.momentum_at != "folded_momentum":
        return
    for part in state.compressed_parts:
        if part.reducer is not None and FOLDED_MOMENTUM.name in part.state:
            part.reducer.add_to_residual(part.state[FOLDED_MOMENTUM.name], [-b for b in _beta1s(setup, part)])
            part.state.rename(FOLDED_MOMENTUM.name, MOMENTUM)
    state.momentum_at = "exp_avg"


def use_momentum(setup: Setup, state: State, kind: Kind) -> None:
    """Put m where a step of this kind reads it, as the step begins. A full step reads "exp_avg" itself."""
    state.merged = False
    if state.momentum_at != "exp_avg":
        return
    for part in state.compressed_parts:
        part.gathered = None
        if kind == "1 bit":
            _fold_momentum(setup, part)
        elif kind != "full":
            assert part.reducer is not None
            setup.algorithm.start_from_momentum(part.state, part.reducer)
            part.state.rename(MOMENTUM.name, LAST_MOMENTUM)
    if kind != "full":
        folded = any(FOLDED_MOMENTUM.name in part.state for part in state.compressed_parts)
        state.momentum_at = "folded_momentum" if folded else "messages"


def _fold_momentum(setup: Setup, part: Part) -> None:
    """Compute e = e + beta1 m, and keep m where it is needed."""
    assert part.reducer is not None
    part.reducer.add_to_residual(part.state[MOMENTUM.name], _beta1s(setup, part))
    if setup.algorithm.needs_previous_momentum or setup.options.elastic:
        part.state.rename(MOMENTUM.name, FOLDED_MOMENTUM)
    else:
        part.state.remove(MOMENTUM.name)


def _beta1s(setup: Setup, part: Part) -> list[float]:
    return [betas_of(setup.groups[group])[0] for group in part.state.groups]


def drop_dense_momentum(state: State) -> None:
    """Forget m of the step before: one was taken since, and messages have its momentum."""
    if state.momentum_at == "messages":
        return
    for part in state.compressed_parts:
        for name in {FOLDED_MOMENTUM.name, MOMENTUM.name} & part.state.fields.keys():
            part.state.remove(name)
    state.momentum_at = "messages"


def residual_shares(setup: Setup, state: State) -> dict[Tensor, Tensor]:
    """Return what this rank has left out of the mean of every parameter, fp32, in the parameter's shape."""
    found = {}
    separate_momentum(setup, state)
    for reducer in state.reducers:
        flat = reducer.state
        for i, p in enumerate(flat.params):
            found[p] = in_shape(reducer.residual_share(i), flat.shapes[i], flat.orders[i])
    return found


def add_residual_shares(state: State, shares: Mapping[Tensor, Tensor]) -> None:
    """Add `residual_shares`, times the number of ranks that send, to the residuals, after a change of ranks. With two
    levels each rank of a node gets what lies in its slice: then a collective call."""
    state.merged = False
    for part in state.compressed_parts:
        assert part.reducer is not None
        flat, exchange = part.state, part.reducer.exchange
        for i, p in enumerate(flat.params):
            own = torch.zeros(flat.numels[i], dtype=torch.float32, device=flat.device)
            if p in shares:
                own.add_(flattened(shares[p].to(flat.device), flat.orders[i]), alpha=exchange.transport.size)
            if exchange.node.size > 1:
                exchange.node.all_sum(own, "adding up the residuals of a node (all-reduce)").wait()
            for span, e in flat.parts_of(RESIDUAL.name, i):
                e.add_(own[span])

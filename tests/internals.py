"""Tests reach here, and nowhere else, into private members and into the objects that an optimizer is made of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.checkpoint import schema
from onebit.collectives.exchange import Exchange
from onebit.collectives.topology import Topology
from onebit.kernels.data.wire import Norm
from onebit.optim.algorithm import Algorithm, Kind, LocalSteps
from onebit.optim.flat_state import FlatState
from onebit.optim.mean_norm import MeanNorm
from onebit.optim.options import Options
from onebit.optim.reducer import MomentumReducer
from onebit.optim.stages import Stages
from onebit.optim.state import State
from onebit.parallel.watch import shared_tensors


def options(optimizer: Any) -> Options:
    return optimizer.run.setup.options


def algorithm(optimizer: Any) -> Algorithm:
    return optimizer.run.setup.algorithm


def topology(optimizer: Any) -> Topology:
    return optimizer.run.setup.topology


def norm(optimizer: Any) -> Norm:
    """Return what its scales are made of."""
    return optimizer.run.setup.norm


def window(optimizer: Any) -> int:
    """Return the steps between what its freeze rule compares."""
    return optimizer.run.setup.window


def device(optimizer: Any) -> torch.device:
    return optimizer.run.setup.device


def state(optimizer: Any) -> State:
    """Return what changes while it trains; a load puts another in its place."""
    return optimizer.run.state


def states(optimizer: Any) -> list[FlatState]:
    return optimizer.run.state.states


def uncompressed(optimizer: Any) -> list[FlatState]:
    return optimizer.run.state.uncompressed


def reducers(optimizer: Any) -> list[MomentumReducer]:
    return optimizer.run.state.reducers


def exchanges(optimizer: Any) -> list[Exchange]:
    """Return those of its reducers."""
    return [reducer.exchange for reducer in reducers(optimizer)]


def left_out(optimizer: Any) -> list[Tensor]:
    """Copy the residuals of this rank: of the messages that it sends, and of the means that it makes."""
    return [e.left_out().clone() for exchange in exchanges(optimizer) for e in exchange.residuals.values()]


def last_momentum(optimizer: Any) -> list[list[Tensor]]:
    """Return m of the last step of stage 2, a tensor a parameter, of each state that is compressed."""
    return [part.last_momentum(optimizer.run.setup.algorithm) for part in optimizer.run.state.compressed_parts]


def local_steps(optimizer: Any) -> list[LocalSteps | None]:
    """Return those of each of its states."""
    return [part.local for part in optimizer.run.state.parts]


def stages(optimizer: Any) -> Stages:
    return optimizer.run.state.stages


def mean_norm(optimizer: Any) -> MeanNorm:
    return optimizer.run.state.mean_norm


def ranks_agree(optimizer: Any) -> bool:
    """Tell whether all ranks were found to have the same model and options."""
    return optimizer.run.state.ranks_agree


def progress(optimizer: Any) -> dict[str, Any]:
    """Return what a checkpoint says of how far a run has come."""
    return schema.progress(optimizer.run)


def coming_kind(optimizer: Any) -> Kind:
    """Return the kind of the coming step."""
    return optimizer.run.kind()


def hyper(optimizer: Any) -> Tensor:
    """Write and return the numbers of the coming step."""
    return optimizer.gradients.write_hyper(optimizer.run)


def shared(optimizer: Any) -> list[tuple[str, Tensor]]:
    """Return all that must be the same on all ranks, by name."""
    return list(shared_tensors(optimizer.run))


def check_ranks(optimizer: Any) -> None:
    """Compare what ranks must share, as the watch does every so many steps: a DivergenceError if they differ."""
    optimizer.watch.check(optimizer.run)


def join_flight(optimizer: Any) -> None:
    """Wait for the thread that exchanges messages while backward computes."""
    optimizer.overlap._flight._thread.join()


def forget_process_group(optimizer: Any) -> None:
    """Make the optimizer as if it was built with process_group=None, before there was a default group."""
    optimizer.rank_finder._process_group = None


def let_groups_share_a_loop() -> None:
    """Give all groups of a process one thread: each of Gloo's looks a hundred times a second whether a message came."""
    gloo: Any = dist.ProcessGroupGloo
    own, device = gloo.__init__, gloo.create_default_device()

    def with_device(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        options = gloo._Options()
        options._timeout, options._devices = timeout, [device]
        own(self, store, rank, size, options)

    gloo.__init__ = with_device

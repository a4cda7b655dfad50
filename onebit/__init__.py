"""Communication-compressed training: what crosses the network is 1 bit an element."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onebit.checkpoint.merge import merge_states
from onebit.checkpoint.to_adamw import adamw_state
from onebit.collectives import CollectiveError, CompressedAllReduce
from onebit.optim.algorithm import Algorithm
from onebit.optim.fields import Field
from onebit.optim.freeze import FreezeRule
from onebit.optimizers.of_algorithms import OneBitAdam, OneBitLamb, ZeroOneAdam
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.attach import attach
from onebit.parallel.ddp_hook import OneBitState, onebit_hook
from onebit.parallel.watch import DivergenceError

if TYPE_CHECKING:
    from onebit.checkpoint.room import make_room
    from onebit.checkpoint.save_load import load, save

__all__ = [
    "Algorithm",
    "CollectiveError",
    "CompressedAllReduce",
    "DivergenceError",
    "Field",
    "FreezeRule",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitOptimizer",
    "OneBitState",
    "ZeroOneAdam",
    "adamw_state",
    "attach",
    "load",
    "make_room",
    "merge_states",
    "onebit_hook",
    "save",
]

_LATE = {
    "load": "onebit.checkpoint.save_load",
    "make_room": "onebit.checkpoint.room",
    "save": "onebit.checkpoint.save_load",
}


def __getattr__(name: str) -> Any:
    """Those that need torch.distributed.checkpoint, on their first use: it takes a second to import."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'onebit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""Communication-compressed training: what crosses the network is 1 bit an element."""

from onebit.adam import OneBitAdam
from onebit.attach import attach
from onebit.checkpoint import load, save
from onebit.collectives import CollectiveError, CompressedAllReduce
from onebit.ddp import OneBitState, onebit_hook
from onebit.diagnostics import History
from onebit.lamb import OneBitLamb
from onebit.merge import merge_states
from onebit.watch import DivergenceError

__all__ = [
    "CollectiveError",
    "CompressedAllReduce",
    "DivergenceError",
    "History",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitState",
    "attach",
    "load",
    "merge_states",
    "onebit_hook",
    "save",
]

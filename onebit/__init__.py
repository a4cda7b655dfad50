"""Communication-compressed training: what crosses the network is 1 bit an element."""

from onebit.checkpoint.merge import merge_states
from onebit.checkpoint.save_load import load, save
from onebit.collectives import CollectiveError, CompressedAllReduce
from onebit.optim.adam import OneBitAdam
from onebit.optim.lamb import OneBitLamb
from onebit.parallel.attach import attach
from onebit.parallel.ddp_hook import OneBitState, onebit_hook
from onebit.parallel.watch import DivergenceError
from onebit.report.diagnostics import History

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

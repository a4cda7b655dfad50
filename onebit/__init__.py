"""Communication-compressed training: what crosses the network is 1 bit an element."""

from onebit.checkpoint.merge import merge_states
from onebit.checkpoint.save_load import load, save
from onebit.collectives import CollectiveError, CompressedAllReduce
from onebit.optim.adam import OneBitAdam
from onebit.optim.algorithm import Algorithm
from onebit.optim.fields import Field
from onebit.optim.lamb import OneBitLamb
from onebit.optim.optimizer import OneBitOptimizer
from onebit.parallel.attach import attach
from onebit.parallel.ddp_hook import OneBitState, onebit_hook
from onebit.parallel.watch import DivergenceError
from onebit.report.history import History

__all__ = [
    "Algorithm",
    "CollectiveError",
    "CompressedAllReduce",
    "DivergenceError",
    "Field",
    "History",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitOptimizer",
    "OneBitState",
    "attach",
    "load",
    "merge_states",
    "onebit_hook",
    "save",
]

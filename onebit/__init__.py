"""Communication-compressed training: what crosses the network is 1 bit an element."""

from onebit.collectives import CompressedAllReduce
from onebit.ddp import OneBitState, onebit_hook

__all__ = ["CompressedAllReduce", "OneBitState", "onebit_hook"]

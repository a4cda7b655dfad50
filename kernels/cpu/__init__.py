"""The passes for CPU tensors: in place, in tiles that stay in the cache, each operation on all of torch's threads.

A sweep over a tile in the cache costs a third of one over memory, so a pass is as fast as its sweeps are few: results
are built where they will lie, a block's scale is multiplied by its factors before it is applied to the elements, and
checks look at one number a block. Comparing, packing and table look-up are numpy's, which is faster at them on one
thread.
"""

from onebit.kernels.cpu.adam import adam_update, adam_warmup
from onebit.kernels.cpu.codec import average, compress, decode
from onebit.kernels.cpu.lamb import lamb_statistics, lamb_warmup
from onebit.kernels.cpu.scan import scan

__all__ = [
    "adam_update",
    "adam_warmup",
    "average",
    "compress",
    "decode",
    "lamb_statistics",
    "lamb_warmup",
    "scan",
]

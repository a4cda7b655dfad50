"""The passes for CPU tensors: loops over blocks, compiled by Numba when a pass is first used."""

from onebit.kernels.cpu.adam import adam_update, adam_warmup
from onebit.kernels.cpu.codec import average, compress, decode, restore
from onebit.kernels.cpu.lamb import lamb_warmup
from onebit.kernels.cpu.lamb_statistics import lamb_statistics
from onebit.kernels.cpu.limit import step_limit, step_squares
from onebit.kernels.cpu.local_steps import zero_one_local, zero_one_sync
from onebit.kernels.cpu.scan import scan
from onebit.kernels.cpu.zero_one import zero_one_full, zero_one_inverses, zero_one_update

__all__ = [
    "adam_update", "adam_warmup", "average", "compress", "decode", "lamb_statistics", "lamb_warmup", "restore",
    "scan", "step_limit", "step_squares", "zero_one_full", "zero_one_inverses", "zero_one_local", "zero_one_sync",
    "zero_one_update",
]  # fmt: skip

"""The Triton passes under one name, as `cpu` has them."""

from onebit.kernels.gpu.adam import adam_update, adam_warmup
from onebit.kernels.gpu.codec import average, compress, decode
from onebit.kernels.gpu.lamb import lamb_statistics, lamb_warmup
from onebit.kernels.gpu.limit import step_limit, step_squares
from onebit.kernels.gpu.local_steps import zero_one_local, zero_one_sync
from onebit.kernels.gpu.restore import restore
from onebit.kernels.gpu.scan import scan
from onebit.kernels.gpu.zero_one import zero_one_full, zero_one_inverses, zero_one_update

__all__ = [
    "adam_update",
    "adam_warmup",
    "average",
    "compress",
    "decode",
    "lamb_statistics",
    "lamb_warmup",
    "restore",
    "scan",
    "step_limit",
    "step_squares",
    "zero_one_full",
    "zero_one_inverses",
    "zero_one_local",
    "zero_one_sync",
    "zero_one_update",
]

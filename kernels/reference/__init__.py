"""Every pass in a few lines of plain PyTorch, on any device: what the other two backends are tested against."""

from onebit.kernels.reference.adam import adam_update, adam_warmup
from onebit.kernels.reference.codec import average, compress, decode, restore
from onebit.kernels.reference.lamb import lamb_statistics, lamb_warmup
from onebit.kernels.reference.local_steps import zero_one_local, zero_one_sync
from onebit.kernels.reference.scan import scan
from onebit.kernels.reference.zero_one import zero_one_full, zero_one_update

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
    "zero_one_full",
    "zero_one_local",
    "zero_one_sync",
    "zero_one_update",
]

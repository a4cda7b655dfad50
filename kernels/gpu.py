"""The Triton passes under one name, as `cpu` and `reference` have them."""

from onebit.kernels.adam import adam_update, adam_warmup
from onebit.kernels.average import average, decode
from onebit.kernels.compress import compress
from onebit.kernels.lamb import lamb_statistics, lamb_warmup
from onebit.kernels.scan import scan

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

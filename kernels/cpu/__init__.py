"""The passes for CPU tensors: in place, in tiles that stay in the cache."""

from onebit.kernels.cpu.passes import (
    adam_update,
    adam_warmup,
    average,
    compress,
    decode,
    lamb_statistics,
    lamb_warmup,
    scan,
)

__all__ = [
    "adam_update", "adam_warmup", "average", "compress", "decode", "lamb_statistics", "lamb_warmup", "scan",
]  # fmt: skip

"""Every pass in a few lines of plain PyTorch: what the other backends are held against."""

from onebit.kernels.reference.passes import (
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

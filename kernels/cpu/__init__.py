"""The passes for CPU tensors: loops over blocks, compiled by Numba when a pass is first used."""

from torch import Tensor

from onebit.kernels.cpu import adam, codec, codes, lamb, lamb_statistics, limit, local_steps, scan, zero_one
from onebit.kernels.data.kept import Kept
from onebit.kernels.passes import Pass

PASSES = (
    adam.PASSES | codec.PASSES | codes.PASSES | lamb.PASSES | lamb_statistics.PASSES | limit.PASSES | local_steps.PASSES
    | scan.PASSES | zero_one.PASSES
)  # fmt: skip

__all__ = ["PASSES", "restore", "run"]


def run(work: Pass) -> None:
    """Run a pass where its tensors lie."""
    PASSES[type(work)](work)


def restore(kept: Kept, flags: Tensor) -> None:
    """`onebit.kernels.backends.Backend.restore`."""
    if int(flags):
        for now, before in kept.pairs:
            now.copy_(before)

"""The Triton passes."""

from onebit.kernels.gpu import adam, codec, codes, lamb, limit, local_steps, scan, zero_one
from onebit.kernels.gpu.restore import restore
from onebit.kernels.passes import Pass

PASSES = (
    adam.PASSES | codec.PASSES | codes.PASSES | lamb.PASSES | limit.PASSES | local_steps.PASSES | scan.PASSES
    | zero_one.PASSES
)  # fmt: skip

__all__ = ["PASSES", "restore", "run"]


def run(work: Pass) -> None:
    """Run a pass on the device of its tensors."""
    PASSES[type(work)](work)

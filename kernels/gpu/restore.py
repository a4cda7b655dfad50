"""restore: what a step has changed is put back on the device, without the host's knowledge of whether it has to be.

    now = kept, where flags[0] is not 0

Programs read the flag and end where it is 0, which is nearly always: no bytes an element.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import launch

WORDS = 2048  # of 4 bytes, a program at a time


@tiles.entry
def restore_kernel(now, kept, flags, words, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr):
    if tl.load(flags) != 0:
        for r in range(BLOCKS_PER_PROGRAM):
            first = (tl.program_id(0) * BLOCKS_PER_PROGRAM + r).to(tl.int64) * TILE
            i = first + tl.arange(0, TILE)
            tl.store(now + i, tl.load(kept + i, mask=i < words), mask=i < words)


def restore(now: Tensor, kept: Tensor, flags: Tensor) -> None:
    """`onebit.kernels.backends.Backend.restore` in one launch."""
    now, kept = (each.view(-1).view(torch.int32) for each in (now, kept))
    arguments = {"now": now, "kept": kept, "flags": flags, "words": now.numel(), "TILE": WORDS}
    launch(restore_kernel, triton.cdiv(now.numel(), WORDS), arguments, now, torch.float32)

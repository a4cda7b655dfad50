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

from onebit.kernels.data.kept import Kept
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import launch

WORDS = 2048  # of 4 bytes, a program at a time


@tiles.entry
def restore_kernel(table, pairs, flags, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr):
    if tl.load(flags) != 0:
        for r in range(BLOCKS_PER_PROGRAM):
            tile = (tl.program_id(0) * BLOCKS_PER_PROGRAM + r).to(tl.int64)
            for k in range(pairs):  # whose tiles follow one another
                row = table + 3 * k
                words = tl.load(row + 2)
                if (tile >= 0) & (tile * TILE < words):
                    now = tl.load(row).to(tl.pointer_type(tl.int32))
                    kept = tl.load(row + 1).to(tl.pointer_type(tl.int32))
                    i = tile * TILE + tl.arange(0, TILE)
                    tl.store(now + i, tl.load(kept + i, mask=i < words), mask=i < words)
                tile -= tl.cdiv(words, TILE)


def restore(kept: Kept, flags: Tensor) -> None:
    """`onebit.kernels.backends.Backend.restore` in one launch."""
    tiles_of_all = sum(triton.cdiv(words, WORDS) for words in kept.words)
    arguments = {"table": kept.table, "pairs": len(kept.pairs), "flags": flags, "TILE": WORDS}
    launch(restore_kernel, tiles_of_all, arguments, flags, torch.float32)

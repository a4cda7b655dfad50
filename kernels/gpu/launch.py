"""How every Triton kernel is launched: one program a few blocks, its shape from the tuner, rounding as written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.kernels.tuning import tuner

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for."""

    kernel: Any
    arguments: dict[str, Any]
    config: tuner.Config


_record: list[Launch] | None = None


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect launches instead of making them: what ahead-of-time compilation needs to know."""
    global _record
    _record, before = [], _record
    try:
        with tuner.suspended():
            yield _record
    finally:
        _record = before


def over(span: Span, device: torch.device) -> dict[str, Any]:
    """The arguments of every kernel that runs over the blocks of a span."""
    table, size = span.layout.table(device), span.layout.block_size
    return {
        "owner": table.owner,
        "rows": table.rows,
        "first_block": span.first,
        "blocks": span.count,
        "BLOCK": size,
        "TILE": triton.next_power_of_2(size),
    }


def launch(kernel: Any, blocks: int, arguments: dict[str, Any], like: Tensor, dtype: torch.dtype) -> None:
    """Run `kernel` over `blocks` blocks on the device of `like`."""
    config = tuner.lookup(_name(kernel), like.device, dtype)
    if _record is not None:
        _record.append(Launch(kernel, arguments, config))
        return

    def run() -> None:
        # Fused multiply-adds would round c another way than the CPU does and could turn a sign.
        kernel[(triton.cdiv(blocks, config.rows),)](
            **arguments, ROWS=config.rows, num_warps=config.warps, enable_fp_fusion=False
        )

    _on_device(like, run)


def _on_device(like: Tensor, run: Callable[[], None]) -> None:
    if like.is_cuda:
        with torch.cuda.device(like.device):
            run()
    else:
        run()


def _name(kernel: Any) -> str:
    return str(kernel.__name__)

"""Launching Triton kernels: a program works on a few blocks, the tuner gives the shape, no fused multiply-adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebit.kernels.data.layout import BLOCK_SIZE, WORD, Span
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import NORMS, Format, Messages
from onebit.kernels.tuning import tuner

WIDE = 16  # bytes: the widest access
MOST_WARPS = 16  # of a program: 1024 threads where a warp has 64
ELEMENTS_OF_WARP = 128  # 32 threads with an access of 4 elements each
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments and shape."""

    kernel: Any
    arguments: dict[str, Any]
    config: tuner.Config
    programs: int


_record: list[Launch] | None = None


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """A context in which launches are collected instead of run, for ahead-of-time compilation."""
    global _record
    _record, before = [], _record
    try:
        with tuner.suspended():
            yield _record
    finally:
        _record = before


def span_arguments(span: Span, device: torch.device) -> dict[str, Any]:
    """The arguments of every kernel that runs over the blocks of a span."""
    table = span.layout.table(device)
    return {
        "block_table": table.blocks,
        "parameter_table": table.parameters,
        "first_block": span.first,
        "first_word": span.start // WORD,
        "blocks": span.count,
        "TILE": triton.next_power_of_2(span.layout.block_size),
    }


def format_arguments(span: Span, form: Format) -> dict[str, Any]:
    """How a kernel finds a block's part of the messages of a span."""
    return {"first_shard": span.first_shard, "row_bytes": form.nbytes, "TENSOR": form.scale == "tensor"}


def replies_arguments(span: Span, replies: Messages) -> dict[str, Any]:
    """What `tiles.decode_block` reads."""
    return {**format_arguments(span, replies.format), "messages": replies.buffer, "COPIES": replies.copies}


def momentum_arguments(momentum: Tensor | Messages | None, prefix: str) -> dict[str, Any]:
    """Momentum kept as messages, as a dense tensor, or not at all."""
    packed = momentum if isinstance(momentum, Messages) else None
    return {
        f"{prefix}flat": None if packed else momentum,
        f"{prefix}messages": packed and packed.buffer,
    }


def residual_arguments(residual: Residual) -> dict[str, Any]:
    return {
        "value": residual.value,
        "before": residual.before,
        "residual_scale": residual.scale,
        "partial": residual.partial,
        "counted": residual.counted,
        "counter": residual.counter,
    }


def encoding_arguments(residual: Residual, out: Messages) -> dict[str, Any]:
    """What a kernel that encodes c into `out` reads and writes, beside c itself."""
    return {
        **residual_arguments(residual),
        "messages": out.buffer,
        "fingerprint": out.format.fingerprint,
        "shard_blocks": out.format.header[3],
        "TENSOR": out.format.scale == "tensor",
        "NORM": NORMS[out.format.norm],
    }


def launch(kernel: Any, blocks: int, arguments: dict[str, Any], like: Tensor, dtype: torch.dtype) -> None:
    """Run `kernel` over `blocks` blocks on the device of `like`."""
    config = _for_tile(tuner.lookup(_name(kernel), like.device, dtype), arguments["TILE"])
    programs = triton.cdiv(blocks, config.blocks_per_program)
    if _record is not None:
        _record.append(Launch(kernel, arguments, config, programs))
        return

    def run() -> None:
        # Fused multiply-adds would round c another way than the CPU does and could turn a sign.
        per_program = config.blocks_per_program
        kernel[(programs,)](**arguments, BLOCKS_PER_PROGRAM=per_program, num_warps=config.warps, enable_fp_fusion=False)

    _on_device(like, run)


def _for_tile(config: tuner.Config, tile: int) -> tuner.Config:
    """A config for a tile of 2048 elements, with as many more warps as this tile has more elements: fewer would spill.
    No more warps than the tile has elements for: others would hold copies, and could read what has been stored."""
    warps = min(MOST_WARPS, config.warps * max(1, tile // BLOCK_SIZE), tile // ELEMENTS_OF_WARP)
    return replace(config, warps=max(1, warps))


def _on_device(like: Tensor, run: Callable[[], None]) -> None:
    if like.is_cuda:
        with torch.cuda.device(like.device):
            run()
    else:
        run()


def _name(kernel: Any) -> str:
    return str(kernel.__name__)

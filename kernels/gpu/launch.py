"""Launching Triton kernels: a program works on a few blocks, the tuner gives the shape, no fused multiply-adds."""

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
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, Messages
from onebit.kernels.tuning import tuner

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments and shape."""

    kernel: Any
    arguments: dict[str, Any]
    config: tuner.Config


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
    table, size = span.layout.table(device), span.layout.block_size
    return {
        "owner": table.owner,
        "parameter_table": table.parameters,
        "first_block": span.first,
        "blocks": span.count,
        "BLOCK": size,
        "TILE": triton.next_power_of_2(size),
    }


def message_arguments(messages: Messages, prefix: str = "") -> dict[str, Any]:
    """Where the parts of messages lie."""
    return {f"{prefix}header": messages.header, f"{prefix}scales": messages.scales, f"{prefix}bits": messages.bits}


def format_arguments(form: Format) -> dict[str, Any]:
    """How a kernel finds a block's part of a message. Messages of one launch are cut alike."""
    return {"shard_blocks": form.shard_blocks, "row_bytes": form.nbytes, "TENSOR": form.scale == "tensor"}


def replies_arguments(replies: Messages) -> dict[str, Any]:
    """What `tiles.decode_block` reads."""
    form = replies.format
    return {**message_arguments(replies), **format_arguments(form), "COPIES": replies.copies, "BITS": form.bits}


def momentum_arguments(momentum: Tensor | Messages | None, prefix: str) -> dict[str, Any]:
    """Momentum kept as messages, as a dense tensor, or not at all: what `tiles.load_momentum` reads."""
    packed = momentum if isinstance(momentum, Messages) else None
    return {
        f"{prefix}flat": None if packed else momentum,
        f"{prefix}scales": packed and packed.scales,
        f"{prefix}bits": packed and packed.bits,
    }


def momentum_format_arguments(momentum: Tensor | Messages | None) -> dict[str, Any]:
    """How momentum is packed, in a launch that writes messages of 1 bit."""
    if not isinstance(momentum, Messages):
        return {"m_row_bytes": 0, "COPIES": 1, "BITS": 1}
    form = momentum.format
    return {"m_row_bytes": form.nbytes, "COPIES": momentum.copies, "BITS": form.bits}


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
        **message_arguments(out),
        **format_arguments(out.format),
        "fingerprint": out.format.fingerprint,
        "L2": out.format.norm == "l2",
    }


def launch(kernel: Any, blocks: int, arguments: dict[str, Any], like: Tensor, dtype: torch.dtype) -> None:
    """Run `kernel` over `blocks` blocks on the device of `like`."""
    config = tuner.lookup(_name(kernel), like.device, dtype)
    if _record is not None:
        _record.append(Launch(kernel, arguments, config))
        return

    def run() -> None:
        # Fused multiply-adds would round c another way than the CPU does and could turn a sign.
        per_program = config.blocks_per_program
        kernel[(triton.cdiv(blocks, per_program),)](
            **arguments, BLOCKS_PER_PROGRAM=per_program, num_warps=config.warps, enable_fp_fusion=False
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

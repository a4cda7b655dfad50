"""What each pass reads and writes, by the fields of its record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.record import Record
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from onebit.kernels.passes import Pass

WRITTEN = {
    "scan": {"flags", "squares"},
    "compress": {"residual", "out"},
    "average": {"residual", "out"},
    "decode": {"out"},
    "quantize": {"residual", "out"},
    "average_codes": {"residual", "out"},
    "dequantize": {"out"},
    "adam_warmup": {"param", "master", "exp_avg", "exp_avg_sq", "sums"},
    "adam_update": {"param", "master"},
    "zero_one_full": {"param", "master", "exp_avg_sq", "residual", "live", "sums", "counts"},
    "zero_one_update": {"param", "master"},
    "zero_one_inverses": {"sums"},
    "zero_one_length": {"squares"},
    "zero_one_local": {"param", "master", "exp_avg", "residual"},
    "zero_one_sync": {"param", "master", "exp_avg", "anchor"},
    "lamb_warmup": {"param", "master", "exp_avg", "exp_avg_sq", "state"},
    "lamb_statistics": {"exp_avg_sq", "state"},
    "step_squares": {"squares"},
    "step_limit": {"usual", "factor", "shortened"},
}


def accesses(work: Pass) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that a pass reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for name, value in fields_of(work):
        (writes if name in WRITTEN[work.name] else reads).extend(tensors_of(value, work.span))
        if isinstance(value, Pointers):
            reads.append(value.addresses)
    table = work.span.layout.table([*reads, *writes][0].device)
    return [*reads, table.blocks, table.parameters, table.first_blocks], writes


def fields_of(record: object) -> Iterator[tuple[str, Any]]:
    """Yield a record's fields, and those of the records that it has."""
    for name, value in vars(record).items():
        if isinstance(value, Record) and not isinstance(value, (Messages, Pointers, Residual, LambState)):
            yield from fields_of(value)
        else:
            yield name, value


def tensors_of(value: Any, span: Span) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case Messages():
            yield value.buffer
        case Residual() | LambState():
            yield from (each for each in vars(value).values() if isinstance(each, Tensor))
        case Pointers():
            for s in span.segments():
                tensor = value.tensors[s.parameter]
                if tensor is not None:
                    yield tensor.view(-1)[s.start : s.stop]

"""What each pass reads and writes, as `onebit.kernels.passes.Backend` has it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from onebit.kernels.passes import Backend

WRITTEN = {
    "scan": {"flags", "squares"},
    "compress": {"residual", "out"},
    "average": {"residual", "out"},
    "restore": {"now"},
    "decode": {"out"},
    "adam_warmup": {"params", "exp_avg", "exp_avg_sq", "master", "sums"},
    "adam_update": {"params", "master"},
    "zero_one_full": {"params", "exp_avg_sq", "residual", "master", "live", "sums", "counts"},
    "zero_one_update": {"params", "master"},
    "zero_one_inverses": {"sums"},
    "zero_one_local": {"params", "exp_avg", "residual", "master", "squares"},
    "zero_one_sync": {"params", "exp_avg", "anchor", "master"},
    "lamb_warmup": {"params", "exp_avg", "exp_avg_sq", "master", "state"},
    "lamb_statistics": {"exp_avg_sq", "state"},
}


def accesses(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that a pass reads, and those that it writes."""
    given = inspect.signature(getattr(Backend, name)).bind(None, *arguments, **options).arguments
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    span = given.get("span")
    for argument, value in given.items():
        found = list(tensors_of(value, span))
        (writes if argument in WRITTEN[name] else reads).extend(found)
        if isinstance(value, Pointers):
            reads.append(value.addresses)
        if isinstance(value, Span) and found == []:
            table = value.layout.table(arguments_device(given))
            reads += [table.blocks, table.parameters]
    return reads, writes


def arguments_device(given: dict[str, Any]) -> Any:
    return next(t.device for value in given.values() for t in tensors_of(value, None))


def tensors_of(value: Any, span: Span | None) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case Messages():
            yield value.buffer
        case Residual() | LambState():
            yield from (each for each in vars(value).values() if isinstance(each, Tensor))
        case Pointers() if span is None:
            yield from (each for each in value.tensors if each is not None)
        case Pointers():
            for s in span.segments():
                tensor = value.tensors[s.parameter]
                if tensor is not None:
                    yield tensor.view(-1)[s.start : s.stop]

"""What an optimizer knows of each parameter: 1-bit LAMB (Li et al. 2021), figures 4 to 6."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.optim.flat_state import FlatState, pieces
from onebit.optim.reducer import MomentumReducer
from onebit.optim.run import Run


def diagnose(run: Run) -> dict[str, dict[str, float]]:
    """Return diagnostics by parameter, then by name. The host waits for the device once."""
    labels, values = [], []
    for part in run.state.parts:
        columns = _of_fields(part.state)
        if part.reducer is not None:
            columns |= _of_messages(part.state, part.reducer)
        labels += [(run.setup.name_of(p), list(columns)) for p in part.state.params]
        no_columns = torch.zeros((len(part.state.params), 0), device=part.state.device)
        values += [torch.stack([c.float() for c in columns.values()], dim=1) if columns else no_columns]
    found = [row for table in values for row in table.tolist()]
    return {name: dict(zip(columns, row, strict=True)) for (name, columns), row in zip(labels, found, strict=True)}


def _of_fields(state: FlatState) -> dict[str, Tensor]:
    """fp32 [parameters] of each field that is to be shown."""
    shown = {field.shown_as: field for field in state.fields.values() if field.shown_as is not None}
    return {
        label: state[field.name] if field.per == "parameter" else _norms(state, state[field.name])
        for label, field in shown.items()
    }


def _of_messages(state: FlatState, reducer: MomentumReducer) -> dict[str, Tensor]:
    """fp32 [parameters]: what was left out, and how large the values sent are."""
    exchange, layout = reducer.exchange, state.layout
    server = exchange.server_residual
    of_server = torch.zeros(0, device=state.device) if server is None else server.left_out()
    scales = exchange.replies.scales_of(layout.all()).mean(0)  # of each block; the mean over the messages it is in
    ends = [*layout.first.tolist(), layout.used_blocks]
    return {
        "residual_norm": _norms_in(state, state.slice_spans, exchange.residual.left_out()),
        "server_residual_norm": _norms_in(state, reducer.served_spans, of_server),
        "momentum_scale": torch.stack([scales[a:b].mean() for a, b in pairwise(ends)]).nan_to_num(),
    }


def _norms_in(state: FlatState, spans: Sequence[Span], flat: Tensor) -> Tensor:
    """Norms by parameter of a flat tensor that has some spans' elements one after the other."""
    none = flat.new_zeros(1)
    parts = [[piece for _, piece in pieces(spans, flat, i)] for i in range(len(state.params))]
    return torch.stack([torch.linalg.vector_norm(torch.cat(own or [none])) for own in parts])


def _norms(state: FlatState, flat: Tensor) -> Tensor:
    parts: Sequence[Tensor] = [state.cut(flat, i) for i in range(len(state.params))]
    return torch.stack([torch.linalg.vector_norm(part) for part in parts])

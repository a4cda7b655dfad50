"""What an optimizer knows of each parameter, and how it went over a run: figures 4 to 6 of paper 003.

history = onebit.History()
...  # now and then:  history.record(optimizer)
history.plot("diagnostics.png")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onebit.optim.flat_state import Space
    from onebit.optim.optimizer import OneBitOptimizer

TITLES = {
    "coefficient": "scaling coefficients",
    "ratio": "scaling ratios, frozen to fresh variance",
    "variance_norm": "variance norms",
    "residual_norm": "norms of the worker's residuals",
    "server_residual_norm": "norms of this rank's server residuals",
    "momentum_scale": "mean scales of the messages",
}


def diagnose(optimizer: OneBitOptimizer) -> dict[str, dict[str, float]]:
    """By parameter, then by name. The host waits for the device once."""
    labels, values = [], []
    for space in optimizer._spaces:
        columns = _of_space(space) | optimizer._diagnose_more(space)
        labels += [(optimizer._name(p), list(columns)) for p in space.params]
        values += [torch.stack([column.float() for column in columns.values()], dim=1)]
    found = [row for table in values for row in table.tolist()]
    return {name: dict(zip(columns, row, strict=True)) for (name, columns), row in zip(labels, found, strict=True)}


def _of_space(space: Space) -> dict[str, Tensor]:
    """fp32 [parameters] of each name."""
    every = range(len(space.params))
    found = {}
    if (variance := space.variance()) is not None:
        found["variance_norm"] = _norms([space.view(variance, i) for i in every])
    exchange, layout = space.exchange, space.layout
    if exchange is not None:
        e = exchange.residual.left_out()
        found["residual_norm"] = _norms([space.view(e, i) for i in every])
        squares = torch.zeros(len(space.params), dtype=torch.float32, device=space.device)
        for chunk in exchange.chunks:
            server = chunk.server_residual.left_out()
            for s in chunk.shard.segments():
                squares[s.parameter] += server[s.offset : s.offset + s.stop - s.start].square().sum()
        found["server_residual_norm"] = squares.sqrt()
        scales, ends = exchange.replies.scale_of_blocks(), [*layout.first.tolist(), layout.used_blocks]
        means = [scales[a:b].mean() for a, b in pairwise(ends)]
        found["momentum_scale"] = torch.stack(means).nan_to_num()
    return found


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(t) for t in tensors])


class History:
    """Diagnostics over time."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.records: list[dict[str, dict[str, float]]] = []
        self._frozen: int | None = None

    def record(self, optimizer: OneBitOptimizer) -> None:
        self.steps.append(optimizer.steps)
        self.records.append(optimizer.diagnostics())
        if optimizer.compressing and self._frozen is None:
            self._frozen = optimizer.steps

    def series(self, name: str) -> dict[str, list[float]]:
        """One line a parameter; NaN where there was nothing yet."""
        parameters = {p: None for record in self.records for p in record}
        lines = {p: [r.get(p, {}).get(name, float("nan")) for r in self.records] for p in parameters}
        return {p: line for p, line in lines.items() if any(x == x for x in line)}

    def plot(self, path: str | os.PathLike[str]) -> None:
        """A picture of all there is. Needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        names = [name for name in TITLES if self.series(name)]
        if not names:
            raise ValueError("nothing was recorded: call record(optimizer) now and then while training")
        rows = -(-len(names) // 2)
        figure, axes = pyplot.subplots(rows, min(2, len(names)), figsize=(12, 3.4 * rows), squeeze=False)
        for axis in axes.flat[len(names) :]:
            axis.set_visible(False)
        for axis, name in zip(axes.flat, names, strict=False):
            for parameter, line in self.series(name).items():
                axis.plot(self.steps, line, label=parameter, linewidth=1)
            if self._frozen is not None:
                axis.axvline(self._frozen, color="grey", linestyle=":", linewidth=1)
            axis.set(title=TITLES[name], xlabel="step")
            if name.endswith("norm") or name == "momentum_scale":
                axis.set_yscale("log")
        lines, texts = axes.flat[0].get_legend_handles_labels()
        figure.legend(lines[:12], texts[:12], loc="outside lower center", ncols=3, fontsize="small")
        figure.set_layout_engine("constrained")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

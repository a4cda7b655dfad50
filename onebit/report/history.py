"""Diagnostics over a run, and their plot.

history = onebit.History()
...  # now and then:  history.record(optimizer)
history.plot("diagnostics.png")
"""

from __future__ import annotations

import os

import torch

from onebit.parallel.unwrap import own_optimizer

TITLES = {
    "coefficient": "scaling coefficients",
    "ratio": "scaling ratios, frozen to fresh variance",
    "variance_norm": "variance norms",
    "residual_norm": "norms of the worker's residuals",
    "server_residual_norm": "norms of this rank's server residuals",
    "momentum_scale": "mean scales of the messages",
}


class History:
    """Diagnostics over time."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.records: list[dict[str, dict[str, float]]] = []
        self._frozen: int | None = None

    def record(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer = own_optimizer(optimizer, "record")
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

"""The demo's plot: held-out loss over seconds above; training loss and bytes over the steps below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onebit.cli.demo.record import Record, smoothed
from onebit.cli.demo.report import link, megabytes, verdict
from onebit.report.plots import pyplot

COLORS = "#7f7f7f", "#1f77b4", "#d62728"
DASHES = "-", "--", "-"  # 1-bit Adam's losses lie on Adam's
ORDER = 2, 3, 1  # and are drawn above them


def plot(record: Record, path: Path) -> None:
    """Draw losses and bytes, and the seconds unless the link was not what was asked for. matplotlib has to be there."""
    assert record.start is not None
    timed = record.link_is_kept
    rows = [["time", "time"]] if timed else []
    figure, axes = pyplot().subplot_mosaic(
        [*rows, ["loss", "sent"]], figsize=(9, 7.5 if timed else 4), height_ratios=[3, 2][-len(rows) - 1 :],
        layout="constrained",
    )  # fmt: skip
    if timed:
        _over_seconds(axes["time"], record)
    _over_steps(axes["loss"], axes["sent"], record)
    for each in axes.values():
        each.grid(alpha=0.3)
    first, *_, last = zip(record.settings.names, (sent for sent, _ in record.sent()), strict=True)
    fewer = f"in the whole run {last[0]} sends {first[1] / last[1]:.1f} times less than {first[0]} in fp32"
    claim = verdict(record) if timed and record.settings.link else ""
    who = f"{record.start.elements:,} parameters, {record.settings.ranks} ranks on {record.start.device}"
    figure.suptitle("\n".join(filter(None, (claim, f"{who}; {fewer}"))))
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def _over_seconds(axes: Any, record: Record) -> None:
    for i, (name, points) in enumerate(zip(record.settings.names, record.held_out(), strict=True)):
        seconds, losses = zip(*points, strict=True)
        label = f"{name}: {losses[-1]:.3f} after {seconds[-1]:.0f} s"
        axes.plot(seconds, losses, color=COLORS[i], linestyle=DASHES[i], zorder=ORDER[i], label=label)
        axes.plot(seconds[-1], losses[-1], "o", color=COLORS[i], zorder=ORDER[i])
    axes.axhline(record.losses[0], color=COLORS[0], linestyle=":", linewidth=1)
    axes.set(xlabel=f"seconds of training, {link(record)}", ylabel="held-out loss", xlim=(0, None))
    axes.legend(loc="upper right")


def _over_steps(above: Any, below: Any, record: Record) -> None:
    settings, where = record.settings, [s.step for s in record.steps]
    curves = smoothed(record.steps, max(1, settings.steps // 40))
    for i, (name, sent) in enumerate(
        zip(settings.names, zip(*(s.sent for s in record.steps), strict=True), strict=True)
    ):
        style = {"color": COLORS[i], "linestyle": DASHES[i], "zorder": ORDER[i]}
        above.plot(where, curves[i], **style)
        below.plot(where, [b / 1e6 for b in sent], **style, label=f"{name}: {megabytes(sent[-1])}")
    above.set(xlabel="step", ylabel="training loss", xlim=(0, settings.steps))
    below.set(xlabel="step", ylabel="MB sent by each rank", ylim=(0, None), xlim=(0, settings.steps))
    below.legend(loc="upper left")
    for axes in (above, below):
        axes.axvline(settings.freeze_step, color="black", linestyle=":", linewidth=1)
    above.annotate(
        f"{settings.names[1]}: 1 bit", (settings.freeze_step, 0.95), (5, 0), xycoords=above.get_xaxis_transform(),
        textcoords="offset points", va="top",
    )  # fmt: skip

"""The page of the comparison: a conclusion by a person, and tables and plots for each model and number of hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev

from onebit.cli.arguments import CommandError
from onebit.parallel import compression
from onebit.report.plots import available
from perf import plots
from perf.lab.rates import link_title
from perf.methods.plan import (
    ADAM_LR,
    CLIP,
    FREEZE,
    HOSTS,
    LAMB_LR,
    LINKS,
    LOCAL,
    METHODS,
    MODELS,
    OURS,
    STEPS,
    TRAINED_AS,
    chosen_runs,
    mean_loss,
    tried,
)
from perf.tables import markdown
from perf.train_step.measure import Run
from perf.train_step.plots import loss_panel, title_of
from perf.train_step.record import Record
from perf.train_step.report import Group, bytes_after, mean_curves, seconds_after, steps_by_row, timed
from perf.train_step.variants import POWERSGD_SOONER, UNCOMPRESSED

OVER_TIME, TO_COMMON_LOSS = "validation loss over time", "seconds to the common loss"  # what plots show
NEAR = 0.02  # above fp32's loss: what counts as having learned as much
CONCLUSION = "conclusion.md"  # beside the records, written by a person
TITLE = "# Which method has trained first\n"
INTRODUCTION = f"""Written by `python -m perf.methods` from the records in `perf/results/methods`; `--report` only
writes. The network lab makes the networks on one machine (`perf/lab`; Linux, as root or within a user namespace), with
a rank a host, over Gloo.

* **Training**: a byte-level transformer learns Python's documentation in {STEPS} steps of 4 windows a rank. All methods
  have the same start, data and one-cycle schedule, and clip gradients to a norm of {CLIP:g}. Each method takes the best
  learning rate of {ADAM_LR:g} (LAMB: {LAMB_LR:g}), half and twice of that rate, on the first seed.
* **Uncompressed steps**: a method that begins with uncompressed steps takes {FREEZE}; PowerSGD "soon" takes
  {FREEZE // POWERSGD_SOONER}, compressed gradients {compression.UNCOMPRESSED}. If a run has several kinds of steps, a
  table lists the kinds in the order of their first use: uncompressed and compressed; for 0/1 Adam full, 1 bit, local
  and sync; for DiLoCo local and outer.
* **Scales**: 1-bit Adam, LAMB and 0/1 Adam have `norm="l1"`, which is not the default. In the row "norm unbiased" the
  steps of 0/1 Adam count as long as with `norm="l1"`, since messages are as long.
* **Time**: a run's time on a link is the sum of the times that its steps took on that link, clipping included. 1-bit
  Adam has no overlap, which clipping ends. torchft's DiLoCo takes the steps of the DiLoCo-like method, but for rounding
  (`tests/perf/test_torchft.py`), and was not trained again.
* **The common loss** is the highest final loss among methods whose ranks stay in step: all these methods reach that
  loss. "Near fp32" is within {NEAR:g} of fp32's final loss. A time ends at the first of 20 points of the mean curve
  that is as low. Curves are of a quarter of the windows of the first table's losses.
* **First on each link** is the first method whose ranks stay in step, and how many times as soon as the best rival;
  "of all" is a method with local steps, if sooner.
"""


@dataclass(frozen=True)
class Finish:
    """Seconds of a method on a link: of a run, and until its mean curve is as low; None if it never is."""

    run: float
    common: float | None
    near: float | None


def write_report(out: Path, docs: Path) -> str:
    """The page, which is written, and its plots, where they can be drawn."""
    text = page(out, docs)
    docs.write_text(text, encoding="utf-8")
    for record, title in records(out) if available() else ():
        if networks := finished(record):
            draw(record.path, title, networks, record.runs)
    return text


def page(out: Path, docs: Path) -> str:
    sections = [section(record, title, docs.parent) for record, title in records(out)]
    if not sections:
        raise CommandError(f"--out {str(out)!r} has no record of a comparison: measure first, without --report")
    conclusion = out / CONCLUSION
    above = [conclusion.read_text(encoding="utf-8")] if conclusion.exists() else []
    return "\n".join([TITLE, *above, INTRODUCTION, *sections])


def record_path(out: Path, model: str, hosts: int) -> Path:
    return out / f"{model}-{hosts}-hosts.json"


def records(out: Path) -> list[tuple[Record, str]]:
    """Those that are there, with their titles."""
    paths = {
        f"{model.capitalize()} model, {hosts} hosts": record_path(out, model, hosts)
        for model in MODELS
        for hosts in HOSTS
    }
    return [(Record(path), title) for title, path in paths.items() if path.exists()]


def section(record: Record, title: str, docs: Path) -> str:
    """Write the section of one record."""
    about = record.about
    parts = [
        f"## {title}\n",
        f"{about['elements']:,} parameters; width {about['width']}, {about['layers']} layers. {about['cpu']}, "
        f"{about['cpu_count']} cores, PyTorch {about['versions']['torch']}, {about['measured']}.\n",
    ]
    if record.runs:
        parts += [losses_table(record), ""]
    if networks := groups(record):
        parts += [f"Milliseconds a step:\n\n{steps_table(networks)}", ""]
    if networks := finished(record):
        found = {link: finishes(group, record.runs) for link, group in networks.items()}
        parts += [_common_text(record.runs), finish_table(found), ""]
        parts += [f"First on each link:\n\n{winners_table(found)}", ""]
        for what, path in plot_paths(record.path).items():
            shown = path.name if docs == path.parent else Path("..") / path
            parts += [f"![{what}, {title.lower()}]({shown})", ""]
    return "\n".join(parts)


def plot_paths(record: Path) -> dict[str, Path]:
    """Paths of plots by what they show."""
    return {OVER_TIME: record.with_name(f"{record.stem}-loss.png"), TO_COMMON_LOSS: record.with_suffix(".png")}


def finished(record: Record) -> dict[str, Group]:
    """The links on which a method was timed that was trained."""
    return {link: group for link, group in groups(record).items() if finishes(group, record.runs)}


def groups(record: Record) -> dict[str, Group]:
    """Rows by link, then by variant."""
    return {
        link: {row.variant: row for row in record.rows if row.rate == link}
        for link in LINKS
        if any(row.rate == link for row in record.rows)
    }


def losses_table(record: Record) -> str:
    head = ["", "learning rate", "loss", "seeds", "MB a rank sends", "times fewer than fp32"]
    sent = _bytes_of_runs(record)
    lines = []
    for method in METHODS:
        own = chosen_runs(record.runs, method)
        if own and method not in TRAINED_AS:
            losses = [run.loss for run in own]
            spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
            of = f" (of {len(tried(record.runs, method))})"
            nbytes, most = sent.get(method), sent.get(UNCOMPRESSED)
            fewer = f"{most / nbytes:.1f}" if nbytes and most else ""
            shown = f"{nbytes / 1e6:,.0f}" if nbytes else ""
            loss = f"{mean_loss(record.runs, method):.3f}{spread}"
            lines.append([title_of(method), f"{own[0].lr:g}{of}", loss, str(len(own)), shown, fewer])
    return markdown(head, lines, numbers=(1, 2, 3, 4, 5))


def _bytes_of_runs(record: Record) -> dict[str, float]:
    """Bytes of each method's run, by the counters on the first link on which all its steps were timed."""
    found: dict[str, float] = {}
    for group in groups(record).values():
        for method in METHODS:
            if method not in found and timed(group, method) and (sent := bytes_after(group, method, FREEZE, STEPS)):
                found[method] = sent
    return found


def steps_table(networks: Mapping[str, Group]) -> str:
    """Tabulate times of each kind of step that a run has."""
    lines = []
    for method in METHODS:
        names = list(steps_by_row(method, FREEZE, STEPS))
        cells = [
            " / ".join(f"{1e3 * (group[name].seconds or math.nan):,.0f}" for name in names)
            if timed(group, method)
            else ""
            for group in networks.values()
        ]
        if any(cells):
            lines.append([title_of(method), *cells])
    return markdown(["", *map(link_title, networks)], lines, numbers=range(1, 9)[: len(networks)])


def common_loss(runs: Sequence[Run]) -> float:
    """The highest final one of the methods whose ranks stay in step, by their mean curves."""
    return max(curve[-1][1] for method, curve in curves(runs).items() if method not in LOCAL)


def curves(runs: Sequence[Run]) -> dict[str, list[tuple[int, float]]]:
    """Mean curves of the methods, each at its learning rate."""
    found = mean_curves([run for method in METHODS if method not in TRAINED_AS for run in chosen_runs(runs, method)])
    return found | {method: found[own] for method, own in TRAINED_AS.items() if own in found}


def finishes(group: Group, runs: Sequence[Run]) -> dict[str, Finish]:
    """Find when the methods end that were timed on this link and trained."""
    own, common = curves(runs), common_loss(runs)
    near = own[UNCOMPRESSED][-1][1] + NEAR if UNCOMPRESSED in own else -math.inf
    found = {}
    for method, curve in own.items():
        if timed(group, method):
            steps = [next((step for step, loss in curve if loss <= goal), None) for goal in (common, near)]
            times = [None if step is None else seconds_after(group, method, FREEZE, step) for step in steps]
            found[method] = Finish(seconds_after(group, method, FREEZE, STEPS), *times)
    return found


def _common_text(runs: Sequence[Run]) -> str:
    own = curves(runs)
    highest = max((m for m in own if m not in LOCAL), key=lambda m: own[m][-1][1])
    common = f"{common_loss(runs):.3f} ({title_of(highest)}'s)"
    return f"Seconds to the common loss, {common}, then near fp32, then of the whole run:\n"


def finish_table(found: Mapping[str, Mapping[str, Finish]]) -> str:
    def shown(seconds: float | None) -> str:
        return "never" if seconds is None else f"{seconds:,.0f}"

    lines = []
    for method in METHODS:
        own = [of.get(method) for of in found.values()]
        if any(own):
            cells = ["" if f is None else " / ".join(map(shown, (f.common, f.near, f.run))) for f in own]
            lines.append([title_of(method), *cells])
    return markdown(["", *map(link_title, found)], lines, numbers=range(1, 9)[: len(found)])


def winners_table(found: Mapping[str, Mapping[str, Finish]]) -> str:
    """Who is first on each link, in step and of all, and how many times as soon as the best of the other side."""
    head = ["", "to the common loss", "near fp32"]
    lines = [[link_title(link), *(_first_to(goal, of) for goal in ("common", "near"))] for link, of in found.items()]
    return markdown(head, lines)


def _first_to(goal: str, of: Mapping[str, Finish]) -> str:
    reached = {m: s for m, f in of.items() if (s := getattr(f, goal)) is not None}
    in_step = {m: s for m, s in reached.items() if m not in LOCAL}
    return _first(in_step) + _besides(in_step, reached) if in_step else ""


def _first(seconds: Mapping[str, float]) -> str:
    """The first, and how many times as soon it is as the best of the other side: ours, or others'."""
    winner = min(seconds, key=lambda m: seconds[m])
    rivals = {m: s for m, s in seconds.items() if (m in OURS) != (winner in OURS)}
    if not rivals:
        return title_of(winner)
    rival = min(rivals, key=lambda m: rivals[m])
    return f"{title_of(winner)} ({rivals[rival] / seconds[winner]:.2f} times as soon as {title_of(rival)})"


def _besides(in_step: Mapping[str, float], reached: Mapping[str, float]) -> str:
    """The first of the methods with local steps, where it is sooner."""
    best = min(reached, key=lambda m: reached[m])
    return f"; of all: {title_of(best)} ({reached[best]:,.0f} s)" if best not in in_step else ""


def draw(record: Path, title: str, networks: Mapping[str, Group], runs: Sequence[Run]) -> None:
    """A panel for each link: losses over time, and a run up to the common loss; what never reaches it is left out."""
    paths, ending = plot_paths(record), f"seconds until the validation loss is {common_loss(runs):.3f}"
    losses = [_loss_panel(link, group, runs) for link, group in networks.items()]
    bars = [_bars_panel(link, group, runs) for link, group in networks.items()]
    plots.save(paths[OVER_TIME], losses, f"{title}: {OVER_TIME}")
    plots.save(paths[TO_COMMON_LOSS], bars, f"{title}: {ending}")


def _loss_panel(link: str, group: Group, runs: Sequence[Run]) -> plots.Draw:
    """Mean curves over seeds."""
    own = {method: curve for method, curve in curves(runs).items() if timed(group, method)}
    return loss_panel(link_title(link), own, lambda name, step: seconds_after(group, name, FREEZE, step), scale="log")


def _bars_panel(link: str, group: Group, runs: Sequence[Run]) -> plots.Draw:
    own, parts, notes = curves(runs), {}, {}
    found = finishes(group, runs)
    for method, finish in sorted(found.items(), key=lambda item: item[1].common or math.inf):
        if finish.common is not None:
            step = next(step for step, loss in own[method] if loss <= common_loss(runs))
            counts = steps_by_row(method, FREEZE, step)
            full = sum(n * (group[name].seconds or 0.0) for name, n in counts.items() if _sends_all(group, name))
            parts[title_of(method)] = {"uncompressed steps": full, "others": max(0.0, finish.common - full)}
            notes[title_of(method)] = f"{finish.common:,.0f} s"
    return plots.stacked(link_title(link), "seconds", parts, notes)


def _sends_all(group: Group, name: str) -> bool:
    """Every element, in fp32 or 16 bits."""
    return (group[name].bytes or 0.0) > 0.4 * (group[UNCOMPRESSED].bytes or math.inf)

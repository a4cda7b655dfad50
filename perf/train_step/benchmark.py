"""A training step taken apart: DDP in fp32, fp16, bf16 and with PowerSGD's hook, 1-bit Adam and LAMB in both stages.

    python -m perf.train_step --lab [--hosts 4] [--rates 100mbit,300mbit,1gbit] [--share 0.925]
    python -m perf.train_step --lab --train [--steps 300] [--seeds 3]
    torchrun ... -m perf.train_step

The first needs root on Linux: it builds a network of hosts on this machine (perf.lab), starts a rank in each
and times a causal transformer's step at every rate. One more rate is chosen by itself: that at which the fp16
all-reduce takes `--share` of the step, from a step and its bytes on links of any rate, and a trial. The second trains
the variants whose losses are compared, on links of any rate, and adds loss against time to the same record (give both
the same options): steps times the seconds of a step that the first has measured, since links only decide how long a
step takes. Both keep what they have when they are interrupted; the second does not repeat runs that the record has.
The third measures on the group that it is started in: Gloo on CPUs, NCCL on GPUs, there with events on the stream.

A step is the slowest rank's, the median of several, a barrier before each. As in Table 1 of paper 001 it is

    forward, backward    what computes; backward's is that of a pass that averages nothing (DDP's no_sync)
    step                 the optimizer, without its waiting for messages: in stage 2 packing is in it
    all-reduce           what is left: messages that nothing hides, the hook's own work, waiting for slower ranks

for a hook's messages leave while backward still computes, and only the whole tells how much of them that hides. Bytes
are what the interface's own counter says. Parameters are compared over ranks after the steps: wrong ones get no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from onebit.cli import main as cli
from onebit.collectives import CollectiveError
from perf.all_reduce.benchmark import FAILS, ROOT, SAYS, host_count, link_rate, list_of, make_folder
from perf.all_reduce.ranks import WrongResult
from perf.all_reduce.report import UNSHAPED, shaped
from perf.lab.network import LabUnavailable, NetworkLab, RankFailed
from perf.train_step.plots import draw
from perf.train_step.ranks import Row, Run, run_rank
from perf.train_step.report import STANDARD, Record, about, link_for, loss_table, missing, slug, table
from perf.train_step.variants import BASELINE, VARIANTS

WORKER = ("-m", "perf.train_step")  # what a host of the lab runs
FOUND = "@found "
PASSED = ("width", "layers", "batch", "repeats", "steps", "freeze", "lr", "timeout")  # on to the ranks of the lab


def run_worker(arguments: argparse.Namespace) -> int:
    """A rank of the lab: what it says and finds goes to the driver."""

    def found(what: Row | Run | dict[str, Any]) -> None:
        fields = what if isinstance(what, dict) else asdict(what)
        print(FOUND + json.dumps({type(what).__name__: fields}), flush=True)

    try:
        run_rank(arguments, lambda text: print(SAYS + text, flush=True), found)
    except WrongResult as error:
        print(f"{FAILS}{error}", flush=True)
        return 1
    return 0


def heard(line: str) -> Row | Run | dict[str, Any]:
    """What a rank has told."""
    ((kind, fields),) = json.loads(line.removeprefix(FOUND)).items()
    return {"Row": Row.of, "Run": Run.of, "dict": dict}[kind](fields)


def run_lab(arguments: argparse.Namespace, record: Record, progress: cli.Progress) -> None:
    """One process a host for every rate, or for all training runs."""
    progress.show(f"{arguments.hosts} hosts: setting up the network")
    with NetworkLab(arguments.hosts) as lab:
        if arguments.train:
            if arguments.runs:
                runs = ",".join(f"{name}:{seed}" for name, seed in arguments.runs)
                _on_lab(lab, UNSHAPED, ["--train", f"--runs={runs}"], arguments, progress, record)
            return
        rates = list(arguments.rates)
        if arguments.share:
            rates.insert(0, _link(lab, arguments, progress))
            record.about["share_rate"] = rates[0]
        for rate in rates:
            lab.set_rate(shaped(rate))
            _on_lab(lab, rate, [f"--variants={','.join(arguments.variants)}"], arguments, progress, record)


def _link(lab: NetworkLab, arguments: argparse.Namespace, progress: cli.Progress) -> str:
    """That gives the share: tried once, and corrected by what it gave."""
    rate = UNSHAPED
    for _ in range(2):
        lab.set_rate(shaped(rate))
        row = _on_lab(lab, rate, [f"--variants={BASELINE}"], arguments, progress)[-1]
        rate = link_for(arguments.share, row)
    return rate


def _on_lab(
    lab: NetworkLab,
    rate: str,
    what: Sequence[str],
    arguments: argparse.Namespace,
    progress: cli.Progress,
    record: Record | None = None,
) -> list[Any]:
    """What the ranks find at this rate; the record hears of it at once."""
    network = f"{lab.hosts} hosts, {rate}"
    found: list[Any] = []
    wrong: list[str] = []

    def on_line(rank: int, line: str) -> None:
        if line.startswith(FAILS):
            wrong.append(line.removeprefix(FAILS))
        elif rank == 0 and line.startswith(SAYS):
            progress.show(f"{network}: {line.removeprefix(SAYS)}")
        elif rank == 0 and line.startswith(FOUND):
            thing = heard(line)
            found.append(Row(**{**asdict(thing), "rate": rate}) if isinstance(thing, Row) else thing)
            if record is not None:
                record.add(found[-1])

    progress.show(f"{network}: starting the ranks")
    options = [f"--{name}={getattr(arguments, name)}" for name in PASSED]
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="onebit-train-step-") as folder:
        env = {"PYTHONPATH": search, "ONEBIT_CACHE_DIR": folder}  # chunks="auto" measures every network anew
        argv = [*WORKER, "--worker", "--device=cpu", *options, *what]
        try:
            lab.run(argv, timeout=arguments.timeout, launcher="env", env=env, on_line=on_line)
        except RankFailed as error:
            raise (WrongResult(f"{network}: {wrong[0]}") if wrong else error) from error
    return found


def report(arguments: argparse.Namespace, record: Record) -> int:
    """Tables, targets, plots of what there is."""
    if not record.rows and not record.runs:
        return int(arguments.check)
    about = record.about
    where = f"{about['device']}, {about['cpu_count']} cores, {about['ranks']} ranks, {about['backend']}"
    print(f"{where}, {about['elements']:,} elements, load before: {about['load_before']}\n")
    for text in (table(record.rows), loss_table(record.rows, record.runs)):
        print(text)
    reached = record.targets()
    print("".join(f"\n{target}" for target in reached))
    record.save()
    print(f"\n{record.path}")
    try:
        print(*draw(record, where), sep="\n")
    except ModuleNotFoundError:
        print("No plot: matplotlib is not installed. For one: pip install matplotlib")
    if arguments.check and not reached:
        print("perf.train_step: --check: no target speaks of what was measured", file=sys.stderr)
    return int(arguments.check and (not reached or any(not target.met for target in reached)))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: a failure (what was found is kept), or with --check a missed target. 2: impossible here."""
    arguments = _arguments(argv)
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    progress = cli.Progress()
    try:
        if arguments.worker:
            return run_worker(arguments)
        if not arguments.lab and not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
            raise cli.CommandError(
                "there is no group to measure on: start it with torchrun, or give it --lab (root on Linux)"
            )
        make_folder(arguments.out)
        record = Record(arguments.out / f"{slug(arguments)}.json", about(arguments, load))
        arguments.runs = missing(arguments, record) if arguments.train else []
        status = _measure(arguments, record, progress)
    except (LabUnavailable, cli.CommandError, ValueError) as error:
        print(f"perf.train_step: error: {error}", file=sys.stderr)
        return 2
    return status


def _measure(arguments: argparse.Namespace, record: Record, progress: cli.Progress) -> int:
    """What was found is reported, also where the rest could not be."""
    status = 0
    try:
        if arguments.lab:
            run_lab(arguments, record, progress)
        else:
            run_rank(arguments, progress.show, record.add)
    except WrongResult as error:
        print(f"perf.train_step: no more figures, since a result is wrong: {error}", file=sys.stderr)
        status = 1
    except (RankFailed, CollectiveError, TimeoutError) as error:
        print(f"perf.train_step: no more figures, since a rank failed: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    progress.clear()
    missed = report(arguments, record) if arguments.lab or record.heard else 0  # of a group rank 0 alone hears
    return status or missed


def _variant(text: str) -> str:
    if text not in VARIANTS:
        raise ValueError(f"{text!r} is no variant: choose among {', '.join(VARIANTS)}")
    return text


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: give a number below 1, such as 0.93, or 0 for none")
    return share


def _run(text: str) -> tuple[str, int]:
    name, _, seed = text.partition(":")
    return _variant(name), int(seed)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    idle = ("device", "backend") if arguments.lab else ("hosts", "rates", "share")
    given = [f"--{name}" for name in idle if getattr(arguments, name) is not None]
    if given and not arguments.worker:
        parser.error(f"{' and '.join(given)}: only {'without' if arguments.lab else 'with'} --lab")
    arguments.device = arguments.device or "auto"
    for name in ("hosts", "rates", "share"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, STANDARD[name])
    arguments.freeze = arguments.freeze or max(2, arguments.steps // 4)
    return arguments


def _parser() -> argparse.ArgumentParser:
    number = cli.whole_number
    parser = argparse.ArgumentParser(
        prog="python -m perf.train_step", description="A training step taken apart, compressed and not."
    )
    parser.add_argument("--lab", action="store_true", help="on networks made on this machine: root on Linux")
    parser.add_argument("--hosts", type=host_count, help="of the lab (default: 4)")
    parser.add_argument("--rates", type=list_of(link_rate), help="of the lab's links: 100mbit,1gbit,unshaped")
    parser.add_argument("--share", type=_share, help="also where fp16's all-reduce takes this share; 0: no (0.925)")
    parser.add_argument("--variants", type=list_of(_variant), default=STANDARD["variants"], help=", ".join(VARIANTS))
    for name, what in (("width", "of the model"), ("layers", "of the model"), ("batch", "windows a rank")):
        parser.add_argument(f"--{name}", type=number, default=STANDARD[name], help=f"{what} (default: %(default)s)")
    parser.add_argument("--repeats", type=number, default=3, help="steps that a median is taken of")
    parser.add_argument("--train", action="store_true", help="train and compare losses, with the times of the record")
    parser.add_argument("--steps", type=number, default=300, help="of training (default: %(default)s)")
    parser.add_argument("--freeze", type=number, help="last uncompressed step (default: a quarter of --steps)")
    parser.add_argument("--seeds", type=number, default=1, help="training runs of each variant (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="of training (default: %(default)s)")
    parser.add_argument("--device", help="without --lab: auto, cpu or cuda (default: auto)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="without --lab: gloo on a CPU, nccl on a GPU")
    parser.add_argument("--timeout", type=number, default=3600, help="seconds for one network of the lab")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--out", type=Path, default=Path("perf/results"), help="folder of the record and the plots")
    parser.add_argument("--name", help="of the record, after the machine's (default: made of the options that differ)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # a rank of --lab
    parser.add_argument("--runs", type=list_of(_run), default=[], help=argparse.SUPPRESS)  # variant:seed, of a rank
    return parser

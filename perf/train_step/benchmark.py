"""The parts of a training step: DDP in fp32, fp16, bf16 and with PowerSGD's hook, 1-bit Adam and LAMB in both stages.

    python -m perf.train_step --lab [--hosts 4] [--rates 100mbit,300mbit,1gbit+10ms] [--share 0.925]
    python -m perf.train_step --lab --train [--steps 300] [--seeds 3]
    python -m perf.train_step --paced [--rates 1gbit,10gbit] [--model gpt2 --device cuda]
    torchrun ... -m perf.train_step

The first needs Linux, and root or user namespaces: it builds a network of hosts on this machine (perf.lab), starts a
rank in each and times a causal transformer's step at every rate. One more rate is chosen by itself: that at which the
fp16 all-reduce takes `--share` of the step, from a step and its bytes on links of any rate, and a trial. The second
trains the variants whose losses are compared, on links of any rate, and adds loss against time to the same record (give
both the same options): steps times the seconds of a step that the first has measured, since links only decide how long
a step takes. Both keep what they have when they are interrupted; the second does not repeat runs that the record has.
The third needs Linux alone: two ranks whose sockets are paced (perf.lab.paced); on one GPU they share it. The last
measures on the group that it is started in: Gloo on CPUs, NCCL on GPUs, there with events on the stream. Where nothing
was trained a table has the time of a run of --steps: the steps of each kind times what one takes.

A step is the slowest rank's, the median of several, a barrier before each. As in Table 1 of 1-bit Adam (Tang et al.
2021) it is

    forward, backward    what computes; backward's is that of a pass that averages nothing (DDP's no_sync)
    step                 the optimizer, packing in stage 2 too; not its waits for messages or their thread
    all-reduce           what is left: messages that nothing hides, the hook's own work, waiting for slower ranks

for a hook's messages leave while backward still computes, and only the whole step shows how much of them that hides.
Bytes are by the interface's own counter. Parameters are compared over ranks after the steps: wrong ones get no
figure.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onebit.cli.arguments import whole_number
from onebit.cli.progress import Progress
from perf import plots
from perf.command import (
    CANNOT_MEASURE,
    add_out,
    add_ranks,
    exit_status,
    list_of,
    make_folder,
    one_of,
    refuse_idle,
    set_defaults,
)
from perf.lab.namespaces import LabUnavailable, enter_user_namespace
from perf.lab.paced import Network, measured_links, open_network, skipping_refused_links
from perf.lab.rates import UNSHAPED
from perf.lab.workers import Publish, print_progress, print_result, run_worker, run_workers, worker
from perf.ranks import require_group
from perf.records import load_average
from perf.train_step.measure import Row, Run, run_rank
from perf.train_step.plots import draw
from perf.train_step.record import StepRecord
from perf.train_step.report import (
    STANDARD,
    about,
    link_for,
    loss_table,
    missing,
    record_name,
    run_table,
    table,
    targets,
    with_settings,
)
from perf.train_step.variants import BASELINE, GPT2S, TEXT, VARIANTS

WORKER = ("-m", "perf.train_step")  # what a host of the lab runs


def run_lab(arguments: argparse.Namespace, record: StepRecord, progress: Progress) -> None:
    """One process a host for every rate, or for all training runs."""
    progress.show(f"{arguments.hosts} hosts: setting up the network")
    with open_network(arguments, arguments.hosts) as lab:
        if arguments.train:
            if arguments.runs:
                on_lab(lab, arguments, progress, record.add)
            return
        rates = list(arguments.rates)
        if arguments.share:
            rates.insert(0, _link(lab, arguments, progress))
            record.about["share_rate"] = rates[0]
        measured = [rate for rate in rates if _measure(lab, rate, arguments, record, progress)]
        if not measured:
            raise LabUnavailable("no link was what was asked for")


def _measure(lab: Network, rate: str, arguments: argparse.Namespace, record: StepRecord, progress: Progress) -> bool:
    """Measure. Returns whether links of this rate were what was asked for, and the record has what was found."""
    lab.set_link(rate)
    found: list[Any] = []

    def add(each: Any) -> None:
        found.append(each)
        record.add(each)

    def forget() -> None:
        found.clear()
        record.forget(rate)

    with skipping_refused_links(arguments, forget):
        on_lab(lab, arguments, progress, add)
    return bool(found)


def _link(lab: Network, arguments: argparse.Namespace, progress: Progress) -> str:
    """That gives the share: tried once, and corrected by what it gave."""
    rate = UNSHAPED
    for _ in range(2):
        lab.set_link(rate)
        found: list[Any] = []
        on_lab(lab, arguments, progress, found.append, variants=[BASELINE])
        rate = link_for(arguments.share, found[-1])
    return rate


def on_lab(lab: Network, arguments: argparse.Namespace, progress: Progress, publish: Publish, **others: Any) -> None:
    """`publish` gets what the ranks find on these links, as it comes. others: what is not as in the arguments."""
    argv = [*WORKER, *worker(arguments, **others)]
    kinds = {"Row": lambda fields: replace(Row.of(fields), rate=lab.link), "Run": Run.of}
    run_workers(lab, argv, progress, kinds, publish)


def report(record: StepRecord, arguments: argparse.Namespace) -> None:
    """Tables, targets, plots of what there is."""
    about = record.about
    where = f"{about['device']}, {about['cpu_count']} cores, {about['ranks']} ranks, {about['backend']}"
    print(f"{where}, {about['elements']:,} elements, load before: {about['load_before']}\n")
    times = "" if record.runs else run_table(record.rows, arguments.variants, arguments.steps, arguments.freeze)
    for text in (table(record.rows), loss_table(record.rows, record.runs), times, measured_links(record.rows)):
        print(text)
    print("".join(f"\n{target}" for target in targets(record.rows, record.runs)))
    record.save()
    print(f"\n{record.path}")
    plots.draw_if_possible(lambda: draw(record, where))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: a failure (what was found is kept). 2: impossible here."""
    arguments = parse_arguments(argv)
    return exit_status("perf.train_step", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> int:
    """What was measured before an error is reported."""
    if arguments.worker:
        return run_worker(lambda: run_rank(arguments, print_progress, print_result))
    if arguments.lab:
        enter_user_namespace()
    load, progress = load_average(), Progress()
    if not (arguments.lab or arguments.paced):
        require_group()
    make_folder(arguments.out)
    record = StepRecord(arguments.out / f"{record_name(arguments)}.json", about(arguments, load))
    if arguments.train:
        record.runs = with_settings(arguments, record.runs)
        arguments.runs = missing(arguments, record.runs)

    def measure() -> None:
        if arguments.lab or arguments.paced:
            run_lab(arguments, record, progress)
        else:
            run_rank(arguments, progress.show, record.add)

    status = exit_status("perf.train_step", measure, lost="no more figures")
    progress.clear()
    found = record.rows or record.runs
    there = record.changed or ((arguments.lab or arguments.paced) and found)  # of a group rank 0 alone has the results
    if there and status != CANNOT_MEASURE:
        report(record, arguments)
    return status


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: give a number below 1, such as 0.93, or 0 for none")
    return share


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    number, variant = whole_number, one_of("variant", list(VARIANTS))
    parser = argparse.ArgumentParser(
        prog="python -m perf.train_step", description="The parts of a training step, compressed and not."
    )
    add_ranks(parser)
    parser.add_argument("--hosts", type=number, help="of the lab (default: 4)")
    parser.add_argument("--share", type=_share, help="also where fp16's all-reduce takes this share; 0: no (0.925)")
    parser.add_argument("--model", choices=(TEXT, *GPT2S), default=TEXT, help="gpt2: the small one (default: text)")
    parser.add_argument("--variants", type=list_of(variant), default=STANDARD["variants"], help=", ".join(VARIANTS))
    for name, what in (("width", "of the model"), ("layers", "of the model"), ("batch", "windows a rank")):
        parser.add_argument(f"--{name}", type=number, default=STANDARD[name], help=f"{what} (default: %(default)s)")
    parser.add_argument("--repeats", type=number, default=3, help="steps in a median (default: %(default)s)")
    parser.add_argument("--train", action="store_true", help="train and compare losses, with the times of the record")
    parser.add_argument("--steps", type=number, default=300, help="of training (default: %(default)s)")
    parser.add_argument("--freeze", type=number, help="last uncompressed step (default: a quarter of --steps)")
    parser.add_argument("--seeds", type=number, default=1, help="training runs of each variant (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="of training (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=0.0, help="norm of gradients in training; 0: any (default)")
    add_out(parser, "the record and the plots")
    parser.add_argument("--name", help="of the record, after the machine's (default: made of the options that differ)")
    parser.set_defaults(runs=[])  # variants and seeds, to train
    arguments = parser.parse_args(argv)
    if arguments.worker:
        return argparse.Namespace(**{**arguments.worker, "worker": True})
    refuse_idle(parser, arguments, in_lab=("hosts", "share"))
    if not 0 <= arguments.clip < math.inf:
        parser.error(f"--clip {arguments.clip:g}: it is a norm, more than 0, or 0 for no clipping")
    if arguments.model != TEXT and arguments.train:
        parser.error(f"--model {arguments.model} is for times: its tokens are random. python -m perf.learn trains it")
    set_defaults(arguments, {"device": "cpu" if arguments.lab or arguments.paced else "auto"})
    set_defaults(arguments, {"hosts": 2, "share": 0.0} if arguments.paced else {})
    set_defaults(arguments, {name: STANDARD[name] for name in ("hosts", "rates", "share")})
    arguments.freeze = arguments.freeze or max(2, arguments.steps // 4)
    return arguments

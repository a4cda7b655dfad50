"""The compressed all-reduce against torch.distributed's in fp32, fp16 and bf16: time, and bytes on the wire.

    python -m perf.all_reduce --lab [--hosts 4] [--rates 100mbit,1gbit,100mbit+50ms] [--elements 2**20]
    python -m perf.all_reduce --lab --each 4 [--hosts 2]
    python -m perf.all_reduce --paced [--rates 100mbit,1gbit] [--elements 2**20]
    torchrun ... -m perf.all_reduce [--elements 2**28]

The first needs Linux, and root or user namespaces: it builds a network of hosts on this machine (perf.lab) and starts
a rank in each. The second starts four ranks in each, and measures 1 bit with one level and with two, in which a host is
one rank to the network. The third needs Linux alone: two ranks whose sockets are paced (perf.lab.paced). The last
measures on the group that it is started in: Gloo on CPUs, NCCL on GPUs.

A time is the slowest rank's, the median of several calls after one that does not count, a barrier before each. Kinds
take turns, so that what slows the machine for a while slows all of them. Bytes are those of all these calls by the
interface's own counter: headers, acknowledgements and barriers are in it. They are read where each host of the lab, or
elsewhere each rank, has an interface for itself, named by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; what the ranks of a
host send each other does not pass the host's interface. There are no figures where ranks end with other results.

In the lab chunks="auto" measures every network anew. Its links let 64 KiB through at once, which flatters messages that
are not much larger, below 2**20 elements: with --in-a-row 50 a time is a fiftieth of that of fifty calls after one
barrier, which do not fit into that.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onebit.cli.arguments import whole_number
from onebit.cli.progress import Progress
from perf.all_reduce.measure import Row, run_rank
from perf.all_reduce.report import STANDARD, report, standard
from perf.command import (
    add_out,
    add_ranks,
    exit_status,
    list_of,
    make_folder,
    refuse_idle,
    set_defaults,
)
from perf.lab.namespaces import LabUnavailable, enter_user_namespace
from perf.lab.paced import open_network, skipping_refused_links
from perf.lab.workers import print_progress, print_result, run_worker, run_workers, worker
from perf.ranks import require_group
from perf.records import load_average

WORKER = ("-m", "perf.all_reduce")  # what a host of the lab runs


def run_lab(arguments: argparse.Namespace, progress: Progress) -> list[Any]:
    """Every network in turn, one process a rank: rows, and descriptions of the groups."""
    found: list[Any] = []
    argv = [*WORKER, *worker(arguments)]
    for hosts in arguments.hosts:
        progress.show(f"{hosts} hosts: setting up the network")
        with open_network(arguments, hosts, arguments.each) as lab:
            for rate in arguments.rates:
                lab.set_link(rate)
                own: list[Any] = []
                with skipping_refused_links(arguments, own.clear):
                    run_workers(lab, argv, progress, {"Row": Row.of}, own.append)
                found += [replace(each, rate=rate) if isinstance(each, Row) else each for each in own]
    return found


def run(arguments: argparse.Namespace) -> int:
    if arguments.worker:
        return run_worker(lambda: run_rank(arguments, print_progress, print_result))
    if arguments.lab:
        enter_user_namespace()
    load, progress = load_average(), Progress()
    make_folder(arguments.out)
    found: list[Any] = []
    if arguments.lab or arguments.paced:
        found = run_lab(arguments, progress)
        if not found:
            raise LabUnavailable("no link was what was asked for")
    else:
        require_group()
        run_rank(arguments, progress.show, found.append)
    progress.clear()
    if found:  # of a group rank 0 alone has them
        group, *_ = (each for each in found if isinstance(each, dict))
        report(arguments, [each for each in found if isinstance(each, Row)], group, load)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: no figures. 2: this can't be measured here."""
    arguments = parse_arguments(argv)
    return exit_status("perf.all_reduce", lambda: run(arguments))


def _chunks(text: str) -> int | str:
    return text if text == "auto" else whole_number(text)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.all_reduce", description="The compressed all-reduce against fp32, fp16 and bf16."
    )
    add_ranks(parser)
    parser.add_argument("--hosts", type=list_of(whole_number), help="of the lab, such as 2,4,8")
    parser.add_argument("--each", type=whole_number, help="ranks a host of the lab; from 2 on also with two levels")
    parser.add_argument("--elements", type=list_of(whole_number), help="such as 2**20,25_000_000")
    parser.add_argument("--chunks", type=_chunks, default=STANDARD["chunks"], help="pipeline stages (default: auto)")
    parser.add_argument("--repeats", type=whole_number, default=5, help="calls in a median (default: %(default)s)")
    parser.add_argument("--in-a-row", type=whole_number, default=1, help="calls that are timed as one (default: 1)")
    parser.add_argument("--direct", action="store_true", help='also with reply="direct", with one rank a host')
    add_out(parser, "the record and the plot")
    arguments = parser.parse_args(argv)
    if arguments.worker:
        return argparse.Namespace(**{**arguments.worker, "worker": True})
    refuse_idle(parser, arguments, in_lab=("hosts", "each"))
    set_defaults(arguments, {"device": "cpu" if arguments.lab or arguments.paced else "auto", "each": 1})
    if arguments.direct and arguments.each > 1:
        parser.error("--direct: only with one rank a host")
    set_defaults(arguments, {name: standard(arguments)[name] for name in ("hosts", "rates", "elements")})
    return arguments

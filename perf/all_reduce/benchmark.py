"""The compressed all-reduce against torch.distributed's in fp32, fp16 and bf16: time, and bytes on the wire.

    python -m perf.all_reduce --lab [--hosts 4] [--rates 100mbit,1gbit,10gbit] [--elements 2**20,25_000_000]
    torchrun ... -m perf.all_reduce [--elements 2**28]

The first needs root on Linux: it builds a network of hosts on this machine (perf.lab) and starts a rank in
each. The second measures on the group that it is started in: Gloo on CPUs, NCCL on GPUs.

A time is the slowest rank's, the median of several calls after one that does not count, a barrier before each. Bytes
are what the interface's own counter says of all these calls: headers, acknowledgements and barriers are in it. They
are read where each rank has an interface for itself, named by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME. Results are
checked before the timed calls and after: a wrong one gets no figure. In the lab chunks="auto" measures every network
anew; its links let 64 KiB through at once, which flatters messages that are not much larger, below 2**20 elements.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from onebit.cli import main as cli
from onebit.collectives import CollectiveError
from perf.all_reduce.ranks import Row, WrongResult, run_rank
from perf.all_reduce.report import STANDARD, rate_bits, report, shaped
from perf.lab.network import LabUnavailable, NetworkLab, RankFailed

WORKER = ("-m", "perf.all_reduce")  # what a host of the lab runs
SAYS, FAILS = "@progress ", "@wrong "  # rank 0's lines that are meant for the driver
ROOT = Path(__file__).resolve().parents[2]


def run_worker(arguments: argparse.Namespace) -> int:
    """A rank of the lab: what it says and finds goes to the driver."""
    try:
        rows, group, rank = run_rank(arguments, lambda text: print(SAYS + text, flush=True))
    except WrongResult as error:
        print(f"{FAILS}{error}", flush=True)
        return 1
    if rank == 0:
        found = {"rows": [asdict(row) for row in rows], "group": group}
        arguments.worker.write_text(json.dumps(found), encoding="utf-8")
    return 0


def run_lab(arguments: argparse.Namespace, progress: cli.Progress) -> tuple[list[Row], dict[str, Any]]:
    """Every network in turn, one process a host."""
    rows: list[Row] = []
    group: dict[str, Any] = {}
    for hosts in arguments.hosts:
        progress.show(f"{hosts} hosts: setting up the network")
        with NetworkLab(hosts) as lab:
            for rate in arguments.rates:
                lab.set_rate(shaped(rate))
                found, group = _on_lab(lab, rate, arguments, progress)
                rows += found
    progress.clear()
    return rows, group


def _on_lab(
    lab: NetworkLab, rate: str, arguments: argparse.Namespace, progress: cli.Progress
) -> tuple[list[Row], dict[str, Any]]:
    network = f"{lab.hosts} hosts, {rate}"
    wrong: list[str] = []

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith(SAYS):
            progress.show(f"{network}: {line.removeprefix(SAYS)}")
        elif line.startswith(FAILS):
            wrong.append(line.removeprefix(FAILS))

    progress.show(f"{network}: starting the ranks")
    with tempfile.TemporaryDirectory(prefix="onebit-all-reduce-") as folder:
        path = Path(folder, "found.json")
        options = {"elements": ",".join(map(str, arguments.elements)), "worker": path}
        options |= {name: getattr(arguments, name) for name in ("chunks", "repeats", "timeout")}
        argv = [*WORKER, "--device=cpu", *(f"--{name}={value}" for name, value in options.items())]
        search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {"PYTHONPATH": search, "ONEBIT_CACHE_DIR": folder}
        try:
            argv += ["--phases"] * arguments.phases
            lab.run(argv, timeout=arguments.timeout, launcher="env", env=env, on_line=on_line)
        except RankFailed as error:
            raise (WrongResult(f"{network}: {wrong[0]}") if wrong else error) from error
        found = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**{**row, "rate": rate, "calls": tuple(row["calls"])}) for row in found["rows"]], found["group"]


def make_folder(out: Path) -> None:
    """Before minutes of measuring, not after."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.CommandError(f"--out {str(out)!r} is no folder to write to ({error}): choose another") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: no figures, or with --check a missed target. 2: this can't be measured here."""
    arguments = _arguments(argv)
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    progress = cli.Progress()
    try:
        if arguments.worker:
            return run_worker(arguments)
        make_folder(arguments.out)
        if arguments.lab:
            return report(arguments, *run_lab(arguments, progress), load)
        if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
            raise cli.CommandError(
                "there is no group to measure on: start it with torchrun, or give it --lab (root on Linux)"
            )
        rows, group, rank = run_rank(arguments, progress.show)
        progress.clear()
        return 0 if rank else report(arguments, rows, group, load)
    except (LabUnavailable, cli.CommandError, ValueError) as error:
        print(f"perf.all_reduce: error: {error}", file=sys.stderr)
        return 2
    except WrongResult as error:
        print(f"perf.all_reduce: no figures, since a result is wrong: {error}", file=sys.stderr)
        return 1
    except (RankFailed, CollectiveError, TimeoutError) as error:
        print(f"perf.all_reduce: no figures, since a rank failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parsed(text: str) -> list[Any]:
        try:
            return [parse(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def host_count(text: str) -> int:
    hosts = int(text) if text.strip().isdecimal() else 0
    if not 2 <= hosts <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts: give 2 to 64, as in 2,4,8")
    return hosts


def link_rate(text: str) -> str:
    rate = text.strip().lower()
    try:
        rate_bits(rate)
    except ValueError:
        raise ValueError(f'{text!r} is no rate from 1mbit to 100gbit: write "100mbit", "2.5gbit", "unshaped"') from None
    return rate


def _chunks(text: str) -> int | str:
    return text if text == "auto" else cli.whole_number(text)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    idle = ("device", "backend") if arguments.lab else ("hosts", "rates")
    given = [f"--{name}" for name in idle if getattr(arguments, name) is not None]
    if given:
        parser.error(f"{' and '.join(given)}: only {'without' if arguments.lab else 'with'} --lab")
    arguments.device = arguments.device or "auto"
    for name in ("hosts", "rates"):
        setattr(arguments, name, getattr(arguments, name) or STANDARD[name])
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.all_reduce", description="The compressed all-reduce against fp32, fp16 and bf16."
    )
    parser.add_argument("--lab", action="store_true", help="on networks made on this machine: root on Linux")
    parser.add_argument("--hosts", type=list_of(host_count), help="of the lab, such as 2,4,8")
    parser.add_argument("--rates", type=list_of(link_rate), help="of the lab's links: 100mbit,1gbit,unshaped")
    parser.add_argument(
        "--elements", type=list_of(cli.whole_number), default=STANDARD["elements"], help="such as 2**20,25_000_000"
    )
    parser.add_argument("--chunks", type=_chunks, default=STANDARD["chunks"], help="pipeline stages (default: auto)")
    parser.add_argument("--repeats", type=cli.whole_number, default=5, help="calls that a median is taken of")
    parser.add_argument("--phases", action="store_true", help="also each phase of the compressed one alone")
    parser.add_argument("--device", help="without --lab: auto, cpu or cuda (default: auto)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="without --lab: gloo on a CPU, nccl on a GPU")
    parser.add_argument(
        "--timeout", type=cli.whole_number, default=1800, help="seconds for one network of the lab, or for one call"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--out", type=Path, default=Path("perf/results"), help="folder of the record and the plot")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank of --lab: where rank 0 writes
    return parser

"""Run a script on the hosts of a network lab.

python -m perf.lab --hosts 4 [--each 2] --rate 1gbit [--rtt 10ms] -- script.py args
python -m perf.lab --selftest
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.lab.namespaces import LabUnavailable
from perf.lab.network import NetworkLab
from perf.lab.processes import RankFailed

PROBE = str(Path(__file__).with_name("probe.py"))


def measure_all_reduce(lab: NetworkLab) -> list[float]:
    """Gbit/s each rank sends in Gloo's all_reduce of 4 MB in fp32: 2 (N - 1) / N of the tensor a call."""
    ranks = lab.run([PROBE], timeout=120)
    return [float(line.split()[1]) for rank in ranks for line in rank.lines if line.startswith("all_reduce ")]


def _selftest(hosts: int) -> None:
    with NetworkLab(hosts) as lab:
        for rate in ("100mbit", "1gbit", "10gbit"):
            lab.set_rate(rate)
            ranks = " ".join(f"{value:.3f}" for value in measure_all_reduce(lab))
            print(f"shaped to {rate}: each rank sends {ranks} Gbit/s in a Gloo fp32 all_reduce", flush=True)


def _run_command(options: argparse.Namespace, command: list[str]) -> None:
    several = f" of {options.each} ranks" if options.each > 1 else ""
    process = "host" if several and options.launcher == "torchrun" else "rank"
    with NetworkLab(options.hosts, options.rate, options.each, options.rtt) as lab:
        trip = f" and round trips of {options.rtt}" if options.rtt else ""
        print(f"{options.hosts} hosts{several}, links of {options.rate or 'any rate'}{trip}; starting ...", flush=True)
        try:
            lab.run(
                command,
                timeout=options.timeout,
                launcher=options.launcher,
                on_line=lambda number, line: print(f"[{process} {number}] {line}", flush=True),
            )
        finally:
            for host, sent in enumerate(lab.bytes_sent()):
                print(f"host {host} sent {sent:,} bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 when a rank failed or this machine cannot hold a lab."""
    parser = argparse.ArgumentParser("python -m perf.lab", description="Run a script on a network lab.")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--each", type=int, default=1, help="ranks a host (default: 1)")
    parser.add_argument("--rate", help='of each link, both ways: "100mbit", "1gbit", ...; without it, unshaped')
    parser.add_argument("--rtt", help='round trip between any two hosts, "1ms" to "100ms"; without it, no added delay')
    parser.add_argument("--launcher", choices=("torchrun", "env"), default="torchrun")
    parser.add_argument("--timeout", type=float, default=600, help="seconds the run may take (default: 600)")
    parser.add_argument("--selftest", action="store_true", help="measured against shaped rates, with Gloo")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- script.py args, or -- -m module args")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if options.selftest:
            _selftest(options.hosts)
        elif command:
            _run_command(options, command)
        else:
            parser.error("give a command for the hosts, `-- script.py args`, or --selftest")
    except (LabUnavailable, RankFailed, TimeoutError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0

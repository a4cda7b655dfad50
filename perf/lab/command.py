"""Run a script on the hosts of a network lab.

python -m perf.lab --hosts 4 --rate 1gbit|100mbit+50ms -- script.py args
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from perf.command import exit_status
from perf.lab.namespaces import enter_user_namespace
from perf.lab.network import NetworkLab
from perf.lab.rates import UNSHAPED


def run(options: argparse.Namespace, command: list[str]) -> None:
    with NetworkLab(options.hosts, options.rate) as lab:
        print(f"{options.hosts} hosts, links of {lab.link}; starting ...", flush=True)
        try:
            lab.run(
                command,
                timeout=options.timeout,
                on_line=lambda rank, line: print(f"[rank {rank}] {line}", flush=True),
            )
        finally:
            for host, sent in enumerate(lab.bytes_sent()):
                print(f"host {host} sent {sent:,} bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: a rank failed. 2: this machine cannot hold a lab."""
    parser = argparse.ArgumentParser("python -m perf.lab", description="Run a script on a network lab.")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default=UNSHAPED, help='of each link, both ways: "1gbit", "100mbit+50ms" (any)')
    parser.add_argument("--timeout", type=float, default=600, help="seconds the run may take (default: 600)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- script.py args, or -- -m module args")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("give a command for the hosts: -- script.py args")
    enter_user_namespace()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return exit_status("perf.lab", lambda: run(options, command), lost="it has ended")

"""The training of `onebit demo` with each rank on a host of the network lab; root on Linux.

python -m perf.lab.demo --rate 100mbit [--hosts 2] [--optimizer lamb] [--steps 400] [--out onebit-demo.png]
"""

from __future__ import annotations

import argparse
import queue
import sys
from collections.abc import Sequence

from onebit.cli.demo import command as demo
from onebit.cli.demo.ranks import DemoError, Process
from onebit.cli.demo.train import Settings
from perf.command import exit_status, host_count, link
from perf.lab.workers import search_path

HOURS = 4  # that a training may take


class LabProcess(Process):
    """`python -m perf.lab`, whose own errors name the rank, or what this machine lacks."""

    def report(self) -> str:
        return "\n".join(self.last_lines()) or super().report()


def launch(settings: Settings, command: list[str], lines: queue.Queue[str]) -> Process:
    """A launcher of the demo (onebit.cli.demo.ranks): `python -m command` on every host."""
    options = {"hosts": settings.ranks, "rate": settings.bandwidth, "timeout": HOURS * 3600}
    argv = ["perf.lab", *(f"--{name}={value}" for name, value in options.items()), "--", "-m", *command]
    return LabProcess("the network lab", argv, {"PYTHONPATH": search_path()}, lines)


def run(arguments: argparse.Namespace) -> int:
    try:
        demo.run(arguments, bandwidth=arguments.rate, launcher=launch)
    except DemoError as error:
        print(f"perf.lab.demo: error: {error}", file=sys.stderr)
        return error.code
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: no result, also where this machine cannot hold a lab. 2: an argument is not right."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.lab.demo", description="The demo's training over links of a given rate, root on Linux."
    )
    parser.add_argument("--rate", type=link, required=True, help="of every link, both ways, such as 100mbit")
    demo.add_arguments(parser)
    default = Settings().ranks
    parser.add_argument("--hosts", type=host_count, default=default, dest="ranks", help="the same as --ranks")
    arguments = parser.parse_args(argv)
    return exit_status("perf.lab.demo", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""The command line: `onebit demo`, `onebit tune` and `onebit plan`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from onebit.cli import tune
from onebit.cli.arguments import CommandError
from onebit.cli.demo import command as demo
from onebit.cli.plan import command as plan


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        COMMANDS[arguments.command](arguments)
    except CommandError as error:
        print(f"onebit {arguments.command}: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line."""
    made = argparse.ArgumentParser(
        prog="onebit", description="Communication-compressed training: 1 bit a value on the wire."
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="demo | tune | plan")
    demo.add_arguments(
        commands.add_parser(
            "demo",
            help="train a small language model with 1 bit and without, on ranks of this machine: a minute or two",
            description="Trains a small language model on Python's own documentation, with Adam, 1-bit Adam and 0/1 "
            "Adam (or LAMB and 1-bit LAMB): losses, bytes sent, a plot. Nothing is downloaded.",
        )
    )
    tune.add_arguments(
        commands.add_parser(
            "tune",
            help="measure the kernels on this device, under torchrun also the chunks on its ranks; keep the fastest",
            description="Measures how the kernels run fastest on this device and, under torchrun, in how many chunks "
            "the ranks exchange fastest. Prints every candidate with its time and writes the choices to a cache, where "
            "every later run finds them.",
        )
    )
    plan.add_arguments(
        commands.add_parser(
            "plan",
            help="predict steps on a cluster that is not at hand, uncompressed and with 1 bit",
            description="A model of latency and bandwidth: step times, bytes, speed-ups, and the network rate below "
            "which compression pays. Every constant can be replaced.",
        )
    )
    return made


COMMANDS = {"demo": demo.run, "tune": tune.run, "plan": plan.run}

"""What the commands of perf have in common: errors as exit statuses, and options."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onebit.cli.arguments import CommandError
from onebit.collectives import CollectiveError
from perf.lab.namespaces import LabUnavailable
from perf.lab.processes import RankFailed
from perf.lab.rates import parse_link
from perf.records import RESULTS

FAILED, CANNOT_MEASURE, INTERRUPTED = 1, 2, 130  # exit statuses


class WrongResult(Exception):
    """What is measured does not compute what it is to compute: it gets no figure."""


def exit_status(command: str, run: Callable[[], int | None], lost: str = "no figures") -> int:
    """The exit status of `run`, 0 where it says none, or that of its error, which goes to standard error."""
    try:
        return run() or 0
    except WrongResult as error:
        text, status = f"{lost}, since a result is wrong: {error}", FAILED
    except (RankFailed, CollectiveError, TimeoutError) as error:
        text, status = f"{lost}, since a rank failed: {error}", FAILED
    except (CommandError, LabUnavailable, OSError, ValueError) as error:
        text, status = f"error: {error}", CANNOT_MEASURE
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"{command}: {text}", file=sys.stderr)
    return status


def add_out(parser: argparse.ArgumentParser, what: str, default: Path = RESULTS) -> None:
    parser.add_argument("--out", type=Path, default=default, help=f"folder of {what} (default: %(default)s)")


def make_folder(out: Path) -> None:
    """Make the folder before minutes of measuring, not after."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {str(out)!r} is no folder to write to ({error}): choose another") from error


def list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Values with commas between them."""
    return lambda text: [parse(part.strip()) for part in text.split(",")]


def one_of(what: str, known: Sequence[str]) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}: choose among {', '.join(known)}")
        return text

    return name


def link(text: str) -> str:
    try:
        return parse_link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Options of what is measured on ranks: in the lab, or on a group that is there."""
    network = parser.add_mutually_exclusive_group()
    network.add_argument("--lab", action="store_true", help="on networks of namespaces made on this machine (Linux)")
    network.add_argument("--paced", action="store_true", help="two hosts joined by paced sockets (Linux, any user)")
    parser.add_argument("--rates", type=list_of(link), help="of these links: 100mbit,1gbit,unshaped; lab: 100mbit+50ms")
    parser.add_argument(
        "--device", help="auto, cpu or cuda, which all hosts of a network share (default: auto; networks: cpu)"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="without a network: gloo on a CPU, nccl on a GPU")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)  # a rank of --lab, with these arguments


def differing(arguments: argparse.Namespace, standard: Mapping[str, Any]) -> list[str]:
    """Name each option that is not as in the standard run, and its value, for a record's name."""
    words = []
    for name, usual in standard.items():
        if (value := getattr(arguments, name)) != usual:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [name.replace("_", " "), *map(str, values)]
    return words


def refuse_idle(parser: argparse.ArgumentParser, arguments: argparse.Namespace, in_lab: Sequence[str]) -> None:
    """End with an error where an option is given that means nothing on such a network, or without one."""
    for names, there, where in (
        (in_lab, arguments.lab, "with --lab"),
        (["rates"], arguments.lab or arguments.paced, "with --lab or --paced"),
        (["backend"], not (arguments.lab or arguments.paced), "without --lab and --paced"),
    ):
        given = [f"--{name}" for name in names if getattr(arguments, name) is not None]
        if given and not there:
            parser.error(f"{' and '.join(given)}: only {where}")


def set_defaults(arguments: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Set options that were not given."""
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)

"""What the commands of perf have in common: errors as exit statuses, and options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from onebit.cli.arguments import CommandError
from onebit.collectives import CollectiveError
from perf.lab.namespaces import LabUnavailable
from perf.lab.processes import RankFailed
from perf.lab.rates import UNSHAPED, link_of, parse_rate, parse_rtt
from perf.records import RESULTS

FAILED, CANNOT_MEASURE, INTERRUPTED = 1, 2, 130  # exit statuses


class WrongResult(Exception):
    """What is measured does not compute what it is to compute: it gets no figure."""


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """On a CPU, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def exit_status(command: str, run: Callable[[], int], lost: str = "no figures") -> int:
    """The exit status of `run`, or that of its error, which goes to standard error."""
    try:
        return run()
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
    """Before minutes of measuring, not after."""
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


def host_count(text: str) -> int:
    hosts = int(text) if text.strip().isdecimal() else 0
    if not 2 <= hosts <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts: give 2 to 64")
    return hosts


def shaped_rate(text: str) -> str:
    rate = text.strip().lower()
    try:
        parse_rate(rate)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is no rate from 1mbit to 100gbit: write "100mbit"') from None
    return rate


def link_rate(text: str) -> str:
    """A rate, or that the link is not shaped."""
    return UNSHAPED if text.strip().lower() == UNSHAPED else shaped_rate(text)


def round_trip(text: str) -> str | None:
    """Between two hosts, or None for no added delay."""
    rtt = text.strip().lower()
    try:
        parse_rtt(None if rtt == "none" else rtt)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is no round trip from 1ms to 100ms: write "50ms"') from None
    return None if rtt == "none" else rtt


def add_links(parser: argparse.ArgumentParser) -> None:
    """--rates and --rtt, which `join_links` makes one, and --one-clock, of the ranks of the lab's delayed links."""
    parser.add_argument("--one-clock", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rates", type=list_of(link_rate), help="of the lab's links: 100mbit,1gbit,unshaped")
    parser.add_argument(
        "--rtt", type=list_of(round_trip), help="round trip of the lab's links, or one a rate: 50ms or none,10ms,50ms"
    )


def join_links(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """`rates` become links, as records have them, and `rtt` goes."""
    rtts = arguments.rtt or [None]
    if len(rtts) not in (1, len(arguments.rates)):
        parser.error(f"--rtt has {len(rtts)} round trips for {len(arguments.rates)} rates: give one, or one a rate")
    rtts = rtts * len(arguments.rates) if len(rtts) == 1 else rtts
    arguments.rates = [link_of(rate, rtt) for rate, rtt in zip(arguments.rates, rtts, strict=True)]
    del arguments.rtt


def refuse_idle(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, in_lab: Sequence[str], in_group: Sequence[str]
) -> None:
    """End with an error where an option is given that means nothing with --lab, or without it."""
    given = [f"--{name}" for name in (in_group if arguments.lab else in_lab) if getattr(arguments, name) is not None]
    if given:
        parser.error(f"{' and '.join(given)}: only {'without' if arguments.lab else 'with'} --lab")


def set_defaults(arguments: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Of options that were not given."""
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)

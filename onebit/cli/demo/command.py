"""`onebit demo`: an optimizer and its 1-bit forms train the same model on ranks of this machine."""

from __future__ import annotations

import argparse
import contextlib
import time

from onebit.cli.arguments import whole_number_from
from onebit.cli.demo.ranks import DemoError, lines_of
from onebit.cli.demo.report import Record, describe, progress_line
from onebit.cli.demo.train import Settings, parse_line
from onebit.cli.progress import Progress

LIMITS = {"ranks": (2, 64), "steps": (10, 10_000), "seed": (0, 2**31)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, limits in LIMITS.items():
        default = getattr(Settings(), name)
        number = whole_number_from(*limits)
        parser.add_argument(f"--{name}", type=number, default=default, metavar="N", help="default: %(default)s")


def run(arguments: argparse.Namespace) -> None:
    """Train, and print the table."""
    start = time.perf_counter()
    settings = Settings(**{name: getattr(arguments, name) for name in LIMITS})
    print(describe(train(settings, Progress())))
    print(f"\nTook {time.perf_counter() - start:.0f} s")


def train(settings: Settings, progress: Progress) -> Record:
    """All that the ranks print. A DemoError where one fails."""
    record = Record(settings)
    progress.show(f"starting {settings.ranks} ranks ...")
    try:
        with contextlib.closing(lines_of(settings)) as lines:
            for line in lines:
                record.add(parse_line(line))
                if record.steps:
                    progress.tick(progress_line(record))
    finally:
        progress.clear()
    if record.end is None:
        raise DemoError("the ranks ended without a result")
    return record

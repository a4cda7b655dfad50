"""`onebit demo`: an optimizer and its 1-bit forms train the same model on ranks of this machine."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

from onebit.cli.arguments import CommandError, bit_rate, check_picture, whole_number_from, writing_picture
from onebit.cli.demo.picture import plot
from onebit.cli.demo.ranks import DemoError, lines_of
from onebit.cli.demo.record import Record
from onebit.cli.demo.report import describe, progress_line, verdict
from onebit.cli.demo.train import RATE, Settings, parse_line
from onebit.cli.paced_link import FASTEST, SLOWEST, rate_title, why_not
from onebit.cli.progress import Progress

NO_LINK = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    parser.add_argument("--optimizer", choices=RATE, default=defaults.optimizer, help="default: %(default)s")
    for name, limits, default, about in (
        ("ranks", (2, 64), defaults.ranks, "processes"),
        ("steps", (10, 10_000), defaults.steps, "of each run"),
        ("seed", (0, 2**31), defaults.seed, "of the model and the data"),
    ):
        number, about = whole_number_from(*limits), f"{about} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=number, default=default, metavar="N", help=about)
    parser.add_argument(
        "--link",
        type=lambda text: text if text == NO_LINK else bit_rate(text, SLOWEST, FASTEST),
        metavar="RATE",
        help=f"between the ranks: 100mbit, 1gbit, ... or {NO_LINK}, as fast as this machine is (default: 100mbit, "
        "where two ranks are on Linux)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("onebit-demo.png"), help="where the plot goes (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Train, print the table, write the plot."""
    start, out = time.perf_counter(), arguments.out
    drawable = check_picture(out, "--out")
    link = link_of(arguments.link, arguments.ranks)
    settings = Settings(arguments.optimizer, arguments.ranks, arguments.steps, arguments.seed, link)
    record = train(settings, Progress())
    print(describe(record))
    if drawable:
        with writing_picture("--out"):
            plot(record, out)
    print(f"\nPlot: {out}" if drawable else "\nNo plot: matplotlib is not installed. For one: pip install matplotlib")
    print(f"Took {time.perf_counter() - start:.0f} s")
    print(f"\n{verdict(record)}")


def link_of(asked: str | float | None, ranks: int) -> float | None:
    """The link's rate, bits a second; None for no link."""
    why = why_not() or (None if ranks == 2 else "a link joins two ranks")
    if asked is None:
        return None if why else Settings.link
    if asked == NO_LINK:
        return None
    if why:
        raise CommandError(
            f"--link {rate_title(float(asked))} with {ranks} ranks can't be: {why}. Give --link {NO_LINK}"
        )
    return float(asked)


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

"""`onebit demo`: an optimizer and its 1-bit forms train the same model on ranks of this machine."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

from onebit.cli.arguments import check_picture, whole_number_from, writing_picture
from onebit.cli.demo import report as demo_report
from onebit.cli.demo.ranks import DemoError, lines_of
from onebit.cli.demo.train import RATE, Settings, parse_line
from onebit.cli.progress import Progress


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
        "--out", type=Path, default=Path("onebit-demo.png"), help="where the plot goes (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Train, print the table, write the plot."""
    start, out = time.perf_counter(), arguments.out
    drawable = check_picture(out, "--out")
    settings = Settings(arguments.optimizer, arguments.ranks, arguments.steps, arguments.seed)
    record = train(settings, Progress())
    print(demo_report.describe(record))
    if drawable:
        with writing_picture("--out"):
            demo_report.plot(record, out)
    print(f"\nPlot: {out}" if drawable else "\nNo plot: matplotlib is not installed. For one: pip install matplotlib")
    print(f"Took {time.perf_counter() - start:.0f} s")


def train(settings: Settings, progress: Progress) -> demo_report.Record:
    """All that the ranks print. A DemoError where one fails."""
    record = demo_report.Record(settings)
    progress.show(f"starting {settings.ranks} ranks ...")
    try:
        with contextlib.closing(lines_of(settings)) as lines:
            for line in lines:
                record.add(parse_line(line))
                if record.steps:
                    progress.tick(demo_report.progress_line(record))
    finally:
        progress.clear()
    if record.end is None:
        raise DemoError("the ranks ended without a result")
    return record

"""`onebit demo`: an optimizer and its 1-bit forms train the same model on ranks of this machine."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from onebit.cli.arguments import whole_number_from
from onebit.cli.demo import report as demo_report
from onebit.cli.demo.ranks import DemoError, Launcher, lines_of
from onebit.cli.demo.train import RATE, Settings, parse_line
from onebit.cli.progress import Progress
from onebit.report.plots import check_plot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    parser.add_argument("--optimizer", choices=RATE, default=defaults.optimizer, help="default: %(default)s")
    parser.add_argument(
        "--ranks",
        type=whole_number_from(2, 64),
        default=defaults.ranks,
        metavar="N",
        help="processes (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=whole_number_from(10, 10_000), default=defaults.steps, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=whole_number_from(0, 2**31), default=defaults.seed, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("onebit-demo.png"), help="where the plot goes (default: %(default)s)"
    )


def run(arguments: argparse.Namespace, *, bandwidth: str | None = None, launcher: Launcher | None = None) -> None:
    """Train, print the table, write the plot. launcher: see `lines_of`. bandwidth: of its links, for the launcher."""
    start, out = time.perf_counter(), arguments.out
    drawable = _check_plot(out)
    record = train(settings_of(arguments, bandwidth), Progress(), launcher)
    print(demo_report.describe(record))
    if drawable:
        with _writing(out):
            demo_report.plot(record, out)
    print(f"\nPlot: {out}" if drawable else "\nNo plot: matplotlib is not installed. For one: pip install matplotlib")
    print(f"Took {time.perf_counter() - start:.0f} s")


def settings_of(arguments: argparse.Namespace, bandwidth: str | None = None) -> Settings:
    return Settings(
        optimizer=arguments.optimizer,
        ranks=arguments.ranks,
        steps=arguments.steps,
        seed=arguments.seed,
        bandwidth=bandwidth,
    )


def train(settings: Settings, progress: Progress, launcher: Launcher | None = None) -> demo_report.Record:
    """All that the ranks print. A DemoError where one fails."""
    record = demo_report.Record(settings)
    progress.show(f"starting {settings.ranks} ranks ...")
    try:
        with contextlib.closing(lines_of(settings, launcher)) as lines:
            for line in lines:
                record.add(parse_line(line))
                if record.steps:
                    progress.tick(demo_report.progress_line(record))
    finally:
        progress.clear()
    if record.end is None:
        raise DemoError("the ranks ended without a result")
    return record


def _check_plot(out: Path) -> bool:
    try:
        return check_plot(out)
    except ValueError as error:
        raise DemoError(f"{error}; choose another --out", code=2) from error


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DemoError(
            f"the plot could not be written to {str(out)!r} ({error.strerror}): choose another --out", code=2
        ) from error

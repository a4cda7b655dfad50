"""`onebit demo`: an optimizer and its 1-bit twin train the same model on ranks of this machine; or the codec alone."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from onebit.cli.demo import codec as demo_codec
from onebit.cli.demo import report as demo_report
from onebit.cli.demo.ranks import DemoError, Launcher, lines_of
from onebit.cli.demo.train import RATE, Settings, parse_line
from onebit.cli.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    parser.add_argument("--optimizer", choices=RATE, default=defaults.optimizer, help="default: %(default)s")
    parser.add_argument(
        "--ranks", type=_between(2, 64), default=defaults.ranks, metavar="N", help="processes (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=_between(10, 10_000), default=defaults.steps, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=_between(0, 2**31), default=defaults.seed, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--codec", action="store_true", help="show the 1-bit codec instead, in a few seconds")
    parser.add_argument(
        "--out", type=Path, default=Path("onebit-demo.png"), help="where the plot goes (default: %(default)s)"
    )


def run(
    arguments: argparse.Namespace, progress: Progress, *, bandwidth: str | None = None, launcher: Launcher | None = None
) -> None:
    """Train, print the table, write the plot. launcher: see `lines_of`. bandwidth: of its links, for the launcher."""
    start, out = time.perf_counter(), arguments.out
    draw: Callable[[Path], None]
    drawable = _check_plot(out)
    if arguments.codec:
        found = demo_codec.measure()
        text, draw = demo_codec.describe(found), partial(demo_codec.plot, found)
    else:
        record = train(settings_of(arguments, bandwidth), progress, launcher)
        text, draw = demo_report.describe(record), partial(demo_report.plot, record)
    print(text)
    if drawable:
        with _writing(out):
            draw(out)
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
    """Whether there is matplotlib; a DemoError where it could not write `out`. Found out before the work."""
    try:
        import matplotlib
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        return False
    matplotlib.use("Agg")
    kinds, kind = FigureCanvasBase.get_supported_filetypes(), out.suffix.lstrip(".").lower()
    if kind not in kinds:
        raise DemoError(f"a plot cannot be a {kind!r} file: choose another --out, such as onebit-demo.png", code=2)
    there = out.exists()
    with _writing(out):
        out.open("ab").close()
        if not there:
            out.unlink()
    return True


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DemoError(
            f"the plot could not be written to {str(out)!r} ({error.strerror}): choose another --out", code=2
        ) from error


def _between(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least:,} to {most:,}")
        return int(text)

    return number

"""A benchmark's ranks on the hosts of a lab: what they print in marked lines, and how the benchmark reads it.

Rank 0 prints progress and what was found; any rank prints what is wrong with a result before it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onebit.cli.progress import Progress
from onebit.kernels.tuning import cache
from perf.command import FAILED, WrongResult
from perf.lab.delay import WrongLink
from perf.lab.paced import Network
from perf.lab.processes import RankFailed
from perf.lab.rates import rtt_seconds
from perf.ranks import LONGEST, ONE_CLOCK

ROOT = Path(__file__).resolve().parents[2]
PROGRESS, RESULT, WRONG, REFUSED = "@progress ", "@result ", "@wrong ", "@refused "
Publish = Callable[[Any], None]  # gets dataclasses, and descriptions, which are dicts


def print_progress(text: str) -> None:
    print(PROGRESS + text, flush=True)


def print_result(found: Any) -> None:
    fields = found if isinstance(found, dict) else asdict(found)
    print(RESULT + json.dumps([type(found).__name__, fields]), flush=True)


def run_worker(run: Callable[[], object]) -> int:
    """The exit status of a rank: what is wrong with a result or a link goes to the benchmark."""
    try:
        run()
    except (WrongResult, WrongLink) as error:
        print(f"{WRONG if isinstance(error, WrongResult) else REFUSED}{error}", flush=True)
        return FAILED
    return 0


def worker(arguments: argparse.Namespace, **others: Any) -> list[str]:
    """Options of a rank: the benchmark's arguments, but for these."""
    return ["--worker", json.dumps({**vars(arguments), **others}, default=str)]


@contextlib.contextmanager
def _no_choices() -> Iterator[str]:
    """A cache folder without choices, and with the machine code of this user's cache: ranks compile nothing twice."""
    with tempfile.TemporaryDirectory(prefix="onebit-lab-") as folder:
        loops = (cache.folder() / "loops").absolute()
        with contextlib.suppress(OSError):  # a home that can't be written to
            loops.mkdir(mode=0o755, parents=True, exist_ok=True)
            Path(folder, "loops").symlink_to(loops)
        yield folder


def run_workers(
    lab: Network,
    argv: Sequence[str],
    progress: Progress,
    kinds: Mapping[str, Callable[[Any], Any]] | None = None,
    publish: Publish = lambda found: None,
) -> None:
    """Run `python argv` on every host; `publish` gets what rank 0 prints with `print_result`, as it comes.

    kinds: what makes a result of its fields, by the name of its class. WrongResult or RankFailed where a rank ends with
    an error. On links with a round trip ranks share a clock: their barriers would leave them a round trip apart.
    """
    wrong: list[Exception] = []
    network = f"{lab.hosts} hosts, {lab.link}"

    def on_line(rank: int, line: str) -> None:
        if line.startswith(WRONG):
            wrong.append(WrongResult(f"{network}: {line.removeprefix(WRONG)}"))
        elif line.startswith(REFUSED):
            wrong.append(WrongLink(line.removeprefix(REFUSED)))
        elif rank == 0 and line.startswith(PROGRESS):
            progress.show(f"{network}: {line.removeprefix(PROGRESS)}")
        elif rank == 0 and line.startswith(RESULT):
            kind, fields = json.loads(line.removeprefix(RESULT))
            publish({"dict": dict, **(kinds or {})}[kind](fields))

    progress.show(f"{network}: starting the ranks")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    clock = {ONE_CLOCK: "1"} if rtt_seconds(lab.link) else {}
    with _no_choices() as fresh:  # chunks="auto" measures every network anew
        env = {"PYTHONPATH": path, "ONEBIT_CACHE_DIR": fresh, **clock}
        try:
            lab.run(argv, timeout=LONGEST, env=env, on_line=on_line)
        except RankFailed as error:
            raise (wrong[0] if wrong else error) from error

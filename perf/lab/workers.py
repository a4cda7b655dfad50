"""A benchmark's ranks on the hosts of a lab: what they print in marked lines, and how the benchmark reads it.

A worker prints progress and results on rank 0; any rank prints what is wrong with a result before it ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from onebit.cli.progress import Progress
from perf.command import FAILED, WrongResult
from perf.lab.network import NetworkLab
from perf.lab.processes import RankFailed

ROOT = Path(__file__).resolve().parents[2]
PROGRESS, RESULT, WRONG = "@progress ", "@result ", "@wrong "


def print_progress(text: str) -> None:
    print(PROGRESS + text, flush=True)


def print_result(text: str) -> None:
    print(RESULT + text, flush=True)


def run_worker(run: Callable[[], object]) -> int:
    """The exit status of a rank: what is wrong with a result goes to the benchmark."""
    try:
        run()
    except WrongResult as error:
        print(f"{WRONG}{error}", flush=True)
        return FAILED
    return 0


def search_path() -> str:
    """PYTHONPATH of a process that imports perf, wherever it starts."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def run_workers(
    lab: NetworkLab,
    argv: Sequence[str],
    network: str,
    timeout: float,
    progress: Progress,
    on_result: Callable[[str], None] = lambda text: None,
) -> None:
    """Run `python argv` on every host; `on_result` gets what rank 0 prints with `print_result`, as it comes.

    WrongResult or RankFailed where a rank ends with an error.
    """
    wrong: list[str] = []

    def on_line(rank: int, line: str) -> None:
        if line.startswith(WRONG):
            wrong.append(line.removeprefix(WRONG))
        elif rank == 0 and line.startswith(PROGRESS):
            progress.show(f"{network}: {line.removeprefix(PROGRESS)}")
        elif rank == 0 and line.startswith(RESULT):
            on_result(line.removeprefix(RESULT))

    progress.show(f"{network}: starting the ranks")
    with tempfile.TemporaryDirectory(prefix="onebit-lab-") as cache:  # chunks="auto" measures every network anew
        env = {"PYTHONPATH": search_path(), "ONEBIT_CACHE_DIR": cache}
        try:
            lab.run(argv, timeout=timeout, launcher="env", env=env, on_line=on_line)
        except RankFailed as error:
            raise (WrongResult(f"{network}: {wrong[0]}") if wrong else error) from error

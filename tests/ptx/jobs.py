"""Work that several processes share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from typing import Any, TypeVar

from onebit.cli.progress import Progress

T, R = TypeVar("T"), TypeVar("R")
_work: list[Callable[[], Any]] = []  # a forked process finds here what can't be pickled


def in_turn(run: Callable[[T], R], of: Sequence[T], jobs: int, progress: Progress) -> Iterator[R]:
    """What comes of each, in their order, while `jobs` processes work on them."""
    _work[:] = [lambda each=each: run(each) for each in of]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for number, running in enumerate([pool.submit(_do, number) for number in range(len(of))]):
            while True:
                try:
                    found = running.result(timeout=1.0)
                    break
                except TimeoutError:
                    progress.tick(f"{number} of {len(of)}")
            yield found


def _do(number: int) -> Any:
    return _work[number]()

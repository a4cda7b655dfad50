"""Work that several processes share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from onebit.cli.progress import Progress

T, R = TypeVar("T"), TypeVar("R")
_work: list[Callable[[], Any]] = []  # a forked process finds here what can't be pickled


def in_turn(run: Callable[[T], R], of: Sequence[T], jobs: int, progress: Progress) -> Iterator[R]:
    """What comes of each, in their order, while `jobs` processes work on them."""
    _work[:] = [lambda each=each: run(each) for each in of]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for number, found in enumerate(pool.imap(_do, range(len(of))), start=1):
            progress.tick(f"{number} of {len(of)}")
            yield found


def _do(number: int) -> Any:
    return _work[number]()

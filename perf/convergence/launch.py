"""A run of the convergence study on virtual ranks of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from perf.convergence.plan import TASKS, Run
from perf.convergence.runs import Show, train
from perf.convergence.tasks import Prepared
from perf.convergence.virtual import run_ranks


def launch(run: Run, data: Path, show: Show) -> Mapping[str, Any]:
    """Rank 0's record; `data` is a file that torch.save made of Prepared's fields."""
    with _one_thread_a_rank():
        prepared = Prepared(**torch.load(data, mmap=True, weights_only=True))
        torch.manual_seed(run.seed)
        model = TASKS[run.task].model(prepared).train()
        return run_ranks(run.ranks, lambda rank: train(run, prepared, deepcopy(model), rank, show))[0]


@contextmanager
def _one_thread_a_rank() -> Iterator[None]:
    threads, quiet = torch.get_num_threads(), os.environ.get("ONEBIT_QUIET")
    torch.set_num_threads(1)
    os.environ["ONEBIT_QUIET"] = "1"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.environ.pop("ONEBIT_QUIET")
        if quiet is not None:
            os.environ["ONEBIT_QUIET"] = quiet

"""What the model is told of a lab: the passes' rates and the latency, measured apart from the rows it is to predict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from onebit.kernels import cpu
from onebit.kernels.passes import bytes_per_element
from onebit.kernels.tuning.workload import Workload
from perf.all_reduce.measure import Row

SMALL = 1024  # elements of an all-reduce that is nothing but latency
PASSES, PASS_RUNS = ("scan", "compress", "average", "decode"), 30


def pass_rates(ranks: int, elements: int) -> dict[str, float]:
    """B/s of one process alone on one thread, the fastest of its runs."""
    threads, found = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        passes = Workload(elements, ranks=ranks).passes(cpu)
        for name in PASSES:
            each = bytes_per_element(name, 4, master=False, packed=True, ranks=ranks)
            share = elements / ranks if name == "average" else elements
            found[name] = share * each / min(_seconds(passes[name].run) for _ in range(PASS_RUNS))
    finally:
        torch.set_num_threads(threads)
    return found


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def latency(rows: Sequence[Row]) -> float:
    """Seconds of a message: an all-reduce of N ranks sends 2 (N - 1) of them one after the other."""
    small = [row for row in rows if row.elements == SMALL and row.kind in ("fp32", "fp16")]
    return statistics.median(min(row.calls) / (2 * (row.hosts * row.each - 1)) for row in small)

"""Threads of our own for the compiled loops, which let go of the interpreter's lock: one run of blocks each.

A loop never waits for another, so that calls from several Python threads share the threads. Cutting a span never
changes a result: blocks are worked on alone, and what is summed over blocks is summed afterwards, in their order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.cpu.compile import Loop
from onebit.kernels.cpu.tiles import TYPES
from onebit.kernels.data.layout import Span
from onebit.kernels.data.record import argument
from onebit.kernels.passes import Pass

OF_A_RUN = ("first", "stop", "scratch")  # of a loop's parameters
LEAST = 2**16  # elements for which a thread is worth waking
_LANES_BYTES = 64
_pool: ThreadPoolExecutor | None = None
_workers = 0


def over_blocks(loop: Loop, span: Span, found: Mapping[str, Any], scratch_blocks: int = 0) -> None:
    """loop(first, stop, scratch, *numbers) for runs of blocks that together are all of a span. At the address
    `scratch` is memory for `scratch_blocks` blocks of fp32, none of them short, and after them for a block's bits, or
    sixteen floats.
    """
    parts, block_size = max(1, min(torch.get_num_threads(), span.elements // LEAST)), span.layout.block_size
    size = scratch_blocks * 4 * block_size + max(block_size // 8, _LANES_BYTES)
    scratch = np.empty(parts * size, dtype=np.uint8)
    cuts = [span.count * i // parts for i in range(parts + 1)]
    arguments = numbers(loop, found)
    runs = [(cuts[i], cuts[i + 1], scratch.ctypes.data + i * size, *arguments) for i in range(parts)]
    waiting = [_submitted(loop, run, parts - 1) for run in runs[1:]]
    loop(*runs[0])
    for future in waiting:
        future.result()


def one_loop(loop: Loop, scratch_blocks: int = 0) -> Callable[[Pass], None]:
    """What runs a pass that has one loop."""
    return lambda work: over_blocks(loop, work.span, work.arguments(), scratch_blocks)


def numbers(loop: Loop, found: Mapping[str, Any]) -> list[float]:
    """What the parameters of a loop get, but for those of a run: the arguments of the same names. A tensor is passed as
    its address, and None as 0."""
    return [_number(argument(found, name)) for name in loop.parameters if name not in OF_A_RUN]


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, torch.dtype):
        return TYPES[value]
    return int(value or 0) if value is None or isinstance(value, bool) else value


def _submitted(loop: Loop, run: tuple[float, ...], workers: int) -> Future[None]:
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        return _threads(workers).submit(loop, *run)
    loop(*run)
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _threads(workers: int) -> ThreadPoolExecutor:
    global _pool, _workers
    if _pool is None or workers > _workers:
        _pool, _workers = ThreadPoolExecutor(workers, thread_name_prefix="onebit-cpu"), workers
    return _pool


def _forget() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # threads do not survive a fork

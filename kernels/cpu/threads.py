"""Threads of our own for the compiled loops, which let go of the interpreter's lock: one run of blocks each.

A loop never waits for another, so that calls from several Python threads share the threads. Cutting a span never
changes a result: blocks are worked on alone, and what is summed over blocks is summed afterwards, in their order.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.cpu import tiles
from onebit.kernels.cpu.compile import Loop
from onebit.kernels.data.layout import Span
from onebit.kernels.data.record import argument
from onebit.kernels.passes import Pass

OF_A_PASS = (tiles.Parameters, tiles.Gradients, tiles.Floors)  # whose fields are arguments by their own names
LEAST = 2**16  # elements for which a thread is worth waking
_LANES_BYTES = 64
_PLAIN = (int, float)
_NUMBERS: dict[Any, int] = {None: 0, False: 0, True: 1, **tiles.TYPES}  # of what is neither a number nor a tensor
_pool: ThreadPoolExecutor | None = None
_workers = 0


def over_blocks(loop: Loop, span: Span, found: Mapping[str, Any], scratch_blocks: int = 0) -> None:
    """A loop on runs of blocks that together are all of a span, each with scratch memory for so many blocks of fp32,
    none of them short, and after them for a block's bits, or sixteen floats.
    """
    parts, block_size = max(1, min(torch.get_num_threads(), span.elements // LEAST)), span.layout.block_size
    size = scratch_blocks * 4 * block_size + max(block_size // 8, _LANES_BYTES)
    scratch = np.empty(parts * size, dtype=np.uint8)
    whole, *arguments = numbers(loop, found)
    runs, first = [], 0
    for i in range(parts):
        stop = span.count * (i + 1) // parts
        runs.append((tiles.Run(first, stop, scratch.ctypes.data + i * size, *whole[3:]), *arguments))
        first = stop
    waiting: list[Future[None]] = []
    try:
        for run in runs[1:]:
            waiting.append(_submitted(loop, run, parts - 1, (scratch, found)))
        loop(*runs[0])
        for future in waiting:
            future.result()
    except BaseException:  # of a signal: the other threads still write to the pass's tensors
        wait(waiting)
        raise


def one_loop(loop: Loop, scratch_blocks: int = 0) -> Callable[[Pass], None]:
    """What runs a pass that has one loop."""
    return lambda work: over_blocks(loop, work.span, work.arguments(), scratch_blocks)


def numbers(loop: Loop, found: Mapping[str, Any]) -> list[Any]:
    """What the parameters of a loop get: the arguments of the same names; one that is a tuple, those of its fields. A
    tensor is passed as its address, and None as 0. A run is all blocks, without scratch memory."""
    names, taken = _taken_by(loop)
    values = list[Any]()
    for name in names:
        value = found[name] if name in found else argument(found, name)
        if isinstance(value, Tensor):
            values.append(value.data_ptr())
        else:
            values.append(value if type(value) in _PLAIN else _NUMBERS.get(value, value))
    made, start = list[Any](), 0
    for kind, count in taken:
        own, start = values[start : start + count], start + count
        if kind is tiles.Run:
            own = [0, own[0], 0, *own[1:]]
        made.append(own[0] if kind in _PLAIN else kind(*own))
    return made


@functools.cache
def _taken_by(loop: Loop) -> tuple[list[str], list[tuple[Any, int]]]:
    """The arguments of all parameters of a loop, and of each parameter what it is, and of how many it is made."""
    names, taken = list[str](), []
    for name, kind in loop.parameters.items():
        fields = getattr(kind, "_fields", ())
        if kind is tiles.Run:
            own = ["blocks", *fields[3:]]
        elif kind in OF_A_PASS:
            own = [*fields]
        else:
            own = [name if field == "address" else f"{name}_{field}" for field in fields] or [name]
        names += own
        taken.append((kind, len(own)))
    return names, taken


def _submitted(loop: Loop, run: tuple[Any, ...], workers: int, memory: Any) -> Future[None]:
    """memory: what the loop reads and writes, which stays until it has ended, even if nobody waits for it."""
    ended, work = Future[None](), [loop, run, memory]
    try:
        _threads(workers).submit(_run, ended, work)
    except RuntimeError:  # the interpreter is shutting down, or no thread can start: then the pool has queued the work
        if ended.cancel():
            work.clear()
            loop(*run)
            ended = Future()
            ended.set_result(None)
    return ended


def _run(ended: Future[None], work: list[Any]) -> None:
    if ended.set_running_or_notify_cancel():
        loop, run, _ = work
        try:
            loop(*run)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)


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

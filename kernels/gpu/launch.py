"""Launching Triton kernels: a program works on a few blocks, the tuner gives the shape, no fused multiply-adds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebit.kernels.data.layout import BLOCK_SIZE
from onebit.kernels.data.record import argument
from onebit.kernels.passes import Pass
from onebit.kernels.tuning import tuner

MOST_WARPS = 16  # of a program: 1024 threads where a warp has 64
ELEMENTS_OF_WARP = 128  # 32 threads with an access of 4 elements each
DTYPES = ("PARAM_DTYPE", "GRAD_DTYPE", "OUT_DTYPE")  # of the tensors that addresses point to
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments and shape."""

    kernel: Any
    arguments: dict[str, Any]
    config: tuner.Config
    programs: int


_record: list[Launch] | None = None


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """A context in which launches are collected instead of run, for ahead-of-time compilation."""
    global _record
    _record, before = [], _record
    try:
        with tuner.suspended():
            yield _record
    finally:
        _record = before


def launcher(kernel: Any) -> Callable[[dict[str, Any]], None]:
    """What launches a kernel over the blocks of a span. Its parameters get the arguments of the same names, those in
    capitals are compiled in.
    """
    names = [(name, name.lower()) for name in kernel.arg_names if name != "BLOCKS_PER_PROGRAM"]
    dtypes = [(name, name.lower()) for name in DTYPES if name in kernel.arg_names]

    def run(found: dict[str, Any]) -> None:
        try:
            arguments = {name: found[source] for name, source in names}
        except KeyError:
            arguments = {name: argument(found, source) for name, source in names}
        dtype = found[dtypes[0][1]] if dtypes else torch.float32  # what the kernel's shape is tuned for
        for name, source in dtypes:
            arguments[name] = TYPES[found[source]]
        launch(kernel, found["blocks"], arguments, found["block_table"], dtype)

    return run


def one_launch(kernel: Any) -> Callable[[Pass], None]:
    """What runs a pass that has one kernel."""
    run = launcher(kernel)
    return lambda work: run(work.arguments())


def launch(kernel: Any, blocks: int, arguments: dict[str, Any], like: Tensor, dtype: torch.dtype) -> None:
    """Run `kernel` over `blocks` blocks on the device of `like`."""
    config = _for_tile(tuner.lookup(str(kernel.__name__), like.device, dtype), arguments["TILE"])
    programs = triton.cdiv(blocks, config.blocks_per_program)
    if _record is not None:
        _record.append(Launch(kernel, arguments, config, programs))
        return

    def run() -> None:
        # Fused multiply-adds would round c another way than the CPU does and could turn a sign.
        per_program = config.blocks_per_program
        kernel[(programs,)](**arguments, BLOCKS_PER_PROGRAM=per_program, num_warps=config.warps, enable_fp_fusion=False)

    _on_device(like, run)


@functools.cache
def _for_tile(config: tuner.Config, tile: int) -> tuner.Config:
    """A config for a tile of 2048 elements, with as many more warps as this tile has more elements: fewer would spill.
    No more warps than the tile has elements for: others would hold copies, and could read what has been stored."""
    warps = min(MOST_WARPS, config.warps * max(1, tile // BLOCK_SIZE), tile // ELEMENTS_OF_WARP)
    return replace(config, warps=max(1, warps))


def _on_device(like: Tensor, run: Callable[[], None]) -> None:
    if like.is_cuda and like.get_device() != torch.cuda.current_device():
        with torch.cuda.device(like.device):
            run()
    else:
        run()

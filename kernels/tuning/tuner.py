"""Kernel shapes, measured once on each device and kept in a cache file.

A Triton kernel's blocks a program and warps are chosen on its first use on a GPU, or ahead by `onebit tune`.
ONEBIT_TUNE=0 switches measuring on first use off. The CPU's loops have nothing to choose.

Sums over a block are taken in an order that depends on the warps. Tuning must never change a result: ranks have to
agree on LAMB's norms, and a run resumed elsewhere on its scales, to the last bit. So where a kernel sums
(`SUMMING_KERNELS`) the warps are fixed, and only the blocks a program are chosen.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from onebit.kernels.backends import load
from onebit.kernels.log import to_log
from onebit.kernels.passes import PASSES
from onebit.kernels.streams import capturing
from onebit.kernels.tuning import cache
from onebit.kernels.tuning.machine import device_name, versions
from onebit.kernels.tuning.timing import Timing, timing
from onebit.kernels.tuning.workload import OF_SHARD, Bound, Workload


@dataclass(frozen=True)
class Config:
    """Shape of a Triton launch: how many blocks, one after the other, and how many warps a program has. Warps are those
    of a block of 2048 elements or fewer: `launch` gives a longer block more."""

    blocks_per_program: int
    warps: int


@dataclass(frozen=True)
class Choice:
    """The configuration chosen, each candidate's time (inf: it does not run here), and whether the cache has it."""

    config: Config
    seconds: Mapping[Config, float]
    saved: bool = False


DEFAULT = Config(blocks_per_program=1, warps=4)  # a thread has 16 elements of a block of 2048
WARPS = {"average_kernel": 2}  # where an H100 is faster with other warps: 92 % of a copy in place of 73
ELEMENTS = 2**26  # on an H100 the shortest pass then takes some 80 us, well above what times differ by
FEWER = 2**24  # where there is no room for so many
# Which pass runs a kernel. LAMB's warmup launches two.
PASS_OF = {kernel: each.name for each in PASSES.values() for kernel in each.kernels()}
SUMMING_KERNELS = {kernel for each in PASSES.values() for kernel, adds_up in each.kernels().items() if adds_up}
_EQUAL = 0.01  # of the fastest time: what is as close, or within the spread of either, is as fast

_NEVER = Timing(math.inf)
_known: dict[tuple[str, torch.device, torch.dtype], Config] = {}
_lock = threading.RLock()
_suspended = 0


def default(kernel: str) -> Config:
    return replace(DEFAULT, warps=WARPS.get(kernel, DEFAULT.warps))


def candidates(kernel: str) -> list[Config]:
    """What a kernel may be launched with, the default first."""
    first = default(kernel)
    warps = [first.warps] if kernel in SUMMING_KERNELS else [first.warps, 8, 16]
    return [Config(b, w) for w, b in itertools.product(warps, (first.blocks_per_program, 2, 4, 8))]


def kernel_dtype(kernel: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype under which a kernel is looked up when parameters have `dtype`."""
    return dtype if PASSES[PASS_OF[kernel]].touches_tensors() else torch.float32


def lookup(kernel: str, device: torch.device, dtype: torch.dtype) -> Config:
    """The configuration to launch `kernel` with; the first use on a GPU may measure it."""
    known = _known.get((kernel, device, dtype))
    return _find(kernel, device, dtype) if known is None else known


def choose(
    options: Sequence[Config], measure: Callable[[Config], Timing], trying: Callable[[Config], None] | None = None
) -> Choice:
    """The fastest of `options`; of equally fast ones the earliest. One that cannot run is skipped. `trying` is called
    with each option before it is measured.
    """
    times = {}
    for option in options:
        if trying is not None:
            trying(option)
        try:
            found = measure(option)
        except Exception as error:  # out of shared memory, a compiler's limit: each version raises its own
            to_log(logging.DEBUG, "%s does not run here: %s", option, error)
            found = _NEVER
        times[option] = found if math.isfinite(found.seconds) and found.seconds > 0 else _NEVER
    fastest = min(times.values(), key=lambda time: time.seconds)
    chosen = next(option for option in options if _as_fast(times[option], fastest))
    return Choice(chosen, {option: time.seconds for option, time in times.items()})


def _as_fast(time: Timing, fastest: Timing) -> bool:
    if fastest is _NEVER:
        return True
    return time.seconds <= fastest.seconds + max(_EQUAL * fastest.seconds, time.spread, fastest.spread)


def tune(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    elements: int = ELEMENTS,
    measure: Callable[[Config], Timing] | None = None,
    trying: Callable[[Config], None] | None = None,
) -> Choice:
    """Measure a kernel's candidates on a GPU, use the best from now on, and write it to the cache."""
    dtype = kernel_dtype(kernel, dtype)
    key = (kernel, device, dtype)
    with _lock, suspended():
        try:
            choice = choose(candidates(kernel), measure or gpu_measure(kernel, device, dtype, elements), trying)
        finally:
            _known.pop(key, None)
            if device.type == "cuda" and measure is None:
                torch.cuda.empty_cache()  # the buffers go back to the device
        _known[key] = choice.config
        return _saved(choice, _key(device, kernel, dtype))


def kernel_pass(kernel: str, device: torch.device, dtype: torch.dtype, elements: int = ELEMENTS) -> Bound:
    """The pass that runs `kernel` over `elements` elements."""
    ranks, name = 8, PASS_OF[kernel]
    numel = elements * ranks if name in OF_SHARD else elements
    return Workload(numel, device, dtype=dtype, ranks=ranks).passes(load("gpu"))[name]


@contextmanager
def suspended() -> Iterator[None]:
    """A context in which no first use is measured."""
    global _suspended
    _suspended += 1
    try:
        yield
    finally:
        _suspended -= 1


def forget() -> None:
    """Drop the choices kept in this process; the cache file is read again."""
    with _lock:
        _known.clear()
        cache.forget()


def _find(kernel: str, device: torch.device, dtype: torch.dtype) -> Config:
    key = (kernel, device, dtype)
    with _lock:
        if key in _known:
            return _known[key]
        if device.type != "cuda" or _interpreted():
            return _known.setdefault(key, default(kernel))
        if (found := _cached(candidates(kernel), _key(device, kernel, dtype))) is not None:
            return _known.setdefault(key, found)
        if kernel not in PASS_OF or _switched_off():
            return _known.setdefault(key, default(kernel))
        if _suspended or capturing(device):
            return default(kernel)
        return _known.setdefault(key, _first_use(kernel, device, dtype))


def _first_use(kernel: str, device: torch.device, dtype: torch.dtype) -> Config:
    to_log(
        logging.INFO,
        "Choosing how to run %s (%s) on %s: a few seconds, once. `onebit tune` does it ahead of time.",
        kernel, dtype, device_name(device),
    )  # fmt: skip
    for elements in (ELEMENTS, FEWER):
        try:
            choice = tune(kernel, device, dtype, elements)
        except RuntimeError as error:  # no memory left beside the model
            why = error
        else:
            to_log(logging.INFO, "Running %s with %s from now on", kernel, choice.config)
            return choice.config
    to_log(logging.INFO, "Running %s with defaults: measuring was not possible (%s)", kernel, why)
    return default(kernel)


def gpu_measure(kernel: str, device: torch.device, dtype: torch.dtype, elements: int) -> Callable[[Config], Timing]:
    work = kernel_pass(kernel, device, dtype, elements)

    def measure(config: Config) -> Timing:
        _known[kernel, device, dtype] = config
        with _synchronising():
            return timing(work.run, device)

    with _synchronising():
        work.run()  # makes the buffers: where memory is short, nothing is measured
    return measure


@contextmanager
def _synchronising() -> Iterator[None]:
    """Allow waiting for the device, which measuring does, also where torch.cuda.set_sync_debug_mode forbids it."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _switched_off() -> bool:
    return os.environ.get("ONEBIT_TUNE", "1").lower() in ("0", "false", "off", "no")


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _cached(options: Sequence[Config], key: str) -> Config | None:
    """The choice in the cache, if it is one of `options`."""
    entry = cache.shared().get(key)
    return next((o for o in options if asdict(o) == entry), None)


def _saved(choice: Choice, key: str) -> Choice:
    """Write a choice to the cache, unless nothing ran at all."""
    ran = math.isfinite(choice.seconds[choice.config])
    return replace(choice, saved=ran and cache.shared().put(key, asdict(choice.config)))


def _key(device: torch.device, kernel: str, dtype: torch.dtype) -> str:
    return f"{device_name(device)}, {kernel}, {str(dtype).removeprefix('torch.')}, {versions()}"

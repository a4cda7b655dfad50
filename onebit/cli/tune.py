"""`onebit tune`: measures how kernels and exchanges run fastest here, and caches it for every later run.

Alone it measures the kernels of one GPU. Under torchrun one rank of each machine does that for its machine, and then
all ranks measure in how many chunks they exchange fastest. On a CPU the kernels have nothing to choose.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import astuple

import torch
import torch.distributed as dist

from onebit.cli.arguments import DTYPES, CommandError, pick_device, whole_number
from onebit.cli.progress import Progress
from onebit.collectives.chunking import Chunking
from onebit.collectives.reply import exchange_for
from onebit.collectives.topology import Topology
from onebit.kernels.tuning import cache, tuner
from onebit.kernels.tuning.machine import device_name
from onebit.kernels.tuning.tuner import Choice, Config

MARK = "   <- chosen"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of parameters and gradients (default: %(default)s)"
    )
    parser.add_argument(
        "--elements",
        type=whole_number,
        default=tuner.ELEMENTS,
        help="of the model: what is measured on (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    if dist.is_torchelastic_launched():
        return _run_group(arguments)
    device = pick_device(arguments.device)
    saved = _tune_device(arguments, device, Progress())
    if device.type != "cpu":
        _write(_where(saved))
    _write(
        "Chunks are measured on a group of ranks: on each host with "
        "torchrun --nnodes=... --nproc-per-node=... -m onebit tune"
    )


def _run_group(arguments: argparse.Namespace) -> None:
    local = int(os.environ["LOCAL_RANK"])
    cuda = arguments.device == "cuda" or (arguments.device == "auto" and torch.cuda.is_available())
    device = pick_device(f"cuda:{local}" if cuda else "cpu" if arguments.device == "auto" else arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    first = dist.get_rank() == 0
    try:
        with nullcontext() if first else redirect_stdout(None):
            _tune_group(arguments, device, local, Progress(silent=not first))
    finally:
        dist.destroy_process_group()


def _tune_group(arguments: argparse.Namespace, device: torch.device, local: int, progress: Progress) -> None:
    saved = True
    if local == 0:  # one rank a machine: measured beside each other, ranks would slow each other down
        saved = _tune_device(arguments, device, progress)
    dist.barrier()
    tuner.forget()  # the others of this machine find the choices in the cache
    saved &= _tune_chunks(arguments, device, progress)
    _write(_where(saved))
    dist.barrier()


def _tune_chunks(arguments: argparse.Namespace, device: torch.device, progress: Progress) -> bool:
    """How many chunks suit the network between the ranks."""
    topology, dtype, elements = Topology.of(), DTYPES[arguments.dtype], arguments.elements
    everyone, exchange_class = topology.everyone, exchange_for("auto", topology.replicas.size)
    chunking = Chunking(topology, elements, device, exchange_class=exchange_class)
    options = chunking.options
    _write(f"\nChunks of an exchange: {everyone.name}, {everyone.size} ranks on {device.type}, {elements:,} elements")
    seconds: dict[int, float] = {}
    for i, chunks in enumerate(options, start=1):
        progress.show(f"[{i}/{len(options)}] measuring {chunks} chunks")
        seconds |= chunking.measure([chunks], dtype)
    progress.clear()
    if len(seconds) < len(options):
        raise CommandError(f"a rank has not enough memory for {elements:,} elements: use a smaller --elements")
    best, saved = chunking.save(seconds)
    for chunks, each in seconds.items():
        _write(f"  chunks {chunks:<3}{each * 1e3:10.1f} ms{MARK if chunks == best else ''}")
    return saved


def _tune_device(arguments: argparse.Namespace, device: torch.device, progress: Progress) -> bool:
    elements = arguments.elements
    if device.type == "cpu":
        _write(f"{device_name(device)}: the kernels of a CPU have nothing to choose")
        return True
    _write(f"{device_name(device)}, {arguments.dtype}, {elements:,} elements")
    try:
        return _tune_gpu(device, DTYPES[arguments.dtype], elements, progress)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise CommandError(f"not enough memory for {elements:,} elements: use a smaller --elements") from error
    finally:
        progress.clear()


def _tune_gpu(device: torch.device, dtype: torch.dtype, elements: int, progress: Progress) -> bool:
    saved = True
    for i, kernel in enumerate(tuner.PASS_OF, start=1):
        trying = _shown(progress, f"[{i}/{len(tuner.PASS_OF)}] {kernel}", len(tuner.candidates(kernel)))
        choice = tuner.tune(kernel, device, dtype, elements, trying=trying)
        progress.clear()
        nbytes = tuner.kernel_pass(kernel, device, dtype, elements).bytes
        saved &= choice.saved
        _write(f"\n{kernel} (timed in the pass {tuner.PASS_OF[kernel]})\n{_table(choice, nbytes)}")
    return saved


def _shown(progress: Progress, title: str, count: int) -> Callable[[Config], None]:
    """Shows the candidates of a choice as they are tried."""
    tried = itertools.count(1)
    return lambda config: progress.tick(f"{title}: {_name(config)}, candidate {next(tried)} of {count}")


def _table(choice: Choice, nbytes: int) -> str:
    """The candidates, the chosen one marked."""
    if not math.isfinite(choice.seconds[choice.config]):
        raise CommandError("no candidate ran: try a smaller --elements, and see that the device works at all")
    lines = []
    for config, seconds in sorted(choice.seconds.items(), key=lambda item: astuple(item[0])):
        ran = math.isfinite(seconds)
        took = f"{seconds * 1e3:10.3f} ms {nbytes / seconds / 1e9:8.1f} GB/s" if ran else "  does not run here"
        lines.append(f"  {_name(config):<20}{took}{MARK if config == choice.config else ''}")
    return "\n".join(lines)


def _name(config: Config) -> str:
    return f"blocks {config.blocks_per_program}, warps {config.warps}"


def _where(saved: bool) -> str:
    path = cache.shared().path
    return f"\nWritten to {path}" if saved else f"\nNot written to {path}: the choices end with this command"


def _write(text: str) -> None:
    print(text, flush=True)

"""The command line: `onebit demo`, `onebit tune` and `onebit plan`."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import astuple

import torch
import torch.distributed as dist

from onebit import demo, plan
from onebit.collectives.chunking import candidates, measure_chunks, remember_chunks
from onebit.collectives.transport import transport_for
from onebit.demo_ranks import DemoError
from onebit.kernels import backend, tuning
from onebit.kernels.layout import BLOCK_SIZE
from onebit.kernels.machine import device_name
from onebit.kernels.tuning import C, Choice, CpuConfig
from onebit.kernels.workload import Workload
from onebit.plan import PlanError
from onebit.progress import Progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CommandError(Exception):
    """Something the user can put right."""

    code = 2


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        _COMMANDS[arguments.command](arguments)
    except (CommandError, DemoError, PlanError) as error:
        print(f"onebit {arguments.command}: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    return 0


def whole_number(text: str) -> int:
    """16777216, 16_777_216 or 2**24; up to 2**40, a memory no machine has"""
    power = re.fullmatch(r"(\d+)\*\*(\d{1,2})", text.strip())
    try:
        value = int(power[1]) ** int(power[2]) if power else int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 2**40:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number up to 2**40: write 16777216 or 2**24")
    return value


def pick_device(text: str) -> torch.device:
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
        backend(device)
    except (RuntimeError, ValueError, ModuleNotFoundError) as error:
        raise CommandError(f"device {text!r} cannot be used: {error}") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise CommandError(
                f"PyTorch {torch.__version__} sees no GPU: install a build with CUDA or ROCm and check the driver, "
                f"or use --device cpu"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise CommandError(f"there is no GPU {index}: choose one below {torch.cuda.device_count()}")
        return torch.device("cuda", index)
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onebit", description="Communication-compressed training: 1 bit a value on the wire."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | tune | plan")
    demo.add_arguments(
        commands.add_parser(
            "demo",
            help="train a small language model with 1 bit and without, on ranks of this machine: a minute or two",
            description="Trains a small language model on Python's own documentation, with Adam (or LAMB) and with its "
            "1-bit twin: losses, bytes sent, a plot. Nothing is downloaded.",
        )
    )
    tune = commands.add_parser(
        "tune",
        help="measure the kernels on this device, or under torchrun the chunks on its ranks, and remember the fastest",
    )
    tune.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: %(default)s)")
    tune.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of parameters and gradients (default: %(default)s)",
    )
    tune.add_argument(
        "--elements",
        type=whole_number,
        default=tuning.ELEMENTS,
        help="elements to measure on (default: %(default)s)",
    )
    plan.add_arguments(
        commands.add_parser(
            "plan",
            help="predict steps on a cluster that is not at hand, uncompressed and with 1 bit",
            description="A model of latency and bandwidth: step times, bytes, speed-ups, and the network rate below "
            "which compression pays. Every constant can be replaced.",
        )
    )
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    demo.run(arguments, Progress())


def _tune(arguments: argparse.Namespace) -> None:
    if dist.is_torchelastic_launched():
        return _tune_group(arguments.device, DTYPES[arguments.dtype], arguments.elements)
    return _tune_device(arguments)


def _tune_group(device: str, dtype: torch.dtype, elements: int) -> None:
    """How many chunks suit the network between the ranks that torchrun has started."""
    local = int(os.environ["LOCAL_RANK"])
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    on = pick_device(f"cuda:{local}" if cuda else "cpu" if device == "auto" else device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    dist.init_process_group("nccl" if on.type == "cuda" else "gloo")
    transport = transport_for()
    options = candidates(elements, transport.size, BLOCK_SIZE)
    progress, first = Progress(), transport.rank == 0
    if first:
        print(f"{transport.name}, {transport.size} ranks on {on.type}, {elements:,} elements of {dtype}\n", flush=True)
        progress.show(f"measuring {len(options)} numbers of chunks")

    def measured(chunks: int, seconds: float) -> None:
        if first:
            progress.clear()
            print(f"  chunks {chunks:<3}{seconds * 1e3:10.1f} ms", flush=True)

    seconds = measure_chunks(transport, elements, on, "block", "l1", BLOCK_SIZE, options, measured, dtype)
    best = remember_chunks(transport, elements, on, seconds)
    if first:
        print(f"\nChosen: {best}. Written to {tuning.shared_cache().path}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _tune_device(arguments: argparse.Namespace) -> None:
    device, dtype = pick_device(arguments.device), DTYPES[arguments.dtype]
    print(f"{device_name(device)}, {arguments.dtype}, {arguments.elements:,} elements")
    try:
        saved = (_tune_cpu if device.type == "cpu" else _tune_gpu)(device, dtype, arguments.elements)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise CommandError(
            f"not enough memory for {arguments.elements:,} elements: use a smaller --elements"
        ) from error
    path = tuning.shared_cache().path
    print(f"\nWritten to {path}" if saved else f"\nNot written to {path}: the choices end with this command")


def _tune_cpu(device: torch.device, dtype: torch.dtype, elements: int) -> bool:
    progress, threads = Progress(), torch.get_num_threads()
    names = " and ".join(tuning.CPU_PASSES)
    progress.show(f"measuring {names}")
    choice = tuning.tune_cpu(dtype, elements)
    progress.clear()
    passes = Workload(elements, device, dtype=dtype).passes(backend(device))
    nbytes = sum(passes[name].bytes for name in tuning.CPU_PASSES)
    print(f"\n{names}, {threads} thread{'s' * (threads > 1)}\n{_table(choice, nbytes)}")
    return choice.saved


def _tune_gpu(device: torch.device, dtype: torch.dtype, elements: int) -> bool:
    progress, saved = Progress(), True
    for i, kernel in enumerate(tuning.PASS_OF, start=1):
        progress.show(f"[{i}/{len(tuning.PASS_OF)}] {kernel}: {len(tuning.candidates(kernel))} candidates")
        choice = tuning.tune(kernel, device, dtype, elements)
        nbytes = tuning.kernel_pass(kernel, device, dtype, elements).bytes
        saved &= choice.saved
        progress.clear()
        print(f"\n{kernel} (timed in the pass {tuning.PASS_OF[kernel]})\n{_table(choice, nbytes)}")
    return saved


def _table(choice: Choice[C], nbytes: int) -> str:
    """The candidates, the chosen one marked."""
    lines = []
    if not math.isfinite(choice.seconds[choice.config]):
        raise CommandError("no candidate ran: try a smaller --elements, and see that the device works at all")
    for config, seconds in sorted(choice.seconds.items(), key=lambda item: astuple(item[0])):
        name = f"tile {config.tile}" if isinstance(config, CpuConfig) else f"blocks {config.rows}, warps {config.warps}"
        took = (
            f"{seconds * 1e3:10.3f} ms {nbytes / seconds / 1e9:8.1f} GB/s"
            if math.isfinite(seconds)
            else "  does not run here"
        )
        lines.append(f"  {name:<20}{took}{'   <- chosen' if config == choice.config else ''}")
    return "\n".join(lines)


_COMMANDS = {"demo": _demo, "tune": _tune, "plan": plan.run}

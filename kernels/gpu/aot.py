"""Ahead-of-time compilation of the Triton kernels, with no GPU present.

Each kernel is compiled as its host function launches it: the launches are recorded, and their arguments give the
types, the alignments and the constants that Triton would specialise on.

    python -m onebit.kernels.gpu.aot [sm_90 ...]      compiles every kernel in every variant, reports as JSON
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onebit.kernels import gpu
from onebit.kernels.data.kept import Kept
from onebit.kernels.data.wire import Norm, Scale
from onebit.kernels.gpu.launch import Launch, recorded
from onebit.kernels.passes import StepLimit, StepSquares
from onebit.kernels.tuning.workload import Workload

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}


@dataclass(frozen=True)
class Compiled:
    kernel: str
    target: str
    asm: dict[str, Any]
    shared: int  # bytes of shared memory a program takes
    passed: tuple[str, ...]  # the arguments that are not compiled in


@dataclass(frozen=True)
class Assembled:
    """An assembled kernel: registers a thread, bytes a thread that did not fit into them, the listing of its machine
    code."""

    registers: int
    spilled: int
    listing: str


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile the kernel as this launch would specialise it on `target`."""
    values = {**launch.arguments, "BLOCKS_PER_PROGRAM": launch.config.blocks_per_program}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(inspect.signature(launch.kernel.fn).parameters):
        value, parameter = values[name], launch.kernel.params[index]
        free = parameter.do_not_specialize
        if isinstance(value, Tensor):
            signature[name] = _POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif name.isupper() or value is None or (isinstance(value, int) and value == 1 and not free):
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.config.warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    passed = tuple(name for name, kind in signature.items() if kind != "constexpr")
    return Compiled(launch.kernel.__name__, target, dict(compiled.asm), compiled.metadata.shared, passed)


def assembled(compiled: Compiled) -> Assembled:
    """What Triton's own assembler has made of a CUDA kernel: no other reads the PTX of every version."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        usage, listing = (_cuobjdump(what, binary) for what in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Assembled(int(found[1]), int(found[2]), listing)


def _cuobjdump(*arguments: str | Path) -> str:
    """The one that Triton brings, or the one on the PATH."""
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(own) if own.exists() else shutil.which("cuobjdump")
    if tool is None:
        raise FileNotFoundError("cuobjdump was neither in Triton's package nor on the PATH: install triton from PyPI")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True, timeout=120).stdout


def variants() -> dict[str, Workload]:
    """A workload for each way that a kernel is specialised: dtypes, scales, norms, packed or dense momentum, a live
    mask, scaled momentum.
    """
    sizes = [5000, 7]
    return {
        "fp32": Workload(sizes),
        "fp32, tensor scale, l2, dense momentum": Workload(sizes, scale="tensor", norm="l2", packed=False),
        "fp32, unbiased scale": Workload(sizes, norm="unbiased"),
        "fp32, masked": Workload(sizes, masked=True),
        "fp32, tensor scale, masked, scaled": Workload(sizes, scale="tensor", masked=True, scaled=True),
        "fp32, messages of 2 ranks": Workload(sizes, ranks=1, senders=2, bits=8),
        "fp32, residuals kept": Workload(sizes, kept=True),
        "bf16": Workload(sizes, dtype=torch.bfloat16, bits=8),
        "fp16, no master copy": Workload(sizes, dtype=torch.float16, master=False),
    }


def every_variant() -> dict[str, Workload]:
    """Every variant, those whose speed nobody measures too: other block sizes, each norm in 16 bits, passes with less
    and with more than is usual."""
    sizes = [5000, 7]
    forms: tuple[tuple[Norm, Scale], ...] = (("l1", "tensor"), ("l2", "block"), ("unbiased", "block"))
    of_dtypes = {
        f"{name}, {norm}{', tensor scale' if scale == 'tensor' else ''}": Workload(
            sizes, dtype=dtype, norm=norm, scale=scale, master=dtype == torch.float16, packed=norm != "l1"
        )
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
        for norm, scale in forms
    }
    of_blocks = {
        f"blocks of {size}{', masked' if size % 64 else ''}": Workload(
            [3 * size + 5, 7],
            block_size=size,
            ranks=2,
            masked=bool(size % 64),
            scale="tensor" if size < 128 else "block",
        )
        for size in (32, 64, 96, 256, 512, 1024, 4096, 8192)
    }
    return {
        **variants(),
        **of_dtypes,
        **of_blocks,
        "fp32, bare": Workload(sizes, bare=True),
        "bf16, bare, no master copy": Workload(sizes, dtype=torch.bfloat16, master=False, bare=True),
        "fp32, summed": Workload(sizes, summed=True),
        "fp16, summed, masked": Workload(sizes, dtype=torch.float16, summed=True, masked=True),
    }


def report(
    targets: Sequence[str] = tuple(TARGETS), wanted: Callable[[str, str], bool] = lambda variant, kernel: True
) -> list[dict[str, Any]]:
    """One row a kernel, variant and target: what was compiled, its wide accesses and its spills."""
    rows = []
    for variant, workload in every_variant().items():
        with recorded() as launches:
            for each in workload.passes(gpu).values():
                each.run()
            _small_passes(workload)
        for launch in (each for each in launches if wanted(variant, each.kernel.__name__)):
            for target in targets:
                compiled = compile_launch(launch, target)
                row = {"kernel": compiled.kernel, "variant": variant, "target": target, "warps": launch.config.warps}
                if "ptx" in compiled.asm:
                    row["loads"] = len(re.findall(r"ld\.global\.v4\.b32", compiled.asm["ptx"]))
                    row["stores"] = len(re.findall(r"st\.global\.v4\.b32", compiled.asm["ptx"]))
                    row["spilled"] = assembled(compiled).spilled
                rows.append(row)
    return rows


def _small_passes(workload: Workload) -> None:
    """Those that move no bytes an element."""
    parameters, replies, times = workload.layout.parameters, workload.replies, 2.0 if workload.bare else 0.0
    squares, numels = (torch.zeros(parameters, dtype=dtype) for dtype in (torch.float64, torch.int64))
    usual, factor = torch.zeros((2, parameters))
    gpu.restore(Kept([(workload.exp_avg, workload.exp_avg_sq)]), workload.flags)
    weight, shortened = None if workload.bare else factor, torch.zeros(1, dtype=torch.int64)
    gpu.run(StepSquares(workload.span, workload.sums, replies, weight, squares))
    gpu.run(StepLimit(workload.span, squares, numels, replies, usual, 0.25, times, 2 * times, factor, shortened))


if __name__ == "__main__":
    rows = report(sys.argv[1:] or tuple(TARGETS))
    json.dump(rows, sys.stdout, indent=1)
    if spilled := [f"{row['kernel']}, {row['variant']}, {row['target']}" for row in rows if row.get("spilled")]:
        sys.exit("registers are spilled in: " + "; ".join(spilled))

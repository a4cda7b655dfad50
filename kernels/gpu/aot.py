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
from onebit.kernels.gpu.launch import Launch, recorded
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
}


@dataclass(frozen=True)
class Compiled:
    kernel: str
    target: str
    asm: dict[str, Any]
    shared: int  # bytes of shared memory a program takes


@dataclass(frozen=True)
class Assembled:
    """An assembled kernel: registers a thread, bytes spilled (stored and loaded), the listing of its machine code."""

    registers: int
    spilled: int
    listing: str


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile the kernel as this launch would specialise it on `target`."""
    values = {**launch.arguments, "BLOCKS_PER_PROGRAM": launch.config.blocks_per_program}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(inspect.signature(launch.kernel.fn).parameters):
        value, free = values[name], launch.kernel.params[index].do_not_specialize
        if isinstance(value, Tensor):
            signature[name] = _POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0:
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
    return Compiled(launch.kernel.__name__, target, dict(compiled.asm), compiled.metadata.shared)


def assembled(compiled: Compiled) -> Assembled:
    """Assemble a CUDA kernel's PTX, and read ptxas' report and the listing of the machine code."""
    arch = re.search(r"\.target (sm_\w+)", compiled.asm["ptx"])
    assert arch is not None
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(compiled.asm["ptx"])
        report = _output(_ptxas(arch[1]), "-v", f"--gpu-name={arch[1]}", source, "-o", binary)
        listing = _output(_tool("cuobjdump"), "-sass", binary)
    registers, spilled = re.search(r"Used (\d+) registers", report), re.findall(r"(\d+) bytes spill", report)
    assert registers and spilled, report
    return Assembled(int(registers[1]), sum(map(int, spilled)), listing)


def _output(*command: str | Path) -> str:
    """Standard output and standard error of a tool; ptxas reports on the latter."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, timeout=120)
    return done.stdout + done.stderr


def _ptxas(arch: str) -> str:
    """Triton's own assembler; Blackwell and later have one to themselves."""
    return _tool(*(["ptxas-blackwell", "ptxas"] if int(arch[3:].rstrip("af")) >= 100 else ["ptxas"]))


def _tool(*names: str) -> str:
    """The first of these that Triton brings, or the one on the PATH."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    found = next((str(folder / name) for name in names if (folder / name).exists()), shutil.which(names[-1]))
    if found is None:
        raise FileNotFoundError(
            f"{names[-1]} was neither in Triton's package nor on the PATH: install triton from PyPI"
        )
    return found


def variants() -> dict[str, Workload]:
    """A workload for each way that a kernel is specialised: dtypes, scales, norms, packed or dense momentum, a live
    mask, scaled momentum.
    """
    sizes = [5000, 7]
    return {
        "fp32": Workload(sizes),
        "fp32, tensor scale, l2, dense momentum": Workload(sizes, scale="tensor", norm="l2", packed=False),
        "fp32, unbiased scale": Workload(sizes, norm="unbiased"),
        "fp32, rotated, messages of 2 ranks": Workload(sizes, norm="rotated", ranks=1, copies=2),
        "fp32, masked": Workload(sizes, masked=True),
        "fp32, tensor scale, masked, scaled": Workload(sizes, scale="tensor", masked=True, scaled=True),
        "fp32, messages of 2 ranks": Workload(sizes, ranks=1, copies=2),
        "fp32, replies of 2 bits": Workload(sizes, reply_bits=2),
        "fp32, residuals kept": Workload(sizes, kept=True),
        "bf16": Workload(sizes, dtype=torch.bfloat16),
        "fp16, no master copy": Workload(sizes, dtype=torch.float16, master=False),
    }


def report(
    targets: Sequence[str] = tuple(TARGETS), wanted: Callable[[str, str], bool] = lambda variant, kernel: True
) -> list[dict[str, Any]]:
    """One row a kernel, variant and target: what was compiled, its wide accesses and its spills."""
    rows = []
    for variant, workload in variants().items():
        with recorded() as launches:
            for each in workload.passes(gpu).values():
                each.run()
            gpu.restore(workload.exp_avg(), workload.exp_avg_sq(), workload.flags())
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


if __name__ == "__main__":
    rows = report(sys.argv[1:] or tuple(TARGETS))
    json.dump(rows, sys.stdout, indent=1)
    if spilled := [f"{row['kernel']}, {row['variant']}, {row['target']}" for row in rows if row.get("spilled")]:
        sys.exit("registers are spilled in: " + "; ".join(spilled))

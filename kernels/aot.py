"""Ahead-of-time compilation of the Triton kernels, with no GPU present.

Each kernel is compiled as its host function launches it: the launches are recorded, and their arguments give the
types, the alignments and the constants that Triton would specialise on.

    python -m onebit.kernels.aot [sm_90 ...]      compiles every kernel in every variant, reports as JSON
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onebit.kernels import gpu
from onebit.kernels.launch import Launch, recorded
from onebit.kernels.workload import Workload

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


def compile_launch(launch: Launch, target: str) -> Compiled:
    """What the launch would run on `target`."""
    values = {**launch.arguments, "ROWS": launch.config.rows}
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
    return Compiled(launch.kernel.__name__, target, dict(compiled.asm))


def spilled_bytes(compiled: Compiled) -> int:
    """Bytes of register spills (stores and loads) that ptxas reports for a CUDA kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        arch = re.search(r"\.target (sm_\w+)", compiled.asm["ptx"])
        assert arch is not None
        command = [
            _ptxas(arch[1]),
            "-v",
            f"--gpu-name={arch[1]}",
            str(source),
            "-o",
            str(Path(folder, "kernel.cubin")),
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert found, report
    return sum(map(int, found))


def _ptxas(arch: str) -> str:
    """Triton's own assembler; Blackwell and later have one to themselves."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    names = ["ptxas-blackwell", "ptxas"] if int(arch[3:].rstrip("af")) >= 100 else ["ptxas"]
    found = next((str(folder / name) for name in names if (folder / name).exists()), shutil.which("ptxas"))
    if found is None:
        raise FileNotFoundError("ptxas was neither in Triton's package nor on the PATH: install triton from PyPI")
    return found


def variants() -> dict[str, Workload]:
    """A workload for each way that a kernel is specialised: dtypes, scales, norms, packed or dense momentum, dead
    coordinates, scaled momentum.
    """
    sizes = [5000, 7]
    return {
        "fp32": Workload(sizes),
        "fp32, tensor scale, l2, dense momentum": Workload(sizes, scale="tensor", norm="l2", packed=False),
        "fp32, masked": Workload(sizes, masked=True),
        "fp32, tensor scale, masked, scaled": Workload(sizes, scale="tensor", masked=True, scaled=True),
        "bf16": Workload(sizes, dtype=torch.bfloat16),
        "fp16, no master copy": Workload(sizes, dtype=torch.float16, master=False),
    }


def report(targets: Sequence[str] = tuple(TARGETS)) -> list[dict[str, Any]]:
    """One row a kernel, variant and target: what was compiled, its wide accesses and its spills."""
    rows = []
    for variant, workload in variants().items():
        with recorded() as launches:
            for each in workload.passes(gpu).values():
                each.run()
        for launch in launches:
            for target in targets:
                compiled = compile_launch(launch, target)
                row = {"kernel": compiled.kernel, "variant": variant, "target": target, "warps": launch.config.warps}
                if "ptx" in compiled.asm:
                    row["loads"] = len(re.findall(r"ld\.global\.v4\.b32", compiled.asm["ptx"]))
                    row["stores"] = len(re.findall(r"st\.global\.v4\.b32", compiled.asm["ptx"]))
                    row["spilled"] = spilled_bytes(compiled)
                rows.append(row)
    return rows


if __name__ == "__main__":
    json.dump(report(sys.argv[1:] or tuple(TARGETS)), sys.stdout, indent=1)

"""What a measurement was made on: the device's name and the versions that matter."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The name that the device reports, such as NVIDIA H100 80GB HBM3."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


@functools.cache
def versions() -> str:
    """What a measurement depends on besides the device."""
    return f"torch {torch.__version__}, triton {triton_version()}"


def triton_version() -> str:
    for package in ("triton", "pytorch-triton-rocm", "pytorch-triton", "triton-windows"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"


@functools.cache
def _cpu_name() -> str:
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return platform.processor() or platform.machine()

"""Records of results: JSON files, their names, and the machine they are from."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from onebit.kernels.tuning.machine import device_name, triton_version

RESULTS = Path("perf/results")  # where records and plots are kept


def write_record(path: Path, record: Mapping[str, Any], indent: int | None = 1) -> None:
    """The whole file or, where writing is interrupted, what was there before."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(record, indent=indent) + "\n", encoding="utf-8")
    partial.replace(path)


def read_record(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def slug(*parts: str) -> str:
    """A file name of these parts: lower case, dashes between words."""
    return "-".join(re.sub(r"[^a-z0-9_]+", "-", part.lower()).strip("-") for part in parts)


def machine() -> dict[str, Any]:
    """The CPU and how many cores it has."""
    return {"cpu": cpu_name(), "cpu_count": os.cpu_count()}


def provenance() -> dict[str, Any]:
    """The date and the versions that a record of measurements was made with."""
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "triton": triton_version(),
            "cuda": torch.version.cuda,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "measured": datetime.now(timezone.utc).date().isoformat(),
    }


def cpu_name() -> str:
    return device_name(torch.device("cpu"))


def load_average() -> float | None:
    """Processes that wait for a core, the last minute's mean; None where the system does not count them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None

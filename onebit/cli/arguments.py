"""Arguments that several commands have in common, and what can be wrong with them."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from onebit.kernels import backend
from onebit.kernels.data.checks import is_whole
from onebit.report.plots import available

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FASTEST = 1e15  # bits a second, beyond any network
EXPONENTS = {"": 0, "k": 3, "m": 6, "g": 9, "b": 9, "t": 12}


class CommandError(Exception):
    """Something the user can put right. `code` is the exit status of the command."""

    code = 2


def number_of(text: str) -> float:
    """0.5, 340e6, 340M, 1.3b; nan for what is no number."""
    match = re.fullmatch(r"((?:\d+(?:_\d+)*)?\.?\d+)(?:e([+-]?\d{1,9}))?([kmgbt]?)", text.strip().lower())
    return (
        float(f"{match[1]}e{int(match[2] or 0) + EXPONENTS[match[3]]}") if match else math.nan
    )  # 1.07 * 1e9 is rounded


def bit_rate(text: str, least: float = 0.0, most: float = FASTEST) -> float:
    """Read 100gbit, 4.1Gbit/s or 800mbit, within these limits."""
    match = re.fullmatch(r"([\d._]+)\s*([kmgt])bit(?:/s)?", text.strip().lower())
    value = number_of(f"{match[1]}{match[2]}") if match else math.nan
    if not 0 < value <= FASTEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no rate: write a number and a unit, as 100gbit, 4.1gbit or 800mbit"
        )
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not from {least / 1e6:g}mbit to {most / 1e9:g}gbit")
    return value


def whole_number_from(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number between these limits: 16777216, 16_777_216, 2**24, 340e6 or 1.3b."""

    def number(text: str) -> int:
        power = re.fullmatch(r"(\d+)\*\*(\d{1,2})", text.strip())
        with contextlib.suppress(ValueError):
            value = int(power[1]) ** int(power[2]) if power else number_of(text)
            if value == value // 1 and is_whole(int(value), least, most):
                return int(value)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least:,} to {most:,}")

    return number


whole_number = whole_number_from(1, 2**40)  # more is a memory that no machine has


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


def check_picture(out: Path, option: str) -> bool:
    """Return whether there is matplotlib. If there is and it could not write `out`, a CommandError before the work;
    `out` stays as it is."""
    if not available():
        return False
    from matplotlib.backend_bases import FigureCanvasBase

    kind = out.suffix.lstrip(".").lower()
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise CommandError(
            f"a plot cannot be a {kind!r} file: give it a name such as plot.png; choose another {option}"
        )
    there = out.exists()
    try:
        out.open("ab").close()
        if not there:
            out.unlink()
    except (OSError, ValueError) as error:  # a ValueError of a name with a null byte
        why = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"a plot cannot be written to {str(out)!r} ({why}); choose another {option}") from error
    return True


@contextlib.contextmanager
def writing_picture(option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"the plot could not be written ({error}): choose another {option}") from error

"""Checks made before the work that a plot is to show: that it can be drawn and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def available() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        return False
    return True


def pyplot() -> Any:
    """matplotlib's, which draws into files and opens no window."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as drawing

    return drawing


def check_plot(out: Path) -> bool:
    """Return whether there is matplotlib. If there is and it could not write `out`, a ValueError; `out` stays as it
    is."""
    if not available():
        return False
    from matplotlib.backend_bases import FigureCanvasBase

    kind = out.suffix.lstrip(".").lower()
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"a plot cannot be a {kind!r} file: give it a name such as plot.png")
    there = out.exists()
    try:
        out.open("ab").close()
        if not there:
            out.unlink()
    except (OSError, ValueError) as error:  # a ValueError of a name with a null byte
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"a plot cannot be written to {str(out)!r} ({why})") from error
    return True

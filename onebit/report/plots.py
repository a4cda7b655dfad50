"""matplotlib, where it is installed."""

from __future__ import annotations

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

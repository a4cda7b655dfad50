"""Warnings that point at the user's line."""

import sys
import warnings

from onebit.kernels.log import named


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warn, by name, at the innermost caller that is neither onebit's nor torch's own code."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("onebit", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(named(text), kind, stacklevel=level)

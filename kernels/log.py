"""What users are told, by name: that loops are compiled; by rank 0, which stage it is in, and whether that pays.

    to_log    into the log of Python
    tell      there; where nobody has set up logging, to stderr

A program's own format of lines may leave out who speaks, so every text says it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

logger = logging.getLogger("onebit")
QUIET = "ONEBIT_QUIET"


def named(text: str) -> str:
    return f"onebit: {text}"


def to_log(level: int, text: str, *values: object, **options: Any) -> None:
    """Log `text % values` by name. options: those of `logging.Logger.log`."""
    logger.log(level, named(text), *values, stacklevel=2, **options)


def tell(text: str, *values: object) -> None:
    """Write to the log. If nobody has set up logging, write to stderr, unless ONEBIT_QUIET is set."""
    if logger.hasHandlers():
        logger.info(named(text), *values, stacklevel=2)
    elif os.environ.get(QUIET, "0") in ("", "0"):
        sys.stderr.write(f"{named(text % values if values else text)}\n")

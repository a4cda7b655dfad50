"""What users are told: that loops are compiled; by rank 0, which stage it is in, and whether that pays."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("onebit")
QUIET = "ONEBIT_QUIET"


def tell(text: str, *values: object) -> None:
    """Into the log; where nobody has set up logging, to stderr, as long as ONEBIT_QUIET is not set."""
    if logger.hasHandlers():
        logger.info(text, *values)
    elif os.environ.get(QUIET, "0") in ("", "0"):
        sys.stderr.write(f"onebit: {text % values if values else text}\n")

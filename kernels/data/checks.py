"""What users pass, told apart: whole numbers, finite numbers and names. Any object can be asked about."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from numbers import Integral, Real


def is_whole(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """A whole number from `least` to `most`, of Python or NumPy. True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_finite(value: object, largest: float = sys.float_info.max) -> bool:
    """A real number of Python or NumPy, no larger than `largest` either way: not inf or NaN, not True or False."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return -largest <= float(value) <= largest
    except OverflowError:  # a whole number beyond any float
        return False


def is_one_of(value: object, names: Collection[str]) -> bool:
    """One of these names. A tensor, say, can't be compared with a name."""
    return isinstance(value, str) and value in names

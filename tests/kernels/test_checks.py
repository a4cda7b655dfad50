"""Whole numbers, finite numbers, names: of Python and NumPy, and what only looks like one."""

import math
from fractions import Fraction

import numpy as np
import torch

from onebit.kernels.data.checks import is_finite, is_one_of, is_whole

OTHERS = [None, "1", "", b"1", [], [1], (1,), {}, 1j, object, np.zeros(3), torch.ones(()), torch.ones(3)]
TRUTHS = [True, False, np.True_]
NOT_WHOLE = [0.0, 1.0, math.nan, math.inf, Fraction(1), np.float32(1)]
FINITE = [0, -1, 0.5, -0.0, 1e308, -1e308, 10**300, Fraction(1, 3), np.float32(0.1), np.int8(3)]


def test_whole_numbers():
    for value in (0, 1, -1, 2**63, 10**400, np.int64(3), np.uint8(255), np.int32(-7)):
        assert is_whole(value) and is_whole(value, least=value) and is_whole(value, most=value), value
        assert not is_whole(value, least=int(value) + 1) and not is_whole(value, most=int(value) - 1), value
    assert [value for value in (*NOT_WHOLE, *TRUTHS, *OTHERS) if is_whole(value)] == []


def test_finite_numbers():
    assert all(is_finite(value) for value in FINITE)
    infinite = (math.inf, -math.inf, math.nan, 10**400, np.float32(np.inf), np.float64(np.nan))
    assert [value for value in (*infinite, *TRUTHS, *OTHERS) if is_finite(value)] == []
    largest = torch.finfo(torch.float32).max
    assert is_finite(largest, largest) and is_finite(-largest, largest)
    assert not is_finite(1e39, largest) and not is_finite(-1e39, largest) and not is_finite(10**400, largest)


def test_names():
    names = ("block", "tensor")
    assert is_one_of("block", names) and is_one_of("tensor", names)
    assert not any(is_one_of(value, names) for value in ("blok", "", "bl", names, *OTHERS, *TRUTHS))

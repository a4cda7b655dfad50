"""1-bit Adam saves AdamW's variance in the place of d: d follows from it bit for bit."""

from __future__ import annotations

import pytest
import torch

from onebit.kernels.data.hyper import Hyper
from onebit.optim.adam import to_denominator, to_variance
from onebit.optim.freeze import variance_to_denominator_

MANY = 200_000
STEPS = (1, 2, 10, 1000, 10**6)


def as_passes_have(eps: float) -> float:
    return float(torch.tensor(eps, dtype=torch.float32))


def roots(source: torch.Generator, least: float, most: float) -> torch.Tensor:
    """Draw roots, all sizes alike."""
    exponents = torch.rand(MANY, generator=source, dtype=torch.float64) * (most - least) + least
    return 10**exponents


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-8, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999, 0.99999])
def test_d_comes_back_bit_for_bit(eps: float, beta2: float) -> None:
    """The freeze computes it of roots from far below eps to far above, whose v fp32 has in full; 0 stays 0."""
    source = torch.Generator().manual_seed(0)
    for steps in STEPS:
        weight = (1 - beta2**steps) or 1.0
        for corrected in (True, False):
            h = Hyper(bias2=weight**-0.5 if corrected else 1.0, eps=eps)
            v = roots(source, -16, 17).square().float()
            v[:: MANY // 100] = 0
            d = v.clone()
            variance_to_denominator_(v=d, h=h, zero_variance="hold", add_parts=lambda sums: sums)
            assert bool(torch.isfinite(d).all()) and int((d == 0).sum()) >= 100
            again = to_denominator(to_variance(d, as_passes_have(eps), weight), as_passes_have(eps), weight)
            assert torch.equal(again, d), (steps, corrected)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-3])
def test_every_d_comes_back_bit_for_bit_near_a_power_of_two(eps: float) -> None:
    """Half of what a bit is worth is there the least that it can be of d, and of v the most."""
    near = torch.arange(-20_000, 20_000, dtype=torch.int32)
    for power in (-30, -3, 0, 1, 7, 9):
        d = (torch.tensor(2.0**power).view(torch.int32) + near).view(torch.float32)
        d = d[d.double() * as_passes_have(eps) < 1]
        v = to_variance(d, as_passes_have(eps), 0.3)
        assert len(d) and torch.equal(to_denominator(v, as_passes_have(eps), 0.3), d)

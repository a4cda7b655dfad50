"""LAMB's coefficients and 1-bit LAMB's ratios, one of each a parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebit.kernels.data.layout import Layout
from onebit.kernels.data.record import NamedRecord


@dataclass(frozen=True)
class LambState(NamedRecord):
    """One value a parameter, all on the device: LAMB's scaling coefficients and 1-bit LAMB's ratios."""

    coefficient: Tensor  # fp32 [parameters]: c, what the update is multiplied by
    average: Tensor  # fp32 [parameters]: c_avg, as accumulated (stage 1) or debiased (stage 2)
    ratio: Tensor  # fp32 [parameters]: r of the last step
    partial: Tensor  # fp32 [2, blocks]: scratch for norms and maxima
    counter: Tensor  # int32 [parameters]: scratch, 0 between launches

    @classmethod
    def initial(cls, layout: Layout, device: torch.device | str = "cpu") -> LambState:
        def full(value: float) -> Tensor:
            return torch.full((layout.parameters,), value, dtype=torch.float32, device=device)

        return cls(
            full(1.0),
            full(0.0),
            full(1.0),
            torch.zeros((2, layout.blocks), dtype=torch.float32, device=device),
            torch.zeros(layout.parameters, dtype=torch.int32, device=device),
        )

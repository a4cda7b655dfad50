"""Hyper-parameters as kernels read them: one fp32 row a param group, so that one launch serves all groups.

    g' = grad_scale g          bias1 = 1 / (1 - beta1^t)          bias2 = 1 / sqrt(1 - beta2^t)

Values derived from others, such as 1 - beta, are computed on the host in float64; in fp32 they would lose digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Hyper(NamedTuple):
    """The hyper-parameters of one param group at one step. The order of the fields is the order of the columns."""

    lr: float = 0.0
    beta1: float = 0.0
    one_minus_beta1: float = 1.0
    beta2: float = 0.0
    one_minus_beta2: float = 1.0
    eps: float = 0.0
    weight_decay: float = 0.0
    bias1: float = 1.0
    bias2: float = 1.0
    grad_scale: float = 1.0

    @classmethod
    def at_step(
        cls,
        step: int,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        grad_scale: float = 1.0,
    ) -> Hyper:
        """The hyper-parameters of step `step`; the first step is 1."""
        beta1, beta2 = betas
        bias1 = 1 / (1 - beta1**step) if bias_correction else 1.0
        bias2 = (1 - beta2**step) ** -0.5 if bias_correction else 1.0
        return cls(lr, beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay, bias1, bias2, grad_scale)


COLUMNS = len(Hyper._fields)
# Gradients beyond this count as not finite: the squares of 2^32 of them, times what residuals may add to each, still
# have a finite sum in fp32.
LARGEST = 2.0**40


def hyper_table(groups: Sequence[Hyper], device: torch.device | str = "cpu") -> Tensor:
    """fp32 [groups, COLUMNS]"""
    return torch.tensor(groups, dtype=torch.float32, device="cpu").to(device, non_blocking=True)

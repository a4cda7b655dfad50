"""Runs of 1-bit LAMB that are recorded step by step, and the float64 simulation of the paper's Algorithm 1.

simulation.py has what it shares with 1-bit Adam: the layout, the messages, the tolerances.
"""

from dataclasses import dataclass

import numpy as np
from torch import nn

from tests import oracle
from tests.onebit.optim.simulation import MISSING, MISSING_LATER, ROUNDING, Simulation, oracle_hypers
from tests.onebit.runs import Case

RATIO = 1e-5  # relative: the largest of quotients of v_T, which comes back from d, and v, which holds (m - b1 m_prev)^2
COEFFICIENTS = ("coeff_beta", "min_coeff", "max_coeff", "factor_min", "factor_max", "factor_threshold")


@dataclass(frozen=True)
class Sized(Case):
    """Gradients and parameters of the sizes given, one a parameter; parameters that are multiplied after each step."""

    kind: str = "OneBitLamb"
    g_sizes: tuple[float, ...] = ()
    x_sizes: tuple[float, ...] = ()

    def parameters(self):
        sizes = self.x_sizes or [1.0] * len(self.shapes)
        return [nn.Parameter(p.detach() * size) for p, size in zip(super().parameters(), sizes, strict=True)]

    def gradients(self, rank, step):
        sizes = [size / 10.0 ** (p % 3 - 1) for p, size in enumerate(self.g_sizes)] or [1.0] * len(self.shapes)
        return [None if g is None else g * s for g, s in zip(super().gradients(rank, step), sizes, strict=True)]


GROUPS = (
    {"lr": 2e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
    {},
    {"lr": 5e-3, "betas": (0.95, 0.99), "weight_decay": 0.02},
)
UNDECAYED = tuple({**own, "weight_decay": 0.0} for own in GROUPS)
# Coefficients on both limits and between; a bias of 2 elements that starts at 0; gradients from 0.01 to 100.
LAMB = Sized(
    shapes=((7, 9), (33,), (40,), (2,), (130,), (1,), (0,), (5, 0)),
    x_sizes=(1.0, 0.1, 1e-3, 0.0, 0.05, 0.2, 1.0, 1.0),
    g_sizes=(1.0, 1e-2, 1e-1, 1e2, 10.0, 1.0, 1.0, 1.0),
    steps=108,
    groups=GROUPS,
    missing=MISSING + MISSING_LATER,
    options={"freeze_step": 8},
)


def lamb_hypers(case):
    """Of every parameter, in the order of `case.shapes`."""
    return oracle_hypers(case, oracle.LambHyper, **{k: v for k, v in case.options.items() if k in COEFFICIENTS})


class LambSimulation(Simulation):
    """Algorithm 1 for a case in float64. Messages and residuals hold gamma times the momentum, `m` the momentum."""

    same_denominator = 2e-6

    def __init__(self, case, ranks):
        super().__init__(case, ranks)
        self.hypers = self.ordered(lamb_hypers(case))
        self.ratio = case.options.get("ratio", "variance")

    def full_step(self, step, x, mean, m, v, c=None):
        c = np.zeros(len(x)) if c is None else c
        return oracle.lamb_step(x, mean, m, v, c, self.hypers, step)[:4]

    def freeze(self, m, v, average):
        own = self.case.options
        self.frozen = oracle.freeze_lamb(
            m, v, average, self.hypers, self.freeze_step, scale=own.get("scale", "block"),
            bias_correction=self.corrected, zero_variance=own.get("zero_variance", "floor"),
        )  # fmt: skip
        self.d = self.frozen.d
        self.begin(m)
        self.v, self.r = self.frozen.v, np.ones(len(m))
        self.holds = [part.size > 0 for part in m]
        self.gamma = self.layout.flatten([np.full(a.shape, g) for a, g in zip(m, self.frozen.gamma, strict=True)], 1.0)

    def check_freeze(self, first):
        super().check_freeze(first)
        fields = first.fields[0]
        average = fields["coefficient_average"][self.holds]
        np.testing.assert_allclose(average, self.frozen.c_avg[self.holds], rtol=1e-6)
        assert ("gamma" in fields) == (self.case.options.get("scale", "block") == "tensor")
        np.testing.assert_allclose(fields.get("gamma", 1.0), self.frozen.gamma, rtol=1e-6)

    def step(self, x, step):
        x, self.m, self.v, self.r = oracle.onebit_lamb_step(
            x, self.gradients(step), self.m, self.v, self.r, self.frozen, self.hypers, self.all_reduce, self.ratio
        )
        return x

    def check_followed(self, fields):
        np.testing.assert_allclose(fields["ratio"][self.holds], self.r[self.holds], rtol=10 * RATIO)

    def check_step(self, first, i, x, before, step):
        """Lines 15 to 21 from what was recorded before, with the m that was received."""
        m_previous, v, r, found = before["m"], before["v"], before["r"], first.fields[i]
        moved, fresh, ratio = oracle.onebit_lamb_update(
            x, self.m, m_previous, v, r, self.frozen, self.hypers, self.ratio
        )
        counted = [frozen > 0 for frozen in self.frozen.v]
        recorded = self.shaped(found["exp_avg_sq"])
        for got, want, old, m, m_prev, h, some in zip(
            recorded, fresh, v, self.m, m_previous, self.hypers, counted, strict=True
        ):
            size = h.beta2 * old + (1 - h.beta2) * ((np.abs(m) + h.beta1 * np.abs(m_prev)) / (1 - h.beta1)) ** 2
            assert np.all(np.abs(got - want)[some] <= ROUNDING * size[some]), f"the fresh variance after step {step}"
        for name, expected in (("ratio", ratio), ("coefficient", ratio * self.frozen.c_avg)):
            got, want = found[name][self.holds], expected[self.holds]
            np.testing.assert_allclose(got, want, rtol=RATIO, err_msg=f"{name} after step {step}")
        for got, old, new, d in zip(first.x[i], x, moved, self.d, strict=True):
            allowed = 1e-6 * np.abs(old) + 2 * RATIO * np.abs(new - old)
            assert np.all(np.abs(got - new) <= allowed), f"parameters after step {step}"
            assert np.array_equal(got[d == 0], old[d == 0]), f"what cannot move has moved in step {step}"
        pairs = zip(self.frozen.v, fresh, self.hypers, strict=True)
        unclipped = [oracle.variance_ratio(*own, self.ratio) for own in pairs]
        reasons = zip(unclipped, r, ratio, self.hypers, self.holds, strict=True)
        self.v, self.r = recorded, found["ratio"]
        return {reason_of_ratio(*own) for own in reasons}


def reason_of_ratio(unclipped, before, after, h, holds):
    """Which of its bounds a ratio comes from, so that a test can check that it covers all of them."""
    if not holds:
        return "none"
    if after in (h.factor_min, h.factor_max):
        return "limit"
    if after == unclipped:
        return "the largest"
    return "as far up as it may" if after > before else "as far down as it may"

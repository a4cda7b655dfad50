"""Runs of 1-bit LAMB that are recorded step by step, and the float64 simulation of the paper's Algorithm 1.

simulation.py has what it shares with 1-bit Adam: the layout, the messages, the tolerances.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from tests import oracle
from tests.onebit.optim.simulation import (
    ROUNDING,
    Simulation,
    any_flipped,
    check_reply,
    decoded,
    group_or_none,
    hypers,
    of_senders,
    server_residual,
    whole_scale,
)
from tests.onebit.runs import Case, arrays, bits, take

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
    missing=(
        *((1, 0, 1), (3, 0, 4), (4, 0, 0), (4, 1, 0), (4, 2, 0), (4, 3, 0), (17, 1, 4), (17, 0, 5), (18, 0, 0)),
        *((30, 0, 1), (31, 0, 0), (31, 1, 0), (31, 2, 0), (31, 3, 0)),
    ),
    options={"freeze_step": 8},
)


def lamb_hypers(case):
    """Of every parameter, in the order of `case.shapes`."""
    own = {name: value for name, value in case.options.items() if name in COEFFICIENTS}
    return [oracle.LambHyper(h["lr"], *h["betas"], h["eps"], h["weight_decay"], **own) for h in hypers(case)]


def without_warnings(work):
    """Without the warning of coordinates without a variance: other tests are of these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return work()


def updated_values(params, optimizer):
    """What the optimizer moves: fp32 parameters, or their copy."""
    return arrays([optimizer.state[p].get("master", p) for p in params])


def as_numpy(tensor):
    return tensor.detach().double().numpy().copy()


@dataclass(frozen=True)
class Recorded:
    """One rank's run, in the order of the flat space. Flat arrays are float64 and cover it: see oracle.Layout."""

    x0: list[np.ndarray]  # at the freeze: parameters, moments, the average as accumulated
    m0: list[np.ndarray]
    v0: list[np.ndarray]
    average0: np.ndarray
    average: np.ndarray  # c_avg, debiased
    gamma: np.ndarray | None
    d: list[np.ndarray]  # the rest after each step of stage 2
    e: list[np.ndarray]
    E: list[np.ndarray]
    m: list[np.ndarray]
    v: list[np.ndarray]
    ratio: list[np.ndarray]
    coefficient: list[np.ndarray]
    x: list[list[np.ndarray]]
    bits: list[bytes]  # parameters after every step of both stages


def both_stages(rank, size, case):
    return without_warnings(lambda: _both_stages(rank, size, case))


def _both_stages(rank, size, case):
    params = case.parameters()
    optimizer = case.build(params, group_or_none(size))
    recorded: dict[str, list[Any]] = {name: [] for name in ("d", "e", "E", "m", "v", "ratio", "coefficient", "x")}
    all_bits, before = [], {}
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        all_bits.append(bits(params))
        [part] = optimizer.current.parts
        state = part.state
        if step == case.options["freeze_step"]:
            own = [optimizer.state[p] for p in state.params]
            before = {
                "x0": updated_values(state.params, optimizer),
                "m0": arrays([s["exp_avg"] for s in own]),
                "v0": arrays([s["exp_avg_sq"] for s in own]),
                "average0": as_numpy(state["coefficient_average"]),
            }
        assert optimizer.compressing == (step > case.options["freeze_step"])
        if optimizer.compressing:
            record(recorded, optimizer, part)
    gamma = as_numpy(state["gamma"]) if "gamma" in state else None
    return Recorded(**before, average=as_numpy(state["coefficient_average"]), gamma=gamma, **recorded, bits=all_bits)


def record(recorded, optimizer, part):
    exchange, state = part.reducer.exchange, part.state
    found = {
        "d": state["denominator"],
        "e": exchange.residual.left_out(),
        "v": state["exp_avg_sq"],
        "ratio": state["ratio"],
        "coefficient": state["coefficient"],
    }
    for name, tensor in found.items():
        recorded[name].append(as_numpy(tensor))
    recorded["E"].append(server_residual(exchange))
    recorded["m"].append(decoded(exchange))
    recorded["x"].append(updated_values(state.params, optimizer))


class LambSimulation(Simulation):
    """Algorithm 1 for a case in float64. Messages and residuals hold gamma times the momentum, `m` the momentum."""

    def __init__(self, case, ranks):
        super().__init__(case, ranks)
        self.hypers = self.ordered(lamb_hypers(case))
        self.ratio = case.options.get("ratio", "variance")

    def freeze(self, m, v, c_avg):
        own = self.case.options
        scale = own.get("scale", "block")
        self.frozen = oracle.freeze_lamb(
            m, v, c_avg, self.hypers, self.freeze_step,
            scale=scale, bias_correction=self.corrected, zero_variance=own.get("zero_variance", "floor"),
        )  # fmt: skip
        self.d = self.frozen.d
        self.has_variance = self.layout.flatten(self.d) > 0
        self.all_reduce = self.simulated_all_reduce()
        self.m, self.v, self.r = m, self.frozen.v, np.ones(len(m))
        self.gamma = self.layout.flatten([np.full(a.shape, g) for a, g in zip(m, self.frozen.gamma, strict=True)], 1.0)

    def sizes(self, step):
        own = super().sizes(step)
        return [
            self.gamma * (size - np.abs(e)) + np.abs(e) for size, e in zip(own, self.all_reduce.worker, strict=True)
        ]

    def step(self, x, step):
        x, self.m, self.v, self.r = oracle.onebit_lamb_step(
            x, self.gradients(step), self.m, self.v, self.r, self.frozen, self.hypers, self.all_reduce, self.ratio
        )
        return x

    def unclipped(self, v):
        pairs = zip(self.frozen.v, v, self.hypers, strict=True)
        return np.array([oracle.variance_ratio(*own, self.ratio) for own in pairs])


def check(case, recorded):
    """Every step of stage 2 on every rank against the simulation. Returns how the ratios came about."""
    for own in recorded:
        assert own.bits == recorded[0].bits, "the ranks have other parameters"
        assert all(map(np.array_equal, own.ratio, recorded[0].ratio)), "the ranks have other ratios"
    recorded = of_senders(case, recorded)
    first, sim = recorded[0], LambSimulation(case, len(recorded))
    sim.freeze(first.m0, first.v0, first.average0)
    check_freeze(case, first, sim)
    x, compared, reasons = first.x0, 0, []
    for i, step in enumerate(range(sim.freeze_step + 1, case.steps + 1)):
        m, v, r = sim.m, sim.v, sim.r
        compared += check_exchange(sim, recorded, i, x, step)
        sim.m = sim.shaped(np.where(sim.has_variance, first.m[i] / sim.gamma, 0.0))
        reasons.append(check_update(sim, first, i, (x, m, v, r), step))
        x, sim.v, sim.r = first.x[i], sim.shaped(first.v[i]), first.ratio[i]
        sim.all_reduce.worker = [np.where(sim.has_variance, own.e[i], 0.0) for own in recorded]
        sim.all_reduce.server = np.where(sim.has_variance, first.E[i], 0.0)
    assert compared >= 0.9 * (case.steps - sim.freeze_step), f"only {compared} steps could be compared"
    return set().union(*reasons)


def check_freeze(case, first, sim):
    """What is kept for good."""
    holds = [m.size > 0 for m in first.m0]
    np.testing.assert_allclose(first.average[holds], sim.frozen.c_avg[holds], rtol=1e-6)
    assert (first.gamma is None) == (case.options.get("scale", "block") == "block")
    if first.gamma is not None:
        np.testing.assert_allclose(first.gamma, sim.frozen.gamma, rtol=1e-6)
    d = sim.layout.flatten(sim.d) / sim.gamma
    np.testing.assert_allclose(first.d[0][sim.layout.valid], d[sim.layout.valid], rtol=2e-6)
    assert all(np.array_equal(later, first.d[0]) for later in first.d)


def check_exchange(sim, recorded, i, x, step):
    """Messages and residuals. Returns whether all of it could be compared."""
    first, reduce, sizes = recorded[0], sim.all_reduce, sim.sizes(step)
    server_size = sum(sizes) / sim.ranks + np.abs(reduce.server)
    sim.step(x, step)
    flipped = False
    for rank, messages in enumerate(reduce.gathered):
        size, what = sizes[rank] + whole_scale(messages), f"what rank {rank} has left out in step {step}"
        flipped |= any_flipped(recorded[rank].e[i], reduce.worker[rank], messages, size, sim.has_variance, what)
    if flipped:  # the flipped sign is in this step's average
        return False
    return not check_reply(sim, first, i, server_size, sim.gamma * sim.layout.flatten(sim.m), step)


def check_update(sim, first, i, before, step):
    """Lines 15 to 21 from what was recorded before, with the m that was received."""
    x, m_previous, v, r = before
    moved, fresh, ratio = oracle.onebit_lamb_update(x, sim.m, m_previous, v, r, sim.frozen, sim.hypers, sim.ratio)
    counted = [frozen > 0 for frozen in sim.frozen.v]
    parts = zip(sim.shaped(first.v[i]), fresh, v, sim.m, m_previous, sim.hypers, counted, strict=True)
    for got, want, old, m, m_prev, h, some in parts:
        size = h.beta2 * old + (1 - h.beta2) * ((np.abs(m) + h.beta1 * np.abs(m_prev)) / (1 - h.beta1)) ** 2
        assert np.all(np.abs(got - want)[some] <= ROUNDING * size[some]), f"the fresh variance after step {step}"
    holds = [part.size > 0 for part in x]
    what = f"after step {step}"
    np.testing.assert_allclose(first.ratio[i][holds], ratio[holds], rtol=RATIO, err_msg=f"ratios {what}")
    coefficient = (ratio * sim.frozen.c_avg)[holds]
    np.testing.assert_allclose(first.coefficient[i][holds], coefficient, rtol=RATIO, err_msg=f"coefficients {what}")
    for got, old, new, d in zip(first.x[i], x, moved, sim.d, strict=True):
        allowed = 1e-6 * np.abs(old) + 2 * RATIO * np.abs(new - old)
        assert np.all(np.abs(got - new) <= allowed), f"parameters {what}"
        assert np.array_equal(got[d == 0], old[d == 0]), f"what cannot move has moved in step {step}"
    return {reason_of_ratio(*own) for own in zip(sim.unclipped(fresh), r, ratio, sim.hypers, holds, strict=True)}


def reason_of_ratio(unclipped, before, after, h, holds):
    """Which of its bounds a ratio comes from, so that a test can check that it covers all of them."""
    if not holds:
        return "none"
    if after in (h.factor_min, h.factor_max):
        return "limit"
    if after == unclipped:
        return "the largest"
    return "as far up as it may" if after > before else "as far down as it may"

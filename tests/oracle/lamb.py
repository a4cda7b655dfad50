"""Both stages of 1-bit LAMB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracle.adam import Hyper, freeze, moments
from tests.oracle.codec import Arrays, Gradients, magnitude


@dataclass(frozen=True)
class LambHyper(Hyper):
    coeff_beta: float = 0.9
    min_coeff: float = 0.01
    max_coeff: float = 0.3
    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_threshold: float = 0.1


Hypers = Sequence[LambHyper]


def coefficient(x: np.ndarray, u: np.ndarray, h: LambHyper) -> float:
    """LAMB's clip(||x|| / ||u||), 1 where a norm is 0."""
    above, below = np.linalg.norm(x), np.linalg.norm(u)
    if above == 0 or below == 0:
        return 1.0
    return float(np.clip(above / below, h.min_coeff, h.max_coeff))


def lamb_step(
    x: Arrays, g: Gradients, m: Arrays, v: Arrays, c_avg: np.ndarray, hypers: Hypers, step: int, corrected: bool = True
) -> tuple[Arrays, Arrays, Arrays, np.ndarray, np.ndarray]:
    """Stage 1 of 1-bit LAMB: new x, m, v, the (biased) averages of the coefficients, and the coefficients."""
    xs, ms, vs, cs = [], [], [], []
    for x_p, g_p, m_p, v_p, h in zip(x, g, m, v, hypers, strict=True):
        m_p, v_p, mhat, vhat = moments(g_p, m_p, v_p, h, step, corrected)
        u = mhat / (np.sqrt(vhat) + h.eps) + h.weight_decay * x_p
        c = coefficient(x_p, u, h)
        xs.append(x_p - h.lr * c * u)
        ms.append(m_p)
        vs.append(v_p)
        cs.append(c)
    beta = np.array([h.coeff_beta for h in hypers])
    return xs, ms, vs, beta * c_avg + (1 - beta) * np.array(cs), np.array(cs)


def debiased(c_avg: np.ndarray, hypers: Hypers, steps: int) -> np.ndarray:
    return c_avg / (1 - np.array([h.coeff_beta for h in hypers]) ** steps)


@dataclass(frozen=True)
class LambFrozen:
    """What 1-bit LAMB keeps from the freeze on. `gamma` is 1 unless momenta are scaled (scale="tensor"); `v` is v_T,
    where the fresh variance starts: vhat where d is made of that, for the ratio is the change of what d divides by."""

    d: Arrays
    v: Arrays
    c_avg: np.ndarray
    gamma: np.ndarray


def momentum_scaling(m: Arrays) -> np.ndarray:
    """gamma_p = (mean over parameters of rms(m)) / rms(m_p), 1 where rms is 0."""
    rms = np.array([magnitude(m_p, "l2") for m_p in m])
    return np.divide(rms.mean(), rms, out=np.ones(rms.shape), where=rms > 0)


def freeze_lamb(
    m: Arrays, v: Arrays, c_avg: np.ndarray, hypers: Hypers, step: int, *, scale: str = "block",
    bias_correction: bool = True, zero_variance: str = "floor",
) -> LambFrozen:  # fmt: skip
    corrections = [1 - h.beta2**step if bias_correction else 1.0 for h in hypers]
    d = freeze(v, hypers, step, bias_correction, zero_variance)
    gamma = momentum_scaling(m) if scale == "tensor" else np.ones(len(m))
    v = [v_p / correction for v_p, correction in zip(v, corrections, strict=True)]
    return LambFrozen(d, v, debiased(c_avg, hypers, step), gamma)


def variance_ratio(frozen: np.ndarray, fresh: np.ndarray, h: Hyper, ratio: str) -> float:
    """The largest frozen/fresh over elements with a variance (1 where there is none), before any clip."""
    positive = frozen > 0
    if not positive.any():
        return 1.0
    frozen, fresh = frozen[positive], fresh[positive]
    if ratio == "denominator":
        frozen, fresh = np.sqrt(frozen) + h.eps, np.sqrt(fresh) + h.eps
    return float((frozen / fresh).max())


def clipped_ratio(r: float, previous: float, h: LambHyper) -> float:
    r = float(np.clip(r, (1 - h.factor_threshold) * previous, (1 + h.factor_threshold) * previous))
    return float(np.clip(r, h.factor_min, h.factor_max))


def onebit_lamb_update(
    x: Arrays, m: Arrays, m_previous: Arrays, v: Arrays, r: np.ndarray, frozen: LambFrozen, hypers: Hypers,
    ratio: str = "variance",
) -> tuple[Arrays, Arrays, np.ndarray]:  # fmt: skip
    """Lines 14 to 22 of Algorithm 1: new x, v (fresh) and r. r starts at 1, v at frozen.v."""
    xs, vs, rs = [], [], []
    for p, h in enumerate(hypers):
        reconstructed = (m[p] - h.beta1 * m_previous[p]) / (1 - h.beta1)
        v_p = h.beta2 * v[p] + (1 - h.beta2) * reconstructed**2
        r_p = clipped_ratio(variance_ratio(frozen.v[p], v_p, h, ratio), r[p], h)
        update = m[p] * frozen.d[p] + h.weight_decay * x[p]
        xs.append(np.where(frozen.d[p] == 0, x[p], x[p] - h.lr * r_p * frozen.c_avg[p] * update))
        vs.append(v_p)
        rs.append(r_p)
    return xs, vs, np.array(rs)

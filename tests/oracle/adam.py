"""Both stages of 1-bit Adam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracle.codec import Arrays, Gradients, SimulatedAllReduce


@dataclass(frozen=True)
class Hyper:
    """What one parameter's group says. A step takes one a parameter."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


def zeros(arrays: Sequence[np.ndarray]) -> Arrays:
    return [np.zeros(array.shape) for array in arrays]


def gradient(g: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    return np.zeros(like.shape) if g is None else np.asarray(g, np.float64)


def moments(
    g: np.ndarray | None, m: np.ndarray, v: np.ndarray, h: Hyper, step: int, bias_correction: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The new m and v, and the mhat and vhat that an update reads. Steps count from 1."""
    g = gradient(g, m)
    m = h.beta1 * m + (1 - h.beta1) * g
    v = h.beta2 * v + (1 - h.beta2) * g**2
    if not bias_correction:
        return m, v, m, v
    return m, v, m / (1 - h.beta1**step), v / (1 - h.beta2**step)


def adamw_step(
    x: Arrays, g: Gradients, m: Arrays, v: Arrays, hypers: Sequence[Hyper], step: int, bias_correction: bool = True
) -> tuple[Arrays, Arrays, Arrays]:
    """Stage 1 of 1-bit Adam: new x, m, v."""
    xs, ms, vs = [], [], []
    for x_p, g_p, m_p, v_p, h in zip(x, g, m, v, hypers, strict=True):
        m_p, v_p, mhat, vhat = moments(g_p, m_p, v_p, h, step, bias_correction)
        xs.append(x_p - h.lr * (mhat / (np.sqrt(vhat) + h.eps) + h.weight_decay * x_p))
        ms.append(m_p)
        vs.append(v_p)
    return xs, ms, vs


def freeze(
    v: Arrays, hypers: Sequence[Hyper], step: int, bias_correction: bool = True, zero_variance: str = "floor"
) -> Arrays:
    """d = 1 / (sqrt(vhat) + eps). Where v is 0: the mean vhat of the others, or d = 0 (zero_variance="hold") or where
    no element of the parameter has a variance."""
    ds = []
    for v_p, h in zip(v, hypers, strict=True):
        vhat = v_p / (1 - h.beta2**step) if bias_correction else v_p
        positive = v_p > 0
        if zero_variance == "floor" and positive.any():
            vhat, positive = np.where(positive, vhat, vhat[positive].mean()), np.ones(v_p.shape, bool)
        ds.append(np.where(positive, 1 / (np.sqrt(vhat) + h.eps), 0.0))
    return ds


def local_momentum(g: Gradients, m: Arrays, hypers: Sequence[Hyper]) -> Arrays:
    """y = b1 m + (1 - b1) g of one rank."""
    return [h.beta1 * m_p + (1 - h.beta1) * gradient(g_p, m_p) for g_p, m_p, h in zip(g, m, hypers, strict=True)]


def averaged_momentum(
    grads: Sequence[Gradients], m: Arrays, hypers: Sequence[Hyper], all_reduce: SimulatedAllReduce,
    gamma: np.ndarray | None = None,
) -> Arrays:  # fmt: skip
    """m of the next step over N ranks, `grads[i]` those of rank i; each rank's y times gamma before the all-reduce,
    and m divided by it after."""
    gamma, layout = np.ones(len(m)) if gamma is None else gamma, all_reduce.layout
    ys = [[gamma_p * y_p for gamma_p, y_p in zip(gamma, local_momentum(g, m, hypers), strict=True)] for g in grads]
    new = layout.unflatten(all_reduce([layout.flatten(y) for y in ys]))
    return [(m_p / gamma_p).reshape(old.shape) for m_p, gamma_p, old in zip(new, gamma, m, strict=True)]


def onebit_adam_update(x: Arrays, m: Arrays, d: Arrays, hypers: Sequence[Hyper]) -> Arrays:
    """x - lr (m d + wd x); an element with d = 0 never moves."""
    return [
        np.where(d_p == 0, x_p, x_p - h.lr * (m_p * d_p + h.weight_decay * x_p))
        for x_p, m_p, d_p, h in zip(x, m, d, hypers, strict=True)
    ]

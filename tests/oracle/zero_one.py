"""0/1 Adam: dense steps at first, then 1-bit steps with full steps among them, ever further apart; after the last full
step local steps, in which every rank goes its own way, and sync steps. Steps count from 1, and only those taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracle.adam import Hyper, adamw_step, averaged_momentum, gradient, local_momentum, zeros
from tests.oracle.codec import Arrays, Gradients, SimulatedAllReduce

Floor = tuple[float, float]


def full_steps(last: int, kappa: int, var_freeze_step: int | None = None) -> list[int]:
    """T_v up to `last`: t_0 = 1, t_(j+1) = t_j + 2^floor(j / kappa). None of them comes after var_freeze_step."""
    last = last if var_freeze_step is None else min(last, var_freeze_step)
    steps, t = [], 1
    while t <= last:
        steps.append(t)
        t += 2 ** ((len(steps) - 1) // kappa)
    return steps


def dense_start(kappa: int, var_freeze_step: int | None = None) -> int:
    """The last step of the dense start: t_kappa = kappa + 1, the last with gap 1, or var_freeze_step before it."""
    return kappa + 1 if var_freeze_step is None else min(kappa + 1, var_freeze_step)


def sync_steps(last: int, var_freeze_step: int, scaler: int, clipper: int) -> list[int]:
    """T_u up to `last`, without t_0 = var_freeze_step: t_(j+1) = t_j + min(clipper, 2^floor((t_j - t_0) / scaler))."""
    steps, t = [], var_freeze_step
    while (t := t + min(clipper, 2 ** ((t - var_freeze_step) // scaler))) <= last:
        steps.append(t)
    return steps


def weight_at(step: int, beta2: float, kappa: int, var_freeze_step: int | None = None) -> tuple[float, float]:
    """b of the last full step up to `step`, and W, the sum of the weights of all g^2 in v, after it: b = max(b2^gap,
    min(b2, 0.9)), W = b W + (1 - b) from 0. The gap is the way from the full step before, 1 at step 1."""
    steps = full_steps(step, kappa, var_freeze_step)
    b, weight = beta2, 0.0
    for previous, t in zip([0, *steps], steps, strict=False):
        b = max(beta2 ** (t - previous), min(beta2, 0.9))
        weight = b * weight + (1 - b)
    return b, weight


def floors(
    v: Arrays, weights: Sequence[float], variance_floor: float, zero_variance: str, bias_correction: bool
) -> list[Floor]:
    """The least root of every parameter's variance where there is one, and that where v is 0: with the mean of vhat
    over v > 0 (or 0) sqrt(variance_floor mean), and sqrt(mean) (zero_variance="floor") or 0 ("hold")."""
    result = []
    for v_p, weight in zip(v, weights, strict=True):
        positive = v_p > 0
        vhat = v_p / weight if bias_correction else v_p
        mean = float(vhat[positive].mean()) if positive.any() else 0.0
        at_zero = float(np.sqrt(mean)) if zero_variance == "floor" else 0.0
        result.append((float(np.sqrt(variance_floor * mean)), at_zero))
    return result


def roots(v: Arrays, weights: Sequence[float], floors: Sequence[Floor], bias_correction: bool) -> Arrays:
    """u, the root of the variance in use: at_zero where v is 0, max(sqrt(vhat), least) elsewhere."""
    us = []
    for v_p, weight, (least, at_zero) in zip(v, weights, floors, strict=True):
        vhat = v_p / weight if bias_correction else v_p
        us.append(np.where(v_p == 0, at_zero, np.maximum(np.sqrt(vhat), least)))
    return us


def mean_gradient(grads: Sequence[Gradients], like: Arrays) -> Arrays:
    """g of every parameter, averaged over the ranks; None counts as zero."""
    return [np.mean([gradient(g[p], like_p) for g in grads], axis=0) for p, like_p in enumerate(like)]


def update(x: Arrays, m: Arrays, u: Arrays, hypers: Sequence[Hyper], step: int, bias_correction: bool = True) -> Arrays:
    """x - lr (mhat / (u + eps) + wd x), mhat = m / (1 - b1^step); an element with u = 0 does not move."""
    xs = []
    for x_p, m_p, u_p, h in zip(x, m, u, hypers, strict=True):
        mhat = m_p / (1 - h.beta1**step) if bias_correction else m_p
        moves = u_p > 0
        moved = x_p - h.lr * (mhat / (np.where(moves, u_p, 1.0) + h.eps) + h.weight_decay * x_p)
        xs.append(np.where(moves, moved, x_p))
    return xs


def momentum_weights(hypers: Sequence[Hyper], step: int, bias_correction: bool = True) -> list[float]:
    """w = lr / (1 - b1^step) of every parameter: x moves by w m / (u + eps)."""
    return [h.lr / (1 - h.beta1**step) if bias_correction else h.lr for h in hypers]


def _where(live: Sequence[np.ndarray], m: Arrays) -> Arrays:
    return [np.where(on, m_p, 0.0) for on, m_p in zip(live, m, strict=True)]


@dataclass
class ZeroOne:
    """The optimizer of N ranks, whose x, m, v are the same on all; `all_reduce` keeps the residuals of each.

    `m` is what the last exchange's replies stand for, and 0 once it has been folded into the residuals. `dense`,
    `full`, `one_bit` and `local` take a step of their kind, with `grads[i]` those of rank i, and `step` counts them; a
    sync is a local step and then `synchronize`.

    From `local_start` on rank i has its own x and m, `own_x[i]` and `own_m[i]`, and x and m are those of the last sync:
    x is the anchor. Residuals are in units of lr m. Since that sync there were `since_sync` steps, with, of every
    parameter, the sum `weight_sum` of w and the product `decay` of 1 - lr wd. `reference` is W of that sync, by which
    what was sent is divided to be m: max(sum of w, 3/4 W before).
    """

    x: Arrays
    hypers: Sequence[Hyper]
    all_reduce: SimulatedAllReduce
    kappa: int
    variance_floor: float
    var_freeze_step: int | None = None
    zero_variance: str = "floor"
    bias_correction: bool = True
    local_step_scaler: int | None = None
    local_step_clipper: int = 16
    step: int = 0
    m: Arrays = field(init=False)
    v: Arrays = field(init=False)
    floors: list[Floor] = field(init=False)
    own_x: list[Arrays] = field(init=False, default_factory=list)
    own_m: list[Arrays] = field(init=False, default_factory=list)
    weight_sum: list[float] = field(init=False)
    reference: list[float] = field(init=False)
    decay: list[float] = field(init=False)
    since_sync: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.x = [np.array(x_p, np.float64) for x_p in self.x]
        self.m, self.v = zeros(self.x), zeros(self.x)
        self.floors = [(0.0, 0.0) for _ in self.x]
        self.weight_sum, self.reference, self.decay = ([start] * len(self.x) for start in (0.0, 0.0, 1.0))

    @property
    def local_start(self) -> int | None:
        """The first local step, where the gap between syncs is first above 1; None where it never is."""
        if self.local_step_scaler is None or self.var_freeze_step is None or self.local_step_clipper == 1:
            return None
        return self.var_freeze_step + self.local_step_scaler + 1

    @property
    def kind(self) -> str:
        """The kind of the coming step: "dense", "full", "1 bit", "local" or "sync"."""
        coming = self.step + 1
        if self.local_start is not None and coming >= self.local_start:
            assert self.var_freeze_step is not None and self.local_step_scaler is not None
            syncs = sync_steps(coming, self.var_freeze_step, self.local_step_scaler, self.local_step_clipper)
            return "sync" if coming in syncs else "local"
        if coming <= dense_start(self.kappa, self.var_freeze_step):
            return "dense"
        return "full" if coming in full_steps(coming, self.kappa, self.var_freeze_step) else "1 bit"

    @property
    def live(self) -> list[np.ndarray]:
        """Masks of elements with a variance, or a floor that stands in for it."""
        return [(v_p > 0) | (at_zero > 0) for v_p, (_, at_zero) in zip(self.v, self.floors, strict=True)]

    def dense(self, grads: Sequence[Gradients]) -> None:
        """A step of AdamW on the mean gradient. The last one sets the floors and folds m."""
        self.step += 1
        g, state = mean_gradient(grads, self.x), (self.m, self.v, self.hypers, self.step, self.bias_correction)
        self.x, self.m, self.v = adamw_step(self.x, g, *state)
        if self.step == dense_start(self.kappa, self.var_freeze_step):
            self.renew_floors()
            self.fold()

    def full(self, grads: Sequence[Gradients]) -> None:
        """m = b1 m + (1 - b1) g, v = b v + (1 - b) g^2, g the mean gradient; m of before is 0 where not live.
        u is of the new v with the floors of the full step before, which are then set anew, and m is folded."""
        self.step += 1
        g, m = mean_gradient(grads, self.x), _where(self.live, self.m)
        b = [weight_at(self.step, h.beta2, self.kappa, self.var_freeze_step)[0] for h in self.hypers]
        self.m = local_momentum(g, m, self.hypers)
        self.v = [b_p * v_p + (1 - b_p) * g_p**2 for b_p, v_p, g_p in zip(b, self.v, g, strict=True)]
        self.x = update(self.x, self.m, self._roots(), self.hypers, self.step, self.bias_correction)
        self.renew_floors()
        self.fold()

    def one_bit(self, grads: Sequence[Gradients]) -> None:
        """m = compressed_all_reduce(b1 m + (1 - b1) g_i), v unchanged. What is not live takes no part: c is 0 there, in
        no scale, and leaves no residual and no m."""
        self._set_counted()
        self.m = averaged_momentum(grads, self.m, self.hypers, self.all_reduce)
        self.step += 1
        self.x = update(self.x, self.m, self._roots(), self.hypers, self.step, self.bias_correction)

    def local(self, grads: Sequence[Gradients], shortened: Callable[[Arrays], Arrays] = lambda m: m) -> None:
        """m_i = b1 m_i + (1 - b1) g_i, x_i moves by f m_i, e_i = e_i + w m_i, on every rank whose gradients are finite.
        shortened: f m_i of m_i."""
        if self.step + 1 == self.local_start:
            self._part()
        self.step += 1
        live, u, ws = self.live, self._roots(), momentum_weights(self.hypers, self.step, self.bias_correction)
        self._set_counted()
        self.all_reduce.worker = [np.where(self.all_reduce.counted, e, 0.0) for e in self.all_reduce.worker]
        for i, g in enumerate(grads):
            if not all(np.isfinite(g_p).all() for g_p in g if g_p is not None):
                continue
            self.own_m[i] = m = _where(live, local_momentum(g, self.own_m[i], self.hypers))
            self.own_x[i] = update(self.own_x[i], shortened(m), u, self.hypers, self.step, self.bias_correction)
            moved = self.all_reduce.layout.flatten([w * m_p for w, m_p in zip(ws, m, strict=True)])
            self.all_reduce.worker[i] = self.all_reduce.worker[i] + moved
        self.weight_sum = [total + w for total, w in zip(self.weight_sum, ws, strict=True)]
        self.decay = [d * (1 - h.lr * h.weight_decay) for d, h in zip(self.decay, self.hypers, strict=True)]
        self.since_sync += 1

    def synchronize(self) -> None:
        """U = compressed_all_reduce(e_i), x = D x - U / (u + eps), m = U / W, on every rank; x and m are the anchor's.
        What is not live does not move and has no m. Nothing happens where there was no local step since the last."""
        if not self.since_sync:
            return
        self._set_counted()
        flat = self.all_reduce([np.zeros(self.all_reduce.layout.size) for _ in self.all_reduce.worker])
        xs, ms = [], []
        self.reference = [max(w, 0.75 * before) for w, before in zip(self.weight_sum, self.reference, strict=True)]
        parts = zip(
            self.x, self.all_reduce.layout.unflatten(flat), self._roots(), self.live, self.hypers, self.reference,
            self.decay, strict=True,
        )  # fmt: skip
        for x_p, sent, u_p, on, h, weight, decay in parts:
            moved = np.where(on, sent.reshape(x_p.shape), 0.0)
            xs.append(np.where(on, decay * x_p - moved / (np.where(on, u_p, 1.0) + h.eps), x_p))
            ms.append(moved / weight if weight else np.zeros(x_p.shape))
        self.x, self.m = xs, ms
        self._meet()

    def fold(self) -> None:
        """e_i = e_i + b1 m on every rank i, then m = 0: the next all-reduce finds in e_i what it would have in b1 m."""
        kept = self.all_reduce.layout.flatten([h.beta1 * m_p for m_p, h in zip(self.m, self.hypers, strict=True)])
        self.all_reduce.worker = [e + kept for e in self.all_reduce.worker]
        self.m = zeros(self.m)

    def renew_floors(self) -> None:
        """The floors of v as it is, and with them which elements take part in the all-reduce."""
        self.floors = floors(self.v, self.weights(), self.variance_floor, self.zero_variance, self.bias_correction)
        self._set_counted()

    def weights(self) -> list[float]:
        """W of every parameter, after the last full step taken."""
        return [weight_at(self.step, h.beta2, self.kappa, self.var_freeze_step)[1] for h in self.hypers]

    def _part(self) -> None:
        """Begin local steps: all start from x and m, and residuals of m become residuals of w m."""
        self.m = _where(self.live, self.m)
        ws = momentum_weights(self.hypers, self.step + 1, self.bias_correction)
        w = self.all_reduce.layout.flatten([np.full(x_p.shape, w_p) for x_p, w_p in zip(self.x, ws, strict=True)])
        self.all_reduce.worker = [w * e for e in self.all_reduce.worker]
        self.all_reduce.server = w * self.all_reduce.server
        self.reference = list(ws)
        self._meet()

    def _meet(self) -> None:
        """Every rank has x and m, and no local step was taken since."""
        self.own_x = [[x_p.copy() for x_p in self.x] for _ in self.all_reduce.worker]
        self.own_m = [[m_p.copy() for m_p in self.m] for _ in self.all_reduce.worker]
        self.weight_sum, self.decay, self.since_sync = [0.0] * len(self.x), [1.0] * len(self.x), 0

    def _roots(self) -> Arrays:
        return roots(self.v, self.weights(), self.floors, self.bias_correction)

    def _set_counted(self) -> None:
        self.all_reduce.counted = self.all_reduce.layout.flatten([on.astype(np.float64) for on in self.live]) > 0

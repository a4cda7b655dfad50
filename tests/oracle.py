"""What onebit computes, in float64 numpy, written from the specification and the papers alone.

Nothing here imports onebit. Values are lists of float64 arrays, one a parameter, or one flat array that
`Layout` makes of them. Functions return new arrays and change none of their arguments, except
`SimulatedAllReduce`, which keeps the residuals of N ranks between calls.

A bit is unsure where |c| is within rounding of 0: every `Message` keeps its c, so that a test can leave
such elements out. `Message.sure(tolerance)` says which are safe to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Arrays = list[np.ndarray]
Gradients = Sequence["np.ndarray | None"]


@dataclass(frozen=True)
class Layout:
    """Parameters start on block boundaries; chunks cut the space along its length, ranks cut each chunk."""

    numels: tuple[int, ...]
    block_size: int = 2048
    ranks: int = 1
    chunks: int = 1

    @property
    def used_blocks(self) -> int:
        return sum(-(-numel // self.block_size) for numel in self.numels)

    @property
    def blocks(self) -> int:
        """All blocks: the used ones, padded so that every shard has the same whole number, at least one."""
        shards = self.ranks * self.chunks
        return max(1, -(-self.used_blocks // shards)) * shards

    @property
    def size(self) -> int:
        return self.blocks * self.block_size

    @property
    def starts(self) -> list[int]:
        """The flat index of every parameter's first element."""
        starts, block = [], 0
        for numel in self.numels:
            starts.append(block * self.block_size)
            block += -(-numel // self.block_size)
        return starts

    @property
    def owner(self) -> np.ndarray:
        """The parameter of every flat index, -1 in padding."""
        owner = np.full(self.size, -1)
        for p, (start, numel) in enumerate(zip(self.starts, self.numels, strict=True)):
            owner[start : start + numel] = p
        return owner

    @property
    def valid(self) -> np.ndarray:
        return self.owner >= 0

    def flatten(self, arrays: Gradients, padding: float = 0.0) -> np.ndarray:
        """One flat array of a list; None counts as zero."""
        flat = np.full(self.size, padding, dtype=np.float64)
        for start, numel, array in zip(self.starts, self.numels, arrays, strict=True):
            flat[start : start + numel] = 0.0 if array is None else np.asarray(array, np.float64).ravel()
        return flat

    def unflatten(self, flat: np.ndarray) -> Arrays:
        pairs = zip(self.starts, self.numels, strict=True)
        return [flat[start : start + numel].copy() for start, numel in pairs]

    def shard(self, chunk: int, rank: int) -> slice:
        """The elements of chunk `chunk` that rank `rank` owns."""
        length = self.size // (self.chunks * self.ranks)
        start = (chunk * self.ranks + rank) * length
        return slice(start, start + length)

    def shards(self) -> list[slice]:
        return [self.shard(chunk, rank) for chunk in range(self.chunks) for rank in range(self.ranks)]


@dataclass(frozen=True)
class Message:
    """The 1-bit form of c: scales has one entry a block, or a single one (scale="tensor")."""

    c: np.ndarray
    bits: np.ndarray
    scales: np.ndarray
    valid: np.ndarray

    @property
    def decoded(self) -> np.ndarray:
        """scale * sigma(c), and 0 where nothing is valid."""
        scale = np.repeat(self.scales, self.c.size // max(self.scales.size, 1))
        return np.where(self.valid, np.where(self.bits, scale, -scale), 0.0)

    @property
    def error(self) -> np.ndarray:
        return np.where(self.valid, self.c - self.decoded, 0.0)

    def sure(self, tolerance: float | np.ndarray) -> np.ndarray:
        """Valid elements whose sign rounding of size `tolerance` cannot turn."""
        return self.valid & (np.abs(self.c) > tolerance)


def sigma(c: np.ndarray) -> np.ndarray:
    """+1 where c >= 0 (so for -0.0), -1 elsewhere."""
    return np.where(c >= 0, 1.0, -1.0)


def magnitude(values: np.ndarray, norm: str) -> float:
    """The mean of |values| ("l1") or their root mean square ("l2"); 0 where there is none."""
    if values.size == 0:
        return 0.0
    if norm == "l1":
        return float(np.abs(values).mean())
    if norm == "l2":
        return float(np.sqrt((values**2).mean()))
    raise ValueError(norm)


def compress(
    c: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    block_size: int,
    scale: str = "block",
    norm: str = "l1",
    counted: np.ndarray | None = None,
) -> Message:
    """Bits and scales of one message (whole blocks). `counted`: what enters a scale, if not all that is valid."""
    c = np.asarray(c, np.float64)
    valid = np.ones(c.shape, bool) if valid is None else valid
    counted = valid if counted is None else counted & valid
    if scale == "tensor":
        scales = [magnitude(c[counted], norm)]
    elif scale == "block":
        blocks = [slice(start, start + block_size) for start in range(0, c.size, block_size)]
        scales = [magnitude(c[block][counted[block]], norm) for block in blocks]
    else:
        raise ValueError(scale)
    return Message(c, sigma(c) > 0, np.array(scales), valid)


def packed(bits: np.ndarray) -> np.ndarray:
    """The bytes of a message's bits."""
    return np.packbits(bits, bitorder="little")


@dataclass
class SimulatedAllReduce:
    """gather, average, scatter over N ranks, with every rank's worker and server residual between calls.

    `worker[i]` is rank i's residual over the whole space. `server` is the whole space too: each of its
    shards lives on the rank that owns it. `gathered[i]` and `scattered` list the last call's messages,
    one a shard, in the order of the flat space.
    """

    layout: Layout
    scale: str = "block"
    norm: str = "l1"
    counted: np.ndarray | None = None
    worker: Arrays = field(init=False)
    server: np.ndarray = field(init=False)
    gathered: list[list[Message]] = field(init=False, default_factory=list)
    scattered: list[Message] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.worker = [np.zeros(self.layout.size) for _ in range(self.layout.ranks)]
        self.server = np.zeros(self.layout.size)

    def __call__(self, ys: Sequence[np.ndarray]) -> np.ndarray:
        """The average, as every rank receives it, of one flat array a rank."""
        valid, result = self.layout.valid, np.zeros(self.layout.size)
        self.gathered, self.scattered = [[] for _ in ys], []
        for shard in self.layout.shards():
            total = np.zeros(shard.stop - shard.start)
            for rank, y in enumerate(ys):
                message = self._compress(y[shard] + self.worker[rank][shard], valid[shard], shard)
                self.worker[rank][shard] = message.error
                self.gathered[rank].append(message)
                total += message.decoded
            reply = self._compress(total / len(ys) + self.server[shard], valid[shard], shard)
            self.server[shard] = reply.error
            self.scattered.append(reply)
            result[shard] = reply.decoded
        return result

    def _compress(self, c: np.ndarray, valid: np.ndarray, shard: slice) -> Message:
        counted = None if self.counted is None else self.counted[shard]
        return compress(
            np.where(valid, c, 0.0),
            valid,
            block_size=self.layout.block_size,
            scale=self.scale,
            norm=self.norm,
            counted=counted,
        )


@dataclass(frozen=True)
class Hyper:
    """What one parameter's group says. A step takes one a parameter."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class LambHyper(Hyper):
    coeff_beta: float = 0.9
    min_coeff: float = 0.01
    max_coeff: float = 0.3
    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_threshold: float = 0.1


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
    x: Arrays,
    g: Gradients,
    m: Arrays,
    v: Arrays,
    hypers: Sequence[Hyper],
    step: int,
    bias_correction: bool = True,
) -> tuple[Arrays, Arrays, Arrays]:
    """Stage 1 of 1-bit Adam: new x, m, v."""
    xs, ms, vs = [], [], []
    for x_p, g_p, m_p, v_p, h in zip(x, g, m, v, hypers, strict=True):
        m_p, v_p, mhat, vhat = moments(g_p, m_p, v_p, h, step, bias_correction)
        xs.append(x_p - h.lr * (mhat / (np.sqrt(vhat) + h.eps) + h.weight_decay * x_p))
        ms.append(m_p)
        vs.append(v_p)
    return xs, ms, vs


def coefficient(x: np.ndarray, u: np.ndarray, h: LambHyper) -> float:
    """LAMB's clip(||x|| / ||u||), 1 where a norm is 0."""
    above, below = np.linalg.norm(x), np.linalg.norm(u)
    if above == 0 or below == 0:
        return 1.0
    return float(np.clip(above / below, h.min_coeff, h.max_coeff))


def lamb_step(
    x: Arrays,
    g: Gradients,
    m: Arrays,
    v: Arrays,
    c_avg: np.ndarray,
    hypers: Sequence[LambHyper],
    step: int,
    bias_correction: bool = True,
) -> tuple[Arrays, Arrays, Arrays, np.ndarray, np.ndarray]:
    """Stage 1 of 1-bit LAMB: new x, m, v, the (biased) averages of the coefficients, and the coefficients."""
    xs, ms, vs, cs = [], [], [], []
    for x_p, g_p, m_p, v_p, h in zip(x, g, m, v, hypers, strict=True):
        m_p, v_p, mhat, vhat = moments(g_p, m_p, v_p, h, step, bias_correction)
        u = mhat / (np.sqrt(vhat) + h.eps) + h.weight_decay * x_p
        c = coefficient(x_p, u, h)
        xs.append(x_p - h.lr * c * u)
        ms.append(m_p)
        vs.append(v_p)
        cs.append(c)
    beta = np.array([h.coeff_beta for h in hypers])
    return xs, ms, vs, beta * c_avg + (1 - beta) * np.array(cs), np.array(cs)


def debiased(c_avg: np.ndarray, hypers: Sequence[LambHyper], steps: int) -> np.ndarray:
    return c_avg / (1 - np.array([h.coeff_beta for h in hypers]) ** steps)


def freeze(
    v: Arrays, hypers: Sequence[Hyper], step: int, bias_correction: bool = True, zero_variance: str = "floor"
) -> Arrays:
    """d = 1 / (sqrt(vhat) + eps). Where v is 0: the mean vhat of the live ones, or d = 0 (zero_variance="hold").

    A parameter with no live coordinate at all has no mean to use: it gets d = 0 either way.
    """
    ds = []
    for v_p, h in zip(v, hypers, strict=True):
        vhat = v_p / (1 - h.beta2**step) if bias_correction else v_p
        live = v_p > 0
        if zero_variance == "floor" and live.any():
            vhat, live = np.where(live, vhat, vhat[live].mean()), np.ones(v_p.shape, bool)
        ds.append(np.where(live, 1 / (np.sqrt(vhat) + h.eps), 0.0))
    return ds


def local_momentum(g: Gradients, m: Arrays, hypers: Sequence[Hyper]) -> Arrays:
    """y = b1 m + (1 - b1) g of one rank."""
    return [h.beta1 * m_p + (1 - h.beta1) * gradient(g_p, m_p) for g_p, m_p, h in zip(g, m, hypers, strict=True)]


def averaged_momentum(
    grads: Sequence[Gradients],
    m: Arrays,
    hypers: Sequence[Hyper],
    all_reduce: SimulatedAllReduce,
    gamma: np.ndarray | None = None,
) -> Arrays:
    """m of the next step; each rank's y times gamma before the all-reduce, and m divided by it after."""
    gamma = np.ones(len(m)) if gamma is None else gamma
    layout = all_reduce.layout
    ys = []
    for g in grads:
        y = local_momentum(g, m, hypers)
        ys.append(layout.flatten([gamma_p * y_p for gamma_p, y_p in zip(gamma, y, strict=True)]))
    new = layout.unflatten(all_reduce(ys))
    return [(m_p / gamma_p).reshape(old.shape) for m_p, gamma_p, old in zip(new, gamma, m, strict=True)]


def onebit_adam_update(x: Arrays, m: Arrays, d: Arrays, hypers: Sequence[Hyper]) -> Arrays:
    """x - lr (m d + wd x); a coordinate with d = 0 never moves."""
    return [
        np.where(d_p == 0, x_p, x_p - h.lr * (m_p * d_p + h.weight_decay * x_p))
        for x_p, m_p, d_p, h in zip(x, m, d, hypers, strict=True)
    ]


def onebit_adam_step(
    x: Arrays,
    grads: Sequence[Gradients],
    m: Arrays,
    d: Arrays,
    hypers: Sequence[Hyper],
    all_reduce: SimulatedAllReduce,
) -> tuple[Arrays, Arrays]:
    """Stage 2 of 1-bit Adam over N ranks, `grads[i]` those of rank i: new x, m, the same on every rank."""
    m = averaged_momentum(grads, m, hypers, all_reduce)
    return onebit_adam_update(x, m, d, hypers), m


@dataclass(frozen=True)
class LambFrozen:
    """What 1-bit LAMB keeps for good at the freeze. `gamma` is 1 unless momenta are scaled (scale="tensor").

    `v` is v_T, where the fresh variance starts. It is the corrected one (vhat) where d is made of that: the ratio
    stands for the change of what d divides by, and a lack of correction would count as a change.
    """

    d: Arrays
    v: Arrays
    c_avg: np.ndarray
    gamma: np.ndarray


def momentum_scaling(m: Arrays) -> np.ndarray:
    """gamma_p = (mean over parameters of rms(m)) / rms(m_p), 1 where rms is 0."""
    rms = np.array([magnitude(m_p, "l2") for m_p in m])
    return np.divide(rms.mean(), rms, out=np.ones(rms.shape), where=rms > 0)


def freeze_lamb(
    m: Arrays,
    v: Arrays,
    c_avg: np.ndarray,
    hypers: Sequence[LambHyper],
    step: int,
    *,
    scale: str = "block",
    bias_correction: bool = True,
    zero_variance: str = "floor",
) -> LambFrozen:
    corrections = [1 - h.beta2**step if bias_correction else 1.0 for h in hypers]
    return LambFrozen(
        d=freeze(v, hypers, step, bias_correction, zero_variance),
        v=[v_p / correction for v_p, correction in zip(v, corrections, strict=True)],
        c_avg=debiased(c_avg, hypers, step),
        gamma=momentum_scaling(m) if scale == "tensor" else np.ones(len(m)),
    )


def variance_ratio(frozen: np.ndarray, fresh: np.ndarray, h: Hyper, ratio: str) -> float:
    """The largest frozen/fresh over live coordinates (1 where there is none), before any clip."""
    live = frozen > 0
    if not live.any():
        return 1.0
    frozen, fresh = frozen[live], fresh[live]
    if ratio == "variance":
        return float((frozen / fresh).max())
    if ratio == "denominator":
        return float(((np.sqrt(frozen) + h.eps) / (np.sqrt(fresh) + h.eps)).max())
    raise ValueError(ratio)


def clipped_ratio(r: float, previous: float, h: LambHyper) -> float:
    r = float(np.clip(r, (1 - h.factor_threshold) * previous, (1 + h.factor_threshold) * previous))
    return float(np.clip(r, h.factor_min, h.factor_max))


def onebit_lamb_update(
    x: Arrays,
    m: Arrays,
    m_previous: Arrays,
    v: Arrays,
    r: np.ndarray,
    frozen: LambFrozen,
    hypers: Sequence[LambHyper],
    ratio: str = "variance",
) -> tuple[Arrays, Arrays, np.ndarray]:
    """Lines 14 to 22 of Algorithm 1: new x, v (fresh) and r."""
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


def onebit_lamb_step(
    x: Arrays,
    grads: Sequence[Gradients],
    m: Arrays,
    v: Arrays,
    r: np.ndarray,
    frozen: LambFrozen,
    hypers: Sequence[LambHyper],
    all_reduce: SimulatedAllReduce,
    ratio: str = "variance",
) -> tuple[Arrays, Arrays, Arrays, np.ndarray]:
    """Stage 2 of 1-bit LAMB over N ranks: new x, m, v, r. r starts at 1, v at frozen.v."""
    m_previous = m
    m = averaged_momentum(grads, m_previous, hypers, all_reduce, frozen.gamma)
    x, v, r = onebit_lamb_update(x, m, m_previous, v, r, frozen, hypers, ratio)
    return x, m, v, r

"""The passes of every backend one after the other, over simulated ranks and several steps, against the oracle."""

import dataclasses

import numpy as np
import pytest
import torch

from onebit.kernels.cpu import threads
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from tests import oracle
from tests.kernels.cases import (
    F32,
    ON_BACKENDS,
    ON_FUSED,
    Case,
    World,
    assert_close,
    frozen_bits,
    gathered,
    numpy,
    rounded,
    use_grain,
)
from tests.kernels.test_passes_lamb_statistics import FACTORS

STEPS = 4
ROUNDED = 2e-5  # what four steps of fp32 add up to
NUMELS = (100, 7, 64, 33)
CASES = [
    Case(NUMELS, groups=2),
    Case(NUMELS, ranks=2, chunks=2, scale="tensor", norm="l2", groups=3, grain=2),
    Case(NUMELS, ranks=3, chunks=2, norm="l2", groups=3, unaligned=True),
    Case(NUMELS, 96, ranks=3, scale="tensor", groups=2),
]
GRID = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.ranks}-ranks-{c.chunks}-chunks-{c.scale}-{c.norm}")
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["all-live", "masked"])


class Cluster:
    """All ranks of a case on one device; the transport is slicing and copying."""

    def __init__(self, world: World, live: np.ndarray | None = None, gamma: torch.Tensor | None = None) -> None:
        self.world, self.live, self.gamma, case = world, live, gamma, world.case
        shards = [[world.layout.shard(j, k) for k in range(case.ranks)] for j in range(case.chunks)]
        self.worker = []
        for _ in range(case.ranks):
            spans = [span for span, _ in world.spans()]
            self.worker.append(Residual.zeros(spans, world.form, world.device).parts(spans))
        self.server = [[Residual.zeros(s, world.form, world.device) for s in row] for row in shards]

    def reduce(self, grads: list[Pointers], momentum: torch.Tensor | Messages) -> Messages:
        """b1 m + (1 - b1) g of every rank, averaged: the replies of all chunks."""
        world, ranks = self.world, self.world.case.ranks
        replies = world.fresh(world.rows)
        for j, (span, part) in enumerate(world.spans()):
            packed = isinstance(momentum, Messages)
            m = momentum.slice(j * ranks, ranks) if packed else momentum[part]
            sent = [world.fresh(ranks) for _ in range(ranks)]
            for i in range(ranks):
                world.passes.compress(
                    span, grads[i], m, self.worker[i][j], world.hyper(), world.flags(), sent[i],
                    live=self.mask(part), gamma=self.gamma,
                )  # fmt: skip
            for k in range(ranks):
                received = world.fresh(ranks)
                received.buffer.copy_(torch.stack([message.buffer[k] for message in sent]))
                shard, reply = world.layout.shard(j, k), replies.slice(j * ranks + k, 1)
                mask = self.mask(world.plan.shard(j, k))
                world.passes.average(shard, received, self.server[j][k], reply, live=mask)
        return replies

    def mask(self, part: slice) -> torch.Tensor | None:
        return None if self.live is None else self.world.packed(self.live[part])

    def worker_residual(self, rank: int) -> np.ndarray:
        return self._derived(self.worker[rank])

    def server_residual(self) -> np.ndarray:
        return self._derived([r for row in self.server for r in row])

    def _derived(self, residuals: list[Residual]) -> np.ndarray:
        """e, which with a tensor scale is what is left of c."""
        parts = []
        for residual in residuals:
            e = numpy(residual.value)
            if residual.scale is not None:
                e = e - oracle.sigma(e) * np.repeat(numpy(residual.scale), residual.sizes)
            parts.append(e)
        return np.where(self.world.plan.valid, np.concatenate(parts), 0.0)


def local_gradients(world: World, step: int) -> tuple[list[Pointers], list[oracle.Arrays]]:
    """Tensors of every rank, and what they come to once scaled."""
    tensors, arrays = [], []
    for rank in range(world.case.ranks):
        rng = np.random.default_rng((step, rank))
        g = [rounded(rng.normal(size=n), F32) for n in world.case.numels]
        pointers = world.grads()
        pointers.bind_tensors(world.tensors(g, F32))
        tensors.append(pointers)
        arrays.append([s * g_p for s, g_p in zip(world.grad_scales, g, strict=True)])
    return tensors, arrays


def check_signs_were_sure(simulated: oracle.SimulatedAllReduce) -> None:
    """So close to 0 that rounding could turn it, no c of these seeds came: a wrong sign is an error."""
    counted = simulated.layout.valid if simulated.counted is None else simulated.layout.valid & simulated.counted
    for messages in (*simulated.gathered, simulated.scattered):
        sure = np.concatenate([message.sure(1e-6) for message in messages])
        assert sure[counted].all()


def check_residuals(cluster: Cluster, simulated: oracle.SimulatedAllReduce) -> None:
    live = slice(None) if cluster.live is None else cluster.live
    for rank in range(cluster.world.case.ranks):
        assert_close(cluster.worker_residual(rank)[live], simulated.worker[rank][live], ROUNDED, 1)
    assert_close(cluster.server_residual()[live], simulated.server[live], ROUNDED, 1)


@ON_BACKENDS
@GRID
@MASKED
def test_onebit_adam_over_steps_agrees_with_algorithm_1(name, case, masked, monkeypatch):
    use_grain(monkeypatch, case)
    world = World(case, name)
    live = world.live if masked else None
    cluster, simulated = Cluster(world, live), oracle.SimulatedAllReduce(world.plan, case.scale, case.norm, live)
    d = [rounded(1 / (np.sqrt(v) + h.eps), F32) for v, h in zip(world.v, world.hypers, strict=True)]
    if masked:
        d = [np.where(on, d_p, 0.0) for on, d_p in zip(world.plan.unflatten(live), d, strict=True)]
    params, momentum = world.params(), world.flat(world.m)
    x, m = world.x, world.m
    for step in range(STEPS):
        tensors, arrays = local_gradients(world, step)
        momentum = cluster.reduce(tensors, momentum)
        world.passes.adam_update(world.layout.all(), params, world.flat(d), momentum, None, world.hyper())
        x, m = oracle.onebit_adam_step(x, arrays, m, d, world.hypers, simulated)
        check_signs_were_sure(simulated)
    check_residuals(cluster, simulated)
    for got, want, d_p in zip(gathered(params), x, d, strict=True):
        assert_close(got, want, ROUNDED, 1 + d_p)


@ON_BACKENDS
@GRID
@MASKED
def test_onebit_lamb_over_steps_agrees_with_algorithm_1(name, case, masked, monkeypatch):
    """With a live mask, momentum is scaled as well."""
    ratio = "denominator" if case.ranks == 2 else "variance"
    use_grain(monkeypatch, case)
    world = World(case, name)
    live, gamma = (world.live, world.gamma) if masked else (None, np.ones(len(world.x)))
    scaling = world.per_parameter(gamma) if masked else None
    cluster = Cluster(world, live, scaling)
    simulated = oracle.SimulatedAllReduce(world.plan, case.scale, case.norm, live)
    counted = world.plan.unflatten(np.ones(world.elements, bool) if live is None else live)
    frozen_v = [np.where(on, v, 0.0) for on, v in zip(counted, world.v, strict=True)]
    d = [
        np.where(on, rounded(1 / ((np.sqrt(v) + h.eps) * g), F32), 0.0)
        for on, v, h, g in zip(counted, world.v, world.hypers, gamma, strict=True)
    ]
    c_avg = rounded(np.linspace(0.05, 0.25, len(d)), F32)
    unscaled = [d_p * g for d_p, g in zip(d, gamma, strict=True)]
    frozen = oracle.LambFrozen(unscaled, frozen_v, c_avg, gamma)
    state, span, variance = world.lamb_state(), world.layout.all(), world.flat(world.v)
    state.average.copy_(torch.from_numpy(c_avg))
    params, previous = world.params(), world.flat([g * m_p for g, m_p in zip(gamma, world.m, strict=True)])
    x, m, v, r = world.x, world.m, world.v, np.ones(len(d))
    for step in range(STEPS):
        tensors, arrays = local_gradients(world, step)
        replies = cluster.reduce(tensors, previous)
        world.passes.lamb_statistics(
            span, replies, previous, world.flat(d), variance, world.hyper(), state, **FACTORS, ratio=ratio,
            live=cluster.mask(slice(None)), gamma=scaling,
        )  # fmt: skip
        world.passes.adam_update(span, params, world.flat(d), replies, None, world.hyper(), state.coefficient)
        previous = replies
        x, m, v, r = oracle.onebit_lamb_step(x, arrays, m, v, r, frozen, world.hypers, simulated, ratio)
        check_signs_were_sure(simulated)
    check_residuals(cluster, simulated)
    assert_close(numpy(state.ratio), r, ROUNDED)
    for got, want, d_p in zip(gathered(params), x, unscaled, strict=True):
        assert_close(got, want, ROUNDED, 1 + d_p)
    for got, want, on in zip(world.plan.unflatten(numpy(variance)), v, counted, strict=True):
        assert_close(got[on], want[on], ROUNDED, 1)


def everything_once(world: World) -> list[bytes]:
    """All that the passes write, each run once."""
    cluster = Cluster(world)
    grads, _ = local_gradients(world, 0)
    params, previous, span = world.params(), world.flat(world.m), world.layout.all()
    variance, d, warm = world.flat(world.v), world.flat([1 / np.sqrt(v) for v in world.v]), world.lamb_state()
    average, square, sums = world.flat(world.m), world.flat(world.v), torch.zeros(world.layout.blocks)
    sums, state, lamb = sums.to(world.device), world.lamb_state(), world.params()
    replies, out = cluster.reduce(grads, previous), world.params()
    hyper, flags, passes = world.hyper(), world.flags(), world.passes
    passes.lamb_statistics(span, replies, previous, d, variance, hyper, state, **FACTORS)
    passes.adam_update(span, params, d, replies, None, hyper)
    passes.adam_warmup(span, params, grads[0], average, square, None, hyper, flags, sums)
    coefficients = {"coeff_beta": 0.9, "min_coeff": 0.01, "max_coeff": 0.3}
    passes.lamb_warmup(span, lamb, grads[0], average, square, None, hyper, flags, warm, **coefficients)
    passes.decode(span, replies, out)
    found = [params, variance, average, square, sums, out, lamb, replies]
    found += [state.ratio, state.coefficient, warm.coefficient, warm.average]
    found += [residual.value for row in (*cluster.worker, *cluster.server) for residual in row]
    return frozen_bits(*found)


@ON_FUSED
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_results_do_not_depend_on_how_many_blocks_a_program_takes(name, scale, monkeypatch):
    case = Case(NUMELS, ranks=2, chunks=2, scale=scale, groups=3)
    found = []
    for grain in (1, 3, 64):
        use_grain(monkeypatch, dataclasses.replace(case, grain=grain))
        found.append(everything_once(World(case, name)))
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_results_on_the_cpu_do_not_depend_on_the_number_of_threads(scale, monkeypatch):
    case = Case((500, 63, 1, 129, 2049), 32, ranks=2, scale=scale, groups=3)
    monkeypatch.setattr(threads, "LEAST", 1)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(everything_once(World(case, "cpu")))
    finally:
        torch.set_num_threads(before)
    assert found[1] == found[0]
    assert found[2] == found[0]

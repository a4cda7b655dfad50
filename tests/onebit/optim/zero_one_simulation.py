"""Runs of 0/1 Adam that are recorded step by step, and every step of them in float64, from what was recorded before."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests import oracle
from tests.onebit.optim.simulation import (
    Simulation,
    any_flipped,
    check_reply,
    decoded,
    group_or_none,
    of_senders,
    server_residual,
    whole_scale,
)
from tests.onebit.runs import arrays, bits, take
from tests.oracle.zero_one import ZeroOne

CLOSE = 2e-6


@dataclass(frozen=True)
class Recorded:
    """One rank's run, after every step. Flat arrays cover the space; lists are in the order of `case.shapes`."""

    kinds: list[str]
    x: list[list[np.ndarray]]
    v: list[list[np.ndarray]]
    dense_m: list[list[np.ndarray] | None]
    floors: list[list[tuple[float, float]] | None]
    e: list[np.ndarray | None]
    E: list[np.ndarray | None]
    m: list[np.ndarray | None]
    bits: list[bytes]
    alone: dict[int, Alone] = field(default_factory=dict)  # by the index of the step


@dataclass(frozen=True)
class Alone:
    """After a step of the local regime, of one rank."""

    taken: int  # local steps since the last sync
    m: list[np.ndarray]
    anchor: list[np.ndarray]
    weights: list[float]  # as decay and reference, in the order of the flat space
    decay: list[float]
    reference: list[float]


def record_run(rank: int, size: int, case: Any, extra_syncs: tuple[int, ...] = ()) -> Recorded:
    """extra_syncs: steps after which ranks synchronise, whatever the schedule says."""
    params, found = case.parameters(), Recorded(*([] for _ in range(9)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer = case.build(params, group_or_none(size))
        for step in range(1, case.steps + 1):
            found.kinds.append(optimizer.schedule.kind)
            take(case, rank, optimizer, params, step)
            if step in extra_syncs:
                optimizer.synchronize()
            _record(found, optimizer, params)
    return found


def _record(found: Recorded, optimizer: Any, params: list[Any]) -> None:
    states = [optimizer.state[p] for p in params]
    found.bits.append(bits(params))
    values = [s.get("master", p) for p, s in zip(params, states, strict=True)]
    found.x.append(arrays(values))
    assert bits(params) == bits(x.to(p.dtype) for p, x in zip(params, values, strict=True))
    found.v.append(arrays([s["exp_avg_sq"] for s in states]))
    if not optimizer.compressing:
        found.dense_m.append(arrays([s["exp_avg"] for s in states]))
        for each in (found.floors, found.e, found.E, found.m):
            each.append(None)
        return
    [part] = optimizer.current.parts
    saved = [part.state[name].tolist() for name in ("least_root", "root_at_zero")]
    found.dense_m.append(None)
    found.floors.append(list(zip(*saved, strict=True)))  # in the order of the flat space
    exchange = part.reducer.exchange
    found.e.append(exchange.residual.left_out().double().numpy().copy())
    found.E.append(server_residual(exchange))
    found.m.append(decoded(exchange))
    if part.local is not None:
        m, anchor = (arrays([s[name] for s in states]) for name in ("own_momentum", "anchor"))
        sums = [t.double().tolist() for t in (part.local.weights, part.local.decay)]
        sums.append([1 / factor if factor else 0.0 for factor in part.state["momentum_factor"].double().tolist()])
        found.alone[len(found.x) - 1] = Alone(part.local.taken, m, anchor, *sums)


class ZeroOneSimulation(Simulation):
    """The oracle for a case. Lists are in the order of the flat space."""

    norm = "unbiased"

    def __init__(self, case: Any, ranks: int) -> None:
        super().__init__(case.but(options={"freeze_step": 0, **case.options}), ranks)
        self.has_variance = np.ones(self.layout.size, bool)
        self.all_reduce = self.simulated_all_reduce()
        options = case.options
        self.oracle = ZeroOne(
            self.ordered(arrays(case.parameters())), self.hypers, self.all_reduce, options.get("var_update_scaler", 4),
            options.get("variance_floor", 0.0), options.get("var_freeze_step"), options.get("zero_variance", "floor"),
            self.corrected, options.get("local_step_scaler"), options.get("local_step_clipper", 16),
        )  # fmt: skip

    def set_to(self, recorded: list[Recorded], i: int) -> None:
        """Where the ranks were after their i-th step."""
        first, o = recorded[0], self.oracle
        o.x, o.v, o.step = self.ordered(first.x[i]), self.ordered(first.v[i]), i + 1
        dense = first.dense_m[i]
        if dense is not None:
            o.m, o.floors = self.ordered(dense), [(0.0, 0.0)] * len(o.x)
            self.all_reduce.worker = [np.zeros(self.layout.size)] * self.ranks
            if o.kind != "dense":  # the freeze comes with the step
                o.renew_floors()
                o.fold()
            return
        o.floors = first.floors[i]
        live = self.live()
        o.m = self.shaped(np.where(live, first.m[i], 0.0))
        self.all_reduce.worker = [np.where(live, r.e[i], 0.0) for r in recorded]
        self.all_reduce.server = np.where(live, first.E[i], 0.0)
        if i in first.alone:
            alone = [r.alone[i] for r in recorded]
            o.x = self.ordered(alone[0].anchor)
            o.own_x = [self.ordered(r.x[i]) for r in recorded]
            o.own_m = [self.ordered(own.m) for own in alone]
            o.weight_sum, o.decay, o.since_sync = alone[0].weights, alone[0].decay, alone[0].taken
            o.reference = alone[0].reference

    def live(self) -> np.ndarray:
        return self.layout.flatten([on.astype(np.float64) for on in self.oracle.live]) > 0


def check(case: Any, recorded: list[Recorded]) -> None:
    assert all(r.kinds == recorded[0].kinds for r in recorded)
    for i in range(case.steps):
        of = recorded[0].alone.get(i)
        alike = case.each if of is not None and of.taken else len(recorded)
        for rank, own in enumerate(recorded):
            assert own.bits[i] == recorded[rank // alike * alike].bits[i], f"rank {rank} after step {i + 1}"
    recorded = of_senders(case, recorded)
    first, sim = recorded[0], ZeroOneSimulation(case, len(recorded))
    o, compared, compressed = sim.oracle, 0, 0
    for i in range(case.steps):
        if i:
            sim.set_to(recorded, i - 1)
        kind, before = o.kind, [x.copy() for x in o.x]
        assert first.kinds[i] == ("full" if kind == "dense" else kind)
        if kind in ("local", "sync"):
            compared += _check_alone(sim, recorded, i)
            compressed += recorded[0].alone[i].taken == 0
            continue
        sim.m = o.m
        sizes = sim.sizes(i + 1)
        server_size = sum(sizes) / sim.ranks + np.abs(sim.all_reduce.server)
        o.take_step(sim.gradients(i + 1))
        what = f"step {i + 1} ({kind})"
        if kind == "1 bit":
            compressed += 1
            compared += _check_exchange(sim, recorded, i, sizes, server_size)
            _check_moved(sim, recorded, i, before)
            continue
        _assert_close(sim.ordered(first.x[i]), o.x, before, f"x after {what}")
        _assert_close(sim.ordered(first.v[i]), o.v, o.v, f"v after {what}")
        if kind == "full":
            live = sim.live()
            for r, own in zip(recorded, sim.all_reduce.worker, strict=True):
                off = np.where(live, np.abs(r.e[i] - own), 0.0)
                assert np.all(off <= CLOSE * sum(sizes)), f"e after {what}"
            assert not np.any(first.m[i][live]), f"m after {what}"
            for got, want in zip(first.floors[i], o.floors, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=f"floors after {what}")
    assert compared >= 0.9 * compressed > 0, f"only {compared} of {compressed} steps could be compared"


def _check_alone(sim: ZeroOneSimulation, recorded: list[Recorded], i: int) -> bool:
    """A local step of every rank, and what ranks agree on after a sync. Whether one could be compared."""
    o, after, what = sim.oracle, recorded[0].alone[i], f"step {i + 1}"
    grads, start = sim.gradients(i + 1), i + 1 == o.local_start
    before = [[x.copy() for x in own] for own in (o.own_x if not start else [o.x] * sim.ranks)]
    o.local(grads)
    summands = [_summands(sim, own, g) for own, g in zip(o.own_m, grads, strict=True)]
    if start:  # m is what ranks have sent: a mean whose terms may cancel
        terms = [np.concatenate([np.abs(part.decoded) for part in own]) for own in o.all_reduce.gathered]
        summands = [own + sum(terms) / len(terms) for own in summands]
    weights = oracle.zero_one.momentum_weights(sim.hypers, o.step, sim.corrected)
    w = sim.layout.flatten([np.full(x.shape, w_p) for x, w_p in zip(o.x, weights, strict=True)])
    sizes = [np.abs(e) + 2 * w * own for e, own in zip(o.all_reduce.worker, summands, strict=True)]
    if after.taken:
        for rank, (own, alone) in enumerate((r, r.alone[i]) for r in recorded):
            _assert_close(sim.ordered(own.x[i]), o.own_x[rank], before[rank], f"x of rank {rank} after {what}")
            m, e = o.own_m[rank], o.all_reduce.worker[rank]
            off = sim.layout.flatten([np.abs(a - b) for a, b in zip(sim.ordered(alone.m), m, strict=True)])
            assert np.all(off <= CLOSE * summands[rank]), f"m of rank {rank} after {what}"
            off = np.where(sim.live(), np.abs(own.e[i] - e), 0.0)
            assert np.all(off <= CLOSE * sizes[rank]), f"e of rank {rank} after {what}"
            assert alone.taken == o.since_sync
            np.testing.assert_allclose(alone.weights, o.weight_sum, rtol=1e-6, err_msg=what)
            np.testing.assert_allclose(alone.decay, o.decay, rtol=1e-6, err_msg=what)
            _assert_close(sim.ordered(alone.anchor), o.x, o.x, f"the anchor after {what}")
        return False
    anchor, decay = [x.copy() for x in o.x], o.decay
    server_size = sum(sizes) / sim.ranks + np.abs(o.all_reduce.server)
    o.synchronize()
    references = o.reference
    np.testing.assert_allclose(after.reference, references, rtol=1e-6, err_msg=what)
    o.m = [m * reference for m, reference in zip(o.m, references, strict=True)]  # as it was sent
    compared = _check_exchange(sim, recorded, i, sizes, server_size)
    received, live = sim.shaped(recorded[0].m[i]), o.live
    u = oracle.zero_one.roots(o.v, o.weights(), o.floors, o.bias_correction)
    x = [
        np.where(on, d * a - r / (np.where(on, u_p, 1.0) + h.eps), a)
        for on, d, a, r, u_p, h in zip(live, decay, anchor, received, u, o.hypers, strict=True)
    ]
    m = [np.where(on, r / w if w else 0.0, 0.0) for on, r, w in zip(live, received, references, strict=True)]
    summed = [np.full(m_p.shape, np.abs(m_p).max(initial=0)) for m_p in m]  # messages may cancel each other
    for own in recorded:
        _assert_close(sim.ordered(own.x[i]), x, anchor, f"x after the sync of {what}")
        _assert_close(sim.ordered(own.alone[i].anchor), x, anchor, f"the anchor after the sync of {what}")
        _assert_close(sim.ordered(own.alone[i].m), m, summed, f"m after the sync of {what}")
        assert own.alone[i].weights == [0.0] * len(m) and own.alone[i].decay == [1.0] * len(m)
    return compared


def _summands(sim: ZeroOneSimulation, m: list[np.ndarray], grads: Any) -> np.ndarray:
    """The size of what a local step adds up to m."""
    fresh = [
        np.zeros(m_p.shape) if g is None else np.abs(np.nan_to_num(g, posinf=0, neginf=0))
        for g, m_p in zip(grads, m, strict=True)
    ]
    return sim.layout.flatten([np.abs(m_p) + 2 * g_p for m_p, g_p in zip(m, fresh, strict=True)])


def _check_exchange(sim: ZeroOneSimulation, recorded: list[Recorded], i: int, sizes: Any, server_size: Any) -> bool:
    first, reduce, live = recorded[0], sim.all_reduce, sim.live()
    sim.has_variance, sim.m, flipped = live, sim.oracle.m, False
    for rank, messages in enumerate(reduce.gathered):
        size = sizes[rank] + whole_scale(messages)
        what = f"what rank {rank} has left out in step {i + 1}"
        flipped |= any_flipped(recorded[rank].e[i], reduce.worker[rank], messages, size, live, what)
    return not (flipped or check_reply(sim, first, i, server_size, sim.layout.flatten(sim.m), i + 1))


def _check_moved(sim: ZeroOneSimulation, recorded: list[Recorded], i: int, before: list[np.ndarray]) -> None:
    """The update by the m that was received."""
    o, first = sim.oracle, recorded[0]
    o.m = sim.shaped(np.where(sim.live(), first.m[i], 0.0))
    u = oracle.zero_one.roots(o.v, o.weights(), o.floors, o.bias_correction)
    moved = oracle.zero_one.update(before, o.m, u, o.hypers, i + 1, o.bias_correction)
    _assert_close(sim.ordered(first.x[i]), moved, before, f"x after step {i + 1}")
    assert sim.ordered(first.v[i])[0].tolist() == o.v[0].tolist()


def _assert_close(got: list[np.ndarray], want: list[np.ndarray], before: list[np.ndarray], what: str) -> None:
    for p, (a, b, x) in enumerate(zip(got, want, before, strict=True)):
        off, size = np.abs(a - b), np.abs(x) + np.abs(b - x) + np.abs(b)
        assert np.all(off <= CLOSE * size + 1e-12), f"{what}: parameter {p} is off by {off.max():.3g}"

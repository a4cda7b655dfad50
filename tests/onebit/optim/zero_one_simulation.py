"""Runs of 0/1 Adam that are recorded step by step, and every step of them in float64, from what was recorded before."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
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


def record_run(rank: int, size: int, case: Any) -> Recorded:
    params = case.parameters()
    found = Recorded(*([] for _ in range(9)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer = case.build(params, group_or_none(size))
        for step in range(1, case.steps + 1):
            found.kinds.append(optimizer.schedule.kind)
            take(case, rank, optimizer, params, step)
            _record(found, optimizer, params)
    return found


def _record(found: Recorded, optimizer: Any, params: list[Any]) -> None:
    states = [optimizer.state[p] for p in params]
    found.bits.append(bits(params))
    found.x.append(arrays([s.get("master", p) for p, s in zip(params, states, strict=True)]))
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
    found.m.append(decoded(exchange.replies))


class ZeroOneSimulation(Simulation):
    """The oracle for a case. Lists are in the order of the flat space."""

    def __init__(self, case: Any, ranks: int) -> None:
        super().__init__(case.but(options={"freeze_step": 0, **case.options}), ranks)
        self.has_variance = np.ones(self.layout.size, bool)
        self.all_reduce = self.simulated_all_reduce()
        options = case.options
        self.oracle = ZeroOne(
            self.ordered(arrays(case.parameters())), self.hypers, self.all_reduce, options.get("var_update_scaler", 4),
            options.get("variance_floor", 0.0), options.get("var_freeze_step"), options.get("zero_variance", "floor"),
            self.corrected,
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

    def live(self) -> np.ndarray:
        return self.layout.flatten([on.astype(np.float64) for on in self.oracle.live]) > 0


def check(case: Any, recorded: list[Recorded]) -> None:
    assert all(r.bits == recorded[0].bits and r.kinds == recorded[0].kinds for r in recorded)
    recorded = of_senders(case, recorded)
    first, sim = recorded[0], ZeroOneSimulation(case, len(recorded))
    o, compared, compressed = sim.oracle, 0, 0
    for i in range(case.steps):
        if i:
            sim.set_to(recorded, i - 1)
        kind, before = o.kind, [x.copy() for x in o.x]
        assert first.kinds[i] == ("full" if kind == "dense" else kind)
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

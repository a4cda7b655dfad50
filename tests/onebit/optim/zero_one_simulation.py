"""Every step of a recorded run of 0/1 Adam in float64, from what was recorded before: see simulation.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.onebit.optim.simulation import CLOSE, After, Simulation, assert_close
from tests.oracle.zero_one import ZeroOne, momentum_weights, roots, sync_steps, update

Arrays = list[np.ndarray]


class ZeroOneSimulation(Simulation):
    """The oracle for a case."""

    def __init__(self, case: Any, ranks: int) -> None:
        super().__init__(case, ranks)
        options = case.options
        self.all_reduce = self.messages.simulation(ranks * case.each)
        self.all_reduce.worker = self.all_reduce.worker[:ranks]
        self.oracle = ZeroOne(
            self.x, self.hypers, self.all_reduce, options.get("var_update_scaler", 4),
            options.get("variance_floor", 0.0), options.get("var_freeze_step"), options.get("zero_variance", "floor"),
            self.corrected, options.get("local_step_scaler"), options.get("local_step_clipper", 16),
        )  # fmt: skip
        self.m = self.oracle.m

    @property
    def live(self) -> np.ndarray:
        return self.layout.flatten([on.astype(np.float64) for on in self.oracle.live]) > 0

    def set_to(self, now: list[After]) -> None:
        first, o = now[0], self.oracle
        fields = first.fields
        self.remember_usual(first)
        o.x, o.v, o.step = first.x, self.shaped(fields["exp_avg_sq"]), first.step
        if first.e is None:
            o.m, o.floors = self.shaped(fields["exp_avg"]), [(0.0, 0.0)] * len(o.x)
            self.all_reduce.worker = [np.zeros(self.layout.size)] * self.ranks
            if o.kind != "dense":  # the freeze comes with the step
                o.renew_floors()
                o.fold()
        else:
            o.floors = list(zip(fields["least_root"].tolist(), fields["root_at_zero"].tolist(), strict=True))
            o.m = self.received(first)
            self.all_reduce.worker = [np.where(self.live, own.e, 0.0) for own in now]
            self.all_reduce.server = np.where(self.live, first.E, 0.0)
        if "taken" in fields:
            o.x, o.own_x = self.shaped(fields["anchor"]), [own.x for own in now]
            o.own_m = [self.shaped(own.fields["own_momentum"]) for own in now]
            o.weight_sum, o.decay = fields["weights"].tolist(), fields["decay"].tolist()
            o.reference, o.since_sync = references(fields), int(fields["taken"])
        self.x, self.m = o.x, o.m

    def step(self, step: int) -> None:
        o = self.oracle
        {"dense": o.dense, "full": o.full, "1 bit": o.one_bit}[o.kind](self.gradients(step))
        self.m = o.m

    def check_step(self, now: list[After], step: int) -> bool | None:
        kind = self.oracle.kind
        assert now[0].kind == ("full" if kind == "dense" else kind)
        if kind in ("local", "sync"):
            return self.check_alone(now, step)
        if kind == "1 bit":
            return super().check_step(now, step)
        o, fields, what, sizes = self.oracle, now[0].fields, f"step {step} ({kind})", self.sizes(step)
        self.step(step)
        assert_close(now[0].x, o.x, self.x, f"x after {what}")
        assert_close(self.shaped(fields["exp_avg_sq"]), o.v, o.v, f"v after {what}")
        if kind == "full":
            self.coming_usual = -np.abs(self.usual)
            for own, e in zip(now, self.all_reduce.worker, strict=True):
                off = np.where(self.live, np.abs(own.e - e), 0.0)
                assert np.all(off <= CLOSE * sum(sizes)), f"e after {what}"
            assert not np.any(now[0].m[self.live]), f"m after {what}"
            found = np.stack([fields["least_root"], fields["root_at_zero"]], 1)
            np.testing.assert_allclose(found, o.floors, rtol=1e-5, err_msg=f"floors after {what}")
        return None

    def check_frozen(self, fields: dict[str, np.ndarray]) -> None:
        """v, until a full step."""
        valid = self.layout.valid
        assert np.array_equal(fields["exp_avg_sq"][valid], self.layout.flatten(self.oracle.v)[valid])

    def check_moved(self, now: After) -> None:
        """The update by the m that was received."""
        o = self.oracle
        u = roots(o.v, o.weights(), o.floors, self.corrected)
        m = self.shortened(self.received(now), self.of_roots(u), self.bias1(now.step))
        moved = update(self.x, m, u, self.hypers, now.step, self.corrected)
        assert_close(now.x, moved, self.x, f"x after step {now.step}")

    def of_roots(self, u: Arrays) -> Arrays:
        """d"""
        return [
            np.where(u_p > 0, 1 / (np.where(u_p > 0, u_p, 1.0) + h.eps), 0.0)
            for u_p, h in zip(u, self.hypers, strict=True)
        ]

    def bias1(self, step: int) -> list[float]:
        return [1 / (1 - h.beta1**step) if self.corrected else 1.0 for h in self.hypers]

    def shortened_alone(self, m: Arrays) -> Arrays:
        """f m of a rank's own step."""
        o = self.oracle
        u = roots(o.v, o.weights(), o.floors, self.corrected)
        return self.shortened(m, self.of_roots(u), self.bias1(o.step), [np.abs(part) for part in m])

    def check_alone(self, now: list[After], step: int) -> bool | None:
        """A local step of every rank, and what ranks agree on after a sync."""
        o, after = self.oracle, now[0].fields
        grads, start = self.gradients(step), step == o.local_start
        before = [self.x] * self.ranks if start else list(o.own_x)
        o.local(grads, self.shortened_alone)
        summands = [self.summands(own, g) for own, g in zip(o.own_m, grads, strict=True)]
        if start:  # m is what ranks have sent: a mean whose terms may cancel
            terms = [np.concatenate([np.abs(part.decoded) for part in own]) for own in o.all_reduce.gathered]
            summands = [own + sum(terms) / len(terms) for own in summands]
        w = self.flat(momentum_weights(self.hypers, o.step, self.corrected))
        sizes = [np.abs(e) + 2 * w * own for e, own in zip(o.all_reduce.worker, summands, strict=True)]
        if not after["taken"]:
            return self.check_sync(now, sizes)
        for rank, own in enumerate(now):
            what, m = f"of rank {rank} after step {step}", self.layout.flatten(o.own_m[rank])
            assert_close(own.x, o.own_x[rank], before[rank], f"x {what}")
            off = np.where(self.layout.valid, np.abs(own.fields["own_momentum"] - m), 0.0)
            assert np.all(off <= CLOSE * summands[rank]), f"m {what}"
            off = np.where(self.live, np.abs(own.e - o.all_reduce.worker[rank]), 0.0)
            assert np.all(off <= CLOSE * sizes[rank]), f"e {what}"
            server = np.where(self.live, o.all_reduce.server, 0.0)
            assert np.all(np.abs(np.where(self.live, own.E, 0.0) - server) <= CLOSE * np.abs(server)), f"E {what}"
            assert own.fields["taken"] == o.since_sync
            np.testing.assert_allclose(own.fields["weights"], o.weight_sum, rtol=1e-6, err_msg=what)
            np.testing.assert_allclose(own.fields["decay"], o.decay, rtol=1e-6, err_msg=what)
            assert_close(self.shaped(own.fields["anchor"]), o.x, o.x, f"the anchor {what}")
        return None

    def is_farther(self, step: int) -> bool:
        """Tell whether it ends a longer way than any sync of the schedule before."""
        o = self.oracle
        assert o.var_freeze_step is not None and o.local_step_scaler is not None
        syncs = sync_steps(step, o.var_freeze_step, o.local_step_scaler, o.local_step_clipper)
        gaps = np.diff([o.var_freeze_step, *syncs])
        return syncs[-1] == step and gaps[-1] > gaps[:-1].max()

    def check_sync(self, now: list[After], sizes: list[np.ndarray]) -> bool:
        o, what = self.oracle, f"after the sync of step {now[0].step}"
        anchor, decay, server = o.x, o.decay, np.abs(o.all_reduce.server)
        o.synchronize()
        np.testing.assert_allclose(references(now[0].fields), o.reference, rtol=1e-6, err_msg=what)
        self.m = [m * reference for m, reference in zip(o.m, o.reference, strict=True)]  # as it was sent
        compared, received = self.check_exchange(now, sizes, server), self.received(now[0])
        u = roots(o.v, o.weights(), o.floors, self.corrected)
        per_step = [1 / w if w else 0.0 for w in o.reference]
        least = np.abs(self.usual)
        if self.is_farther(now[0].step):
            self.usual, least = -least, least / np.sqrt(2)
        moved = self.shortened(received, self.of_roots(u), per_step)
        self.coming_usual = np.maximum(self.coming_usual, least)
        parts = zip(o.live, decay, anchor, moved, u, self.hypers, strict=True)
        x = [np.where(on, d * a - r / (np.where(on, u_p, 1.0) + h.eps), a) for on, d, a, r, u_p, h in parts]
        m = [r / w if w else 0.0 * r for r, w in zip(received, o.reference, strict=True)]
        summed = [np.full(m_p.shape, np.abs(m_p).max(initial=0)) for m_p in m]  # messages may cancel each other
        for own in now:
            assert_close(own.x, x, anchor, f"x {what}")
            assert_close(self.shaped(own.fields["anchor"]), x, anchor, f"the anchor {what}")
            assert_close(self.shaped(own.fields["own_momentum"]), m, summed, f"m {what}")
            assert not own.fields["weights"].any() and (own.fields["decay"] == 1).all()
        return compared

    def summands(self, m: Arrays, grads: Any) -> np.ndarray:
        """The size of what a local step adds up to m."""
        fresh = [0.0 if g is None else np.abs(np.nan_to_num(g, posinf=0, neginf=0)) for g in grads]
        return self.layout.flatten([np.abs(m_p) + 2 * g_p for m_p, g_p in zip(m, fresh, strict=True)])


def references(fields: dict[str, np.ndarray]) -> list[float]:
    """W of the last sync."""
    return [1 / factor if factor else 0.0 for factor in fields["momentum_factor"].tolist()]
